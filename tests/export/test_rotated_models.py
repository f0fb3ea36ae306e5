# SPDX-License-Identifier: Apache-2.0
"""Files with rotated weights, from the declaration to the engine's logits."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from factories import tiny_model
from packed_models import assert_close, load_reference, typical_error
from sparse_bitnet.checkpoint.declared_rotation import PREFIX, read_rotation
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.checkpoint.packed import packed_layers
from sparse_bitnet.checkpoint.trained import from_pretrained, save_pretrained
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.importer import import_checkpoint
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.nn.straight_through import InputQuantizer
from sparse_bitnet.packing.rotation import Rotation

pytest.importorskip("sparse_bitnet._cpu", reason="the extension is not built")
from test_gguf_qwen35 import TERNARY, grouped, stored, ternary_qwen35, write_qwen35
from test_ternary_tables import EMBEDDING, HEAD, ternary_tables_, with_ternary_tables

from gguf_models import add_tokenizer, by_our_layout, gguf_name, write_gguf
from sparse_bitnet import _cpu
from sparse_bitnet.engine.engine import Engine

TOKENS = np.arange(7, 301, 7, np.int32).reshape(7, 6)  # where a rounding turns, others stay
SIZES: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 48}
WIDTHS = (256, 384, 512)  # 384 = 3 x 128, of o
COMPOSITE = "model.language_model."
TRANSFORM = {"name": "normalized-signed-sylvester-walsh-hadamard", "sign_mode": "explicit"}


def rotation_of(widths: tuple[int, ...], block: int, embedding: bool, head: bool) -> Rotation:
    signs = {width: np.random.default_rng(width).bytes(width // 8) for width in widths}
    return Rotation(block=block, signs=signs, embedding=embedding, head=head)


def before(model: Any, rotation: Rotation) -> Any:
    plain = copy.deepcopy(model)
    names = (*TERNARY, *([EMBEDDING] * rotation.embedding), *([HEAD] * rotation.head))
    for parameter in (value for name, value in plain.named_parameters() if name.endswith(names)):
        parameter.data = rotation.rows(parameter.data)
    return plain


def keys_of(rotation: Rotation, folded: list[str], **changes: Any) -> dict[str, Any]:
    is_shared = rotation.head and not {*folded} & {"output.weight", "out"}
    return {
        **{"version": 1 + is_shared, "tied_output": is_shared, "block_size": rotation.block},
        **{"transform": "normalized-sylvester-walsh-hadamard", "axis": "input-last-dimension"},
        **{"sign_mode": "explicit", "sign_widths": [*rotation.signs], "weight_names": folded},
        "sign_values": [int(s) for width in rotation.signs for s in rotation.values(width)],
        **({"inverse_weight_names": ["token_embd.weight"]} if rotation.embedding else {}),
        **changes,
    }


def add_keys(writer: Any, values: dict[str, Any]) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    for key, value in values.items():
        add.get(type(value), writer.add_array)(PREFIX + key, value)


@torch.no_grad()
def logits(model: Any) -> np.ndarray:
    return model(torch.from_numpy(TOKENS).long()).logits.flatten(0, 1).numpy()


def engine_logits(folder: Path, **options: Any) -> np.ndarray:
    options = {"activations": "token", "head": "stored", **options}
    engine = Engine.load(folder, kv_cache="float32", cache_tokens=7 * 64, **options)
    computed = engine.forward([(engine.new_sequence(), part) for part in TOKENS], logits="all")
    engine.close()
    return np.concatenate(computed)


def unquantised(folder: Path) -> np.ndarray:
    model, config = load_reference(folder), SparseBitConfig.parse("ternary-8:8,activation=none")
    for layer in packed_layers(model).values():
        layer.config, layer.inputs = config, InputQuantizer(config)
    return logits(model)


def exported(packed: Path, type: str, **options: Any) -> Path:
    export(packed, packed / type, ExportConfig(format=f"gguf-{type}", **options))
    return packed / type / f"model-{type.upper()}.gguf"


@pytest.mark.parametrize("case", ["qwen3 128 head", "qwen3 64 head ties", "llama 32"])
def test_a_rotated_file_computes_the_model_from_before(tmp_path: Path, case: str) -> None:
    family, block, *flags = case.split()
    model = with_ternary_tables(128, family, tie_word_embeddings="ties" in flags, **SIZES)
    rotation = rotation_of(WIDTHS, int(block), True, "head" in flags)
    folded = [gguf_name(name) for name in model.state_dict() if name.endswith("proj.weight")]
    folded += ["output.weight"] if flags == ["head"] else []

    def extra(writer: Any) -> None:
        add_tokenizer(writer)
        add_keys(writer, keys_of(rotation, folded))

    layouts = [by_our_layout(name, 128) for name in ("PQ2_0", "PTQ1_0")]
    path = write_gguf(tmp_path / "m.gguf", model, family, layouts[0], extra, tables=layouts[1])
    import_checkpoint(path, tmp_path / "packed", packed="auto")
    packed, plain = open_checkpoint(tmp_path / "packed"), before(model, rotation)
    assert (packed.rotation, packed.metadata.embeddings) == (rotation, "ternary")
    assert typical_error(unquantised(tmp_path / "packed"), logits(plain)) < 1e-5

    # Tables of floats, and a scale for each token: the engine computes what PyTorch does.
    import_checkpoint(path, tmp_path / "floats", packed="b3", embeddings="float32")
    reference = logits(load_reference(tmp_path / "floats"))
    for isa in _cpu.supported_isas(for_tests=True):
        assert_close(engine_logits(tmp_path / "floats", isa=isa), reference)
    coarser = engine_logits(tmp_path / "packed", activations="auto", head="auto")  # which is i2
    assert typical_error(coarser, reference) < 0.05
    with pytest.raises(UserError, match="has rotated weights, which only packed folders hold"):
        import_checkpoint(path, tmp_path / "masters")
    with pytest.raises(UserError, match="has rotated weights, which readers of gguf-q2_0"):
        exported(tmp_path / "packed", "q2_0")
    export(tmp_path / "packed", tmp_path / "dense", ExportConfig(format="dense", embeddings="f32"))
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert typical_error(logits(dense), logits(plain)) < 1e-5
    written = (tmp_path / "packed" / "model.safetensors").read_bytes()
    for type in ("pq2_0", "ptq1_0"):
        import_checkpoint(exported(tmp_path / "packed", type), tmp_path / type, packed="auto")
        assert (tmp_path / type / "model.safetensors").read_bytes() == written


def test_a_model_trained_in_a_rotated_basis_packs(tmp_path: Path) -> None:
    model = tiny_model("qwen3", vocab_size=512, hidden_size=128)
    format = "ternary-6:8,quantizer=per-group:size=32,activation=int8-hadamard:block=32"
    save_pretrained(convert_(model, format), tmp_path / "final")
    pack_checkpoint(tmp_path / "final", tmp_path / "packed", embeddings="float32")
    trained = logits(from_pretrained(tmp_path / "final").eval())
    np.testing.assert_array_equal(logits(load_reference(tmp_path / "packed")), trained)
    for isa in _cpu.supported_isas(for_tests=True):
        assert_close(engine_logits(tmp_path / "packed", isa=isa), trained)
    with pytest.raises(UserError, match="readers of bitnet do not support: use --to dense"):
        export(tmp_path / "final", tmp_path / "bitnet", ExportConfig(format="bitnet"))
    export(tmp_path / "packed", tmp_path / "dense", ExportConfig(format="dense", embeddings="f32"))
    dense = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"))
    assert typical_error(unquantised(tmp_path / "packed"), dense) < 1e-5


@pytest.mark.parametrize("ties", [True, False])
def test_rotated_qwen35_keeps_the_columns_of_grouped_heads(tmp_path: Path, ties: bool) -> None:
    model = ternary_tables_(ternary_qwen35(128, tie_word_embeddings=ties), 128)
    rotation = rotation_of((256, 512, 768), 64, True, True)
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    layers = [stored(name, state[name])[0] for name in state if name.endswith(TERNARY)]
    tables = {stored(name, state[name])[0]: state[name] for name in (EMBEDDING, HEAD)[: 2 - ties]}

    def write(writer: Any, name: str, values: np.ndarray) -> None:
        if name == layers[0]:
            add_keys(writer, keys)
            for table in tables:
                by_our_layout("PTQ1_0", 128)(writer, table, tables[table])
        by_our_layout("PQ2_0", 128)(writer, name, grouped(values) if "ssm_out" in name else values)

    keys = keys_of(rotation, [*layers, *list(tables)[1:]], gdn_v_grouped=True)
    path = write_qwen35(tmp_path / "m.gguf", model, write, dict.fromkeys(tables), tokenizer=True)
    import_checkpoint(path, tmp_path / "packed", packed="i2", embeddings="float32")
    assert typical_error(unquantised(tmp_path / "packed"), logits(before(model, rotation))) < 1e-4
    assert_close(engine_logits(tmp_path / "packed"), logits(load_reference(tmp_path / "packed")))
    again = open_checkpoint(exported(tmp_path / "packed", "ptq1_0"))
    assert (again.rotation, len(again.layers)) == (rotation, len(layers))
    for layer in again.layers:
        np.testing.assert_array_equal(again.effective(layer), state[f"{layer}.weight"])
    keys |= {"gdn_v_grouped": False}
    with pytest.raises(UserError, match=r"not supported: .*gdn_v_grouped is not true"):
        open_checkpoint(write_qwen35(path, model, write, dict.fromkeys(tables)))


DAMAGED: dict[str, list[Any]] = {
    "version": [3, 2, 0, True, None],
    "block_size": [24, 0, 64, True, None],
    **{"transform": ["other", None], "axis": ["output", None], "seed": [7, None]},
    "sign_mode": ["random", "identity", None],
    "sign_widths": [[32], [32, 32], [32, 64.0], [32, 64, -96], 3, None],
    "sign_values": [[1] * 95, [1] * 95 + [0], [1] * 95 + ["1"], "1", None],
    "weight_names": [["a", "out"], ["a", "b", "c"], ["a", "b", 3], "a", None],
    **{"inverse_weight_names": [["out"], "table", None], "gdn_v_grouped": ["yes", 1, None]},
    "tied_output": [True, 1, None],
}


def read(ties: bool = False, **changes: Any) -> Rotation:
    changes = {"inverse_weight_names": ["table"], **changes}
    values = keys_of(rotation_of((32, 64), 16, True, True), ["a", "b", "out"], **changes)
    tables = ["table"] if ties else ["table", "out"]
    return read_rotation(values, "f: ", layers={"a": 32, "b": 64}, tables=tables)


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, each in DAMAGED.items() for v in each])
def test_keys_that_are_damaged_missing_or_unknown_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=r"^f: (sign_)?" + key.removeprefix("sign_")):
        read(**{key: value})


def test_unrotated_tables_and_shared_heads_are_read() -> None:
    assert read() == rotation_of((32, 64), 16, True, True)
    assert not read(weight_names=["a", "b"]).head
    assert not read(inverse_weight_names=[]).embedding
    assert read(sign_mode="identity", sign_widths=[], sign_values=[]).signs[32] == bytes(4)
    assert read(True, version=2, tied_output=True, weight_names=["a", "b"]).head
    with pytest.raises(UserError, match=r"^f: version is 1"):
        read(True, weight_names=["a", "b"])


def manifest_of(rotation: Rotation, tensors: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        **{"schema_version": 1, "kind": "hadamard-weight-fold", "tensors": tensors},
        **{"status": "requires-matching-runtime", "transform": TRANSFORM | {"block_size": 64}},
        "signs": {str(w): rotation.values(w).astype(int).tolist() for w in rotation.signs},
    }


def test_a_folder_of_rotated_floats_is_imported(tmp_path: Path) -> None:
    model = with_ternary_tables(128, "llama", tie_word_embeddings=False, **SIZES)
    rotation = rotation_of(WIDTHS, 64, True, True)
    model.save_pretrained(tmp_path)
    names = [name for name in model.state_dict() if name.endswith("proj.weight")]
    tensors: list[dict[str, Any]] = [{"name": name, "axis": -1} for name in [*names, HEAD]]
    tensors += [{"name": EMBEDDING, "axis": -1, "role": "inverse-after-lookup"}]
    manifest, path = manifest_of(rotation, tensors), tmp_path / "hadamard_packing.json"
    path.write_text(json.dumps(manifest))
    import_checkpoint(tmp_path, tmp_path / "packed", packed="i2")
    assert open_checkpoint(tmp_path / "packed").rotation == rotation
    assert typical_error(unquantised(tmp_path / "packed"), logits(before(model, rotation))) < 1e-5
    records = [[{**tensors[0], key: 7}, *tensors[1:]] for key in ("axis", "role", "x")]
    renamed = [{**each, "name": each["name"].replace("model.", COMPOSITE)} for each in tensors]
    for key, values in {
        **{"schema_version": [0, 3, 4, None], "kind": ["other", None], "status": [None]},
        **{"extra": [1], "tied_output": [True], "signs": [{}, {"256": [1]}, 3, {"x": []}]},
        "transform": [TRANSFORM, 3, manifest["transform"] | {"seed": 1}],
        "tensors": [tensors[1:], renamed, [3], None, *records],
    }.items():
        for value in values:
            path.write_text(json.dumps(manifest | {key: value}))
            with pytest.raises(UserError, match=r"hadamard_packing\.json: "):
                open_checkpoint(tmp_path)


def test_a_manifest_of_qwen35_has_the_names_of_the_composite_model(tmp_path: Path) -> None:
    model, rotation = ternary_qwen35(128), rotation_of((256, 512, 768), 64, False, False)
    for block in model.model.layers[:-1]:
        torch.nn.init.normal_(block.linear_attn.in_proj_a.weight)  # as dense as the other gate
    model.save_pretrained(tmp_path)
    names = [name for name in model.state_dict() if name.endswith(TERNARY)]
    tensors = [{"name": name.replace("model.", COMPOSITE), "axis": -1} for name in names]
    manifest = manifest_of(rotation, tensors)
    (tmp_path / "hadamard_packing.json").write_text(json.dumps(manifest))
    assert open_checkpoint(tmp_path).rotation == rotation
