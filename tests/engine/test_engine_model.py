# SPDX-License-Identifier: Apache-2.0
"""Models that the CPU engine refuses to load, each with one line that says why."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from factories import edit_json
from packed_models import make_packed
from sparse_bitnet.engine.architecture import read_architecture
from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.tensor_file import TensorFile, TensorFileWriter, TensorSpec

pytest.importorskip("sparse_bitnet._cpu")
from sparse_bitnet.engine.engine import Engine

LAYER, ATTENTION = "model.layers.1.mlp.up_proj", "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_packed(tmp_path_factory.mktemp("original"), embeddings="bf16")


@pytest.fixture
def packed(tmp_path: Path, original: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "packed"))


def load(folder: Path) -> None:
    Engine.load(folder, threads=1, weight_format="i2").close()


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], **stated: str) -> None:
    """The tensors after `change`, in a file whose checksums are right and that states this besides."""
    path = folder / "model.safetensors"
    file = TensorFile(path)
    tensors = {name: file.tensor(name).clone() for name in file.entries}
    change(tensors)
    metadata = {key: value for key, value in file.metadata.items() if key != "crc32"} | stated
    specs = [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    path.unlink()
    with TensorFileWriter(path, specs, metadata) as writer:
        for name, value in tensors.items():
            writer.write(name, [value])


SLIDING, ANY = {"layer_types": ["sliding_attention"] * 2}, {"layer_types": ...}
SLIDES = {"use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "hunyuan_v1_dense, qwen3_5_text, not 'gemma'; use --engine"),
        ({"hidden_act": "gelu"}, "not support activation 'gelu'; use --engine transformers"),
        ({**SLIDING, "model_type": "mistral", "sliding_window": None}, "sliding_window is not set"),
        ({"layer_types": ["linear_attention"] * 2}, "layers without full or sliding-window"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', not a list"),
        (
            {**SLIDES, "layer_types": ["sliding_attention"], "sliding_window": 32},
            "layer_types are 1, num_hidden_layers is 2",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types are 1, num_hidden_layers is 2"),
        ({"layer_types": []}, "layer_types are 0, num_hidden_layers is 2"),
        (
            {**SLIDING, "sliding_window": 9},
            "layer_types has sliding_attention, use_sliding_window is not set",
        ),
        ({**SLIDES, "sliding_window": 0, **ANY}, "sliding_window is 0, not a positive"),
        ({"is_causal": False}, "not support config.json's is_causal"),
        ({"per_layer_config": {"0": {"rms_norm_eps": 0.5}}}, "config.json's per_layer_config"),
        ({"model_type": ["qwen2"]}, r"not \['qwen2'\]; use --engine"),
        ({"hidden_act": {}}, r"not support activation {}; use --engine transformers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a positive number"),
        ({"hidden_size": 2**31 - 1}, "hidden_size is above 131,072"),
        ({"head_dim": 2**30}, "head_dim is above 1,024"),
        ({"head_dim": 1026}, "head_dim is above 1,024"),
        ({"hidden_size": 2**17 + 8}, "hidden_size is above 131,072"),
        ({"max_position_embeddings": 2**24 + 1}, "max_position_embeddings is above 16,777,216"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000+, not a positive number"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps is 1e[+]300, not a positive number"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}}, "rope_theta is 10+"),
        ({"mlp_bias": True}, "not support biases in the feed-forward part"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope type 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor is None"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "rope_theta is -1"),
        ({"hidden_size": ...}, "hidden_size is None"),
        ({"hidden_size": 128}, r"q_proj\.weight_packed is uint8 \[64, 16\], the model needs"),
        ({"num_hidden_layers": 3, **ANY}, r"tensor model\.layers\.2\.\S+ is missing"),
        ({"num_hidden_layers": 2**31 - 1}, r"num_hidden_layers is \S+, more than "),
        ({"num_hidden_layers": 600, **ANY}, r"tensor model\.layers\.2\.\S+ is missing"),
        (
            {"num_hidden_layers": 1, **ANY},
            r"tensor model\.layers\.1\.\S+ is not part of the qwen2 model",
        ),
        ({"vocab_size": 97}, r"embed_tokens\.weight is bfloat16 \[96, 64\], the model needs"),
        ({"num_key_value_heads": 3}, "do not fit"),
        ({"num_attention_heads": 2048, "num_key_value_heads": 1, "head_dim": 2}, "do not fit"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"model_type": "qwen3"}, r"q_norm|k_norm|q_proj"),
        ({"tie_word_embeddings": False}, r"tensor lm_head\.weight is missing"),
    ],
)
def test_a_config_that_contradicts_the_file_is_refused(
    packed: Path, changes: dict[str, Any], message: str
) -> None:
    edit_json(packed / "config.json", **changes)
    with pytest.raises(UserError, match=message):
        load(packed)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral"}, (9, 9, 9)),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "qwen2"}, ()),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}, (0, 0, 9)),
        ({"model_type": "qwen2", "use_sliding_window": True}, (0, 0, 0)),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}
            | {"sliding_window": ...},
            (0, 0, 4096),
        ),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 3}, ()),
        ({"model_type": "llama", "use_sliding_window": True, "max_window_layers": 0}, ()),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 2}, (9, 0, 9)),
    ],
)
def test_attention_windows_are_read_per_layer(
    changes: dict[str, Any], windows: tuple[int, ...]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 96}
    sizes |= {"num_hidden_layers": 3, "max_position_embeddings": 64, "sliding_window": 9}
    # As transformers 4 wrote Gemma's two bases.
    values = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    values |= {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}
    config = {name: value for name, value in (sizes | values | changes).items() if value is not ...}
    shape = read_architecture(config, "config.json")
    assert shape.windows == windows
    bases = [
        rope.inverse_frequencies[1] ** -shape.head_dim for rope in (shape.rope, shape.local_rope)
    ]
    is_gemma = changes["model_type"] == "gemma3_text"
    np.testing.assert_allclose(np.sqrt(bases), [1e6, 1e4 if is_gemma else 1e6], rtol=1e-3)
    if windows:
        with pytest.raises(UserError, match="num_hidden_layers is above 4,096"):
            read_architecture(config | {"num_hidden_layers": 1 << 30}, "")


NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, 1, -1, 2**24 + 1, 2**31 - 1, 2**63, 10**400, 1e38, 1e308, 5e-324]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
ROPE_FIELDS = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "llama3", "yarn", "su"])},
    optional=dict.fromkeys(
        (
            "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor",
            "original_max_position_embeddings", "mscale", "mscale_all_dim", "beta_fast", "beta_slow",
            "truncate", "partial_rotary_factor",
        ),
        NUMBERS | st.floats(0.1, 10) | VALUES,
    ),
)  # fmt: skip


@settings(
    max_examples=int(os.environ.get("SPARSE_BITNET_FUZZ", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_config_is_read_or_refused_in_one_line(original: Path, data: st.DataObject) -> None:
    """A config that is read keeps to the limits of the C++ decoder."""
    config = json.loads((original / "config.json").read_text())
    if data.draw(st.booleans()):
        config["rope_parameters"] = data.draw(ROPE_FIELDS)
    for name in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=2)):
        config[name] = data.draw(VALUES)
    sizes, message = None, ""
    try:
        sizes = read_architecture(config, "config.json")
    except UserError as error:
        message = str(error)
    if sizes is None:
        assert message.startswith("config.json")
        assert "\n" not in message
        return
    assert max(sizes.hidden, sizes.intermediate, sizes.heads * sizes.head_dim) <= 1 << 23
    assert sizes.positions <= 1 << 24
    assert len(sizes.rope.inverse_frequencies) * 2 == sizes.head_dim <= 1024
    assert np.isfinite(sizes.rope.inverse_frequencies).all()
    assert np.isfinite(np.float32([sizes.norm_epsilon, sizes.rope.scaling])).all()


def test_folders_that_are_not_packed_are_refused(tmp_path: Path, original: Path) -> None:
    with pytest.raises(UserError, match=r"pack it first: sparse-bitnet pack \S+ OUT"):
        load(original.parent / "trained")
    with pytest.raises(
        UserError, match="neither a run folder with a checkpoint nor a model folder"
    ):
        load(original.parent)
    with pytest.raises(UserError, match="no such checkpoint: no folder or file"):
        load(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not readable as JSON"):
        load(tmp_path)


def test_every_damaged_tensor_is_named(packed: Path) -> None:
    path = packed / "model.safetensors"
    intact = path.read_bytes()
    load(packed)
    for name, entry in TensorFile(path).entries.items():
        raw = bytearray(intact)
        raw[(entry.begin + entry.end) // 2] ^= 4
        path.write_bytes(raw)
        with pytest.raises(UserError, match=f"tensor {name} is damaged"):
            load(packed)
    path.write_bytes(intact[:-1])
    with pytest.raises(UserError, match="truncated"):
        load(packed)


def test_tensors_that_contradict_the_config_are_named(packed: Path, original: Path) -> None:
    scale, packed_name = f"{LAYER}.weight_scale", f"{LAYER}.weight_packed"

    def invalid(tensors: dict[str, torch.Tensor]) -> None:
        tensors[packed_name][0, 0] = 255

    for change, message in (
        (lambda tensors: tensors.pop(packed_name), f"tensor {packed_name} is missing"),
        (lambda tensors: tensors.pop("model.norm.weight"), "norm.weight is missing"),
        (lambda tensors: tensors.update(more=torch.zeros(1)), "tensor more is not part"),
        (lambda tensors: tensors[scale].fill_(0), f"tensor {scale} has 0.0, but scales are"),
        (lambda tensors: tensors[scale].fill_(float("nan")), "not finite"),
        (lambda tensors: tensors["model.norm.weight"].fill_(float("inf")), "not finite"),
        (lambda tensors: tensors["model.embed_tokens.weight"].fill_(float("nan")), "not finite"),
        (lambda of: of.update({scale: torch.zeros(2)}), r"float32 \[2\], not scales for a matrix"),
        (lambda tensors: tensors.update({scale: tensors[scale].half()}), "float16"),
        (invalid, f"tensor {packed_name} is damaged or not i2: a two-bit field holds 3"),
    ):
        shutil.copyfile(original / "model.safetensors", packed / "model.safetensors")
        rewrite(packed, change)
        with pytest.raises(UserError, match=message):
            load(packed)


@pytest.mark.parametrize("embeddings", ["float32", "bf16"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_table_that_stays_as_it_is_has_finite_values(
    tmp_path: Path, embeddings: str, value: float
) -> None:
    folder = make_packed(tmp_path, embeddings=embeddings, tie_word_embeddings=False)
    rewrite(folder, lambda tensors: tensors["model.embed_tokens.weight"][-1, -1:].fill_(value))
    with pytest.raises(UserError, match=r"embed_tokens\.weight .*not finite"):
        load(folder)


def test_a_ternary_table_has_whole_groups(tmp_path: Path) -> None:
    folder = make_packed(tmp_path, hidden_size=40, intermediate_size=48, embeddings="bf16")

    def ternary(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = torch.full((96, 16), 0b01010101, dtype=torch.uint8)
        tensors["model.embed_tokens.weight_scale"] = torch.ones(96, 1)

    config = json.loads((folder / "config.json").read_text())
    entry = config["quantization_config"] | {"embeddings": "ternary"}
    rewrite(folder, ternary, embeddings="ternary")
    edit_json(folder / "config.json", quantization_config=entry)
    with pytest.raises(
        UserError, match=r"weight_scale is float32 \[96, 1\], the model needs .* \[96, 2\]"
    ):
        load(folder)


def test_floats_of_other_types_are_accepted(packed: Path, original: Path) -> None:
    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        for name, value in tensors.items():
            if value.dtype == torch.float32 and not name.endswith("_scale"):
                tensors[name] = value.bfloat16()

    rewrite(packed, narrow)
    assert TensorFile(packed / "model.safetensors").entries["model.norm.weight"].dtype == "BF16"
    load(packed)


def test_keys_with_outliers_stay_in_float16(packed: Path) -> None:
    for name, kv_cache in (("", "int8"), ("q_proj.bias", "int8"), ("k_proj.bias", "float16")):
        if name:
            rewrite(packed, lambda tensors, n=name: tensors[f"{ATTENTION}.{n}"][1:2].fill_(-90.0))
        engine = Engine.load(packed, threads=1, weight_format="i2")
        assert engine.kv_cache == kv_cache
        engine.close()


def test_unsupported_models_name_the_transformers_engine(tmp_path: Path) -> None:
    folder = make_packed(tmp_path / "a", format="ternary-6:8,activation=none")
    with pytest.raises(UserError, match="activation=none; use --engine transformers"):
        load(folder)
    folder = make_packed(tmp_path / "b", dense="mlp.up_proj")
    with pytest.raises(UserError, match=r"up_proj.* is not ternary, .* --engine transformers"):
        load(folder)
    folder = make_packed(tmp_path / "c", "gpt_neox")
    with pytest.raises(UserError, match="not 'gpt_neox'; use --engine transformers"):
        load(folder)
