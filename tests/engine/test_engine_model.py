# SPDX-License-Identifier: Apache-2.0
"""Models that the CPU engine refuses to load, each with one line that says why."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from factories import edit_json, edit_quantization
from packed_models import edit_packed, make_packed
from sparse_bitnet.engine.architecture import read_architecture
from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.tensor_file import TensorFile

pytest.importorskip("sparse_bitnet._cpu")
from sparse_bitnet.engine.engine import Engine

LAYER, ATTENTION = "model.layers.1.mlp.up_proj", "model.layers.0.self_attn"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_packed(tmp_path_factory.mktemp("original"), embeddings="bf16")


@pytest.fixture
def packed(tmp_path: Path, original: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "packed"))


def load(folder: Path) -> None:
    Engine.load(folder, threads=1, weight_format="i2").close()


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
        ({"head_dim": 1026}, "head_dim is above 1,024"),
        ({"hidden_size": 2**17 + 8}, "hidden_size is above 131,072"),
        ({"max_position_embeddings": 2**24 + 1}, "max_position_embeddings is above 16,777,216"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000+, not a positive number"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps is 1e[+]300, not a positive number"),
        ({"mlp_bias": True}, "not support biases in the feed-forward part"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope type 'longrope'"),
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
def test_attention_windows_are_read_per_layer(changes: dict[str, Any], windows: tuple[int, ...]):
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
    with pytest.raises(UserError, match="neither a run folder with a checkpoint nor a model"):
        load(original.parent)
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
    first = torch.tensor([[0]])
    for name, change, message in (
        (packed_name, None, f"tensor {packed_name} is missing"),
        ("model.norm.weight", None, "norm.weight is missing"),
        ("more", torch.zeros(1), "tensor more is not part"),
        (scale, torch.zeros_like, f"tensor {scale} has 0.0, but scales must be"),
        (scale, lambda values: values * torch.nan, "not finite"),
        ("model.norm.weight", lambda values: values + torch.inf, "not finite"),
        (EMBEDDING, lambda values: values * torch.nan, "not finite"),
        (scale, torch.zeros(2), r"float32 \[2\], not scales for a matrix"),
        (scale, torch.Tensor.half, "float16"),
        (
            packed_name,
            lambda values: values.scatter(0, first, 255),
            f"tensor {packed_name} is damaged or not i2: a two-bit field holds 3",
        ),
    ):
        shutil.copyfile(original / "model.safetensors", packed / "model.safetensors")
        edit_packed(packed, {name: change})
        with pytest.raises(UserError, match=message):
            load(packed)


@pytest.mark.parametrize("embeddings", ["float32", "bf16"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_table_that_stays_as_it_is_has_finite_values(
    tmp_path: Path, embeddings: str, value: float
) -> None:
    folder = make_packed(tmp_path, embeddings=embeddings, tie_word_embeddings=False)
    last = torch.tensor([-1])
    edit_packed(
        folder, {EMBEDDING: lambda rows: rows.index_put((last, last), rows.new_tensor(value))}
    )
    with pytest.raises(UserError, match=r"embed_tokens\.weight .*not finite"):
        load(folder)


def test_a_ternary_table_has_whole_groups(tmp_path: Path) -> None:
    folder = make_packed(tmp_path, hidden_size=40, intermediate_size=48, embeddings="bf16")

    codes = torch.full((96, 16), 0b01010101, dtype=torch.uint8)
    tables = {EMBEDDING: codes, f"{EMBEDDING}_scale": torch.ones(96, 1)}
    edit_packed(folder, tables, embeddings="ternary")
    edit_quantization(folder, embeddings="ternary")
    with pytest.raises(
        UserError, match=r"weight_scale is float32 \[96, 1\], the model needs .* \[96, 2\]"
    ):
        load(folder)


def test_floats_of_other_types_are_accepted(packed: Path) -> None:
    entries = TensorFile(packed / "model.safetensors").entries.items()
    floats = [n for n, entry in entries if entry.dtype == "F32" and not n.endswith("_scale")]
    edit_packed(packed, dict.fromkeys(floats, torch.Tensor.bfloat16))
    assert TensorFile(packed / "model.safetensors").entries["model.norm.weight"].dtype == "BF16"
    load(packed)


def test_keys_with_outliers_stay_in_float16(packed: Path) -> None:
    def with_outlier(bias: torch.Tensor) -> torch.Tensor:
        return bias.index_fill(0, torch.tensor([1]), -90.0)

    for name, kv_cache in (("", "int8"), ("q_proj.bias", "int8"), ("k_proj.bias", "float16")):
        if name:
            edit_packed(packed, {f"{ATTENTION}.{name}": with_outlier})
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
