# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 in GGUF files: blocks of two kinds, value heads in another order, tensors that are not read."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from factories import edit_json, logits_of, tiny_model
from gguf_models import (
    TOKENS,
    Write,
    add_metadata,
    add_tokenizer,
    by_our_layout,
    gguf_name,
    gguf_writer,
    quantised,
)
from small_models import TEXT
from sparse_bitnet.checkpoint.config_fields import LINEAR_SIZES
from sparse_bitnet.checkpoint.gguf_file import GgufFile
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, open_checkpoint
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.data.tokenizer import train_tokenizer
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.importer import import_checkpoint
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.export.verify import check_packed
from sparse_bitnet.nn.convert import convert_

KEYS, SHARED, HEAD = 2, 3, 128
SIZES: dict[str, Any] = {
    **{"vocab_size": 392, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    **{"linear_key_head_dim": HEAD, "linear_value_head_dim": HEAD},
    **{"linear_num_key_heads": KEYS, "linear_num_value_heads": KEYS * SHARED},
}
TERNARY = ("proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")
Q2_0 = by_our_layout("Q2_0", 128)


def tiled(values: np.ndarray, size: int) -> np.ndarray:
    """Value heads of `size` rows: first those that come first for their key head."""
    by_key = values.reshape(KEYS, SHARED, size, *values.shape[1:])
    return by_key.swapaxes(0, 1).reshape(values.shape)


def grouped(values: np.ndarray) -> np.ndarray:
    """The columns of tiled value heads as in transformers."""
    by_place = values.reshape(len(values), SHARED, KEYS, HEAD)
    return by_place.swapaxes(1, 2).reshape(values.shape)


def ternary_qwen35(group: int, **changes: Any) -> Any:
    """A random model whose matrices are ternary, with a scale for every `group` weights in the file."""
    model = tiny_model("qwen3_5_text", **(SIZES | changes))
    for name, parameter in model.named_parameters():
        if name.endswith(TERNARY):
            codes = torch.randint(-1, 2, parameter.shape).unflatten(1, (-1, group))
            scales = (torch.rand(*codes.shape[:2], 1) * 0.1 + 0.02).half().float()
            values = (codes * scales).flatten(1).numpy()
            values = grouped(values) if name.endswith("out_proj.weight") else values
            parameter.data = torch.from_numpy(np.ascontiguousarray(values))
        elif parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        elif name.endswith("in_proj_a.weight"):
            parameter.data.sign_()  # ternary too, which other tools' files may have
    return model.eval()


def stored(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """Name and values of a tensor as converters of llama.cpp write them."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        values = values + np.float32(1)
    block, _, part = name.rpartition("linear_attn.")
    keys = 2 * KEYS * HEAD
    match part.removesuffix(".weight"):
        case "A_log":
            values = np.float32(-1) * np.exp(values.astype(np.float64)).astype(np.float32)
            return f"blk.{block.split('.')[2]}.ssm_a", tiled(values, 1)
        case "dt_bias":
            return f"blk.{block.split('.')[2]}.ssm_dt.bias", tiled(values, 1)
        case "in_proj_qkv" | "conv1d":
            values = values.squeeze()
            values = np.concatenate([values[:keys], tiled(values[keys:], HEAD)])
        case "in_proj_z":
            values = tiled(values, HEAD)
        case "in_proj_a" | "in_proj_b":
            values = tiled(values, 1)
        case "out_proj":
            values = tiled(values.T, HEAD).T
    name = gguf_name(name).replace("ffn_norm", "post_attention_norm")
    return name, np.ascontiguousarray(values)


METADATA: dict[str, Any] = {
    **{"attention.value_length": 64, "rope.dimension_count": 16},
    "rope.dimension_sections": [3, 3, 2, 0],
    **{"ssm.conv_kernel": 4, "ssm.state_size": HEAD, "ssm.group_count": KEYS},
    **{"ssm.time_step_rank": KEYS * SHARED, "ssm.inner_size": KEYS * SHARED * HEAD},
}


def write_qwen35(
    path: Path, model: Any, write: Write | None, changes: Any = None, *, tokenizer: bool = False
) -> Path:
    """Write what a converter of llama.cpp writes: ternary matrices through `write`, else all as floats.

    `changes`: metadata key -> another value; name of a tensor -> an array; None leaves either out.
    """
    changes = changes or {}
    tensors = {name: value for name, value in changes.items() if isinstance(value, np.ndarray)}
    fields = {name: value for name, value in changes.items() if name not in tensors}
    with gguf_writer(path, "qwen35") as writer:
        if tokenizer:
            add_tokenizer(writer)
        add_metadata(writer, model.config, METADATA | fields)
        for own, tensor in model.state_dict().items():
            if own == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            name, values = stored(own, tensor.numpy())
            if own.endswith(TERNARY) and write is not None:
                write(writer, name, values)
            elif name not in changes:
                writer.add_tensor(name, values)
        for name, values in tensors.items():
            writer.add_tensor(name, values)
    return path


def assert_same_model(source: Any, model: Any) -> None:
    """Require the model's matrices, and its other tensors up to a rounding of the decays."""
    assert {f"{name}.weight" for name in source.layers} == {
        name for name in model.state_dict() if name.endswith(TERNARY)
    }
    for name, expected in model.state_dict().items():
        layer = name.removesuffix(".weight")
        if layer in source.layers:
            values = torch.as_tensor(source.ternary(layer).values())
            assert torch.equal(values, expected), name
        elif name in source.others:
            values = torch.as_tensor(source.read(name))
            torch.testing.assert_close(values, expected, atol=5e-7, rtol=0, msg=name)


@pytest.mark.parametrize(("group", "write"), [(256, quantised("TQ2_0")), (128, Q2_0)])
def test_heads_and_their_scales_return_to_their_order(tmp_path: Path, group: int, write: Write):
    """A block of 256 weights spans two heads, which lie apart in transformers. Our own file of the model
    holds what a converter writes."""
    model = ternary_qwen35(group, tie_word_embeddings=group == 256)
    path = write_qwen35(tmp_path / "model.gguf", model, write, tokenizer=True)
    assert_same_model(open_checkpoint(path, "foreign"), model)
    with pytest.raises(UserError, match=r"\(a ternary GGUF file\) is not packed: it is"):
        open_checkpoint(path, "packed")
    import_checkpoint(path, tmp_path / "packed", packed="i2", embeddings="float32")
    assert_same_model(open_checkpoint(tmp_path / "packed"), model)
    export(tmp_path / "packed", tmp_path / "out", ExportConfig(format="gguf-q2_0"))
    ours, theirs = GgufFile(next((tmp_path / "out").glob("*.gguf"))), GgufFile(path)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name in theirs.tensors:
        expected = theirs.floats(name)
        places = 3 if name.startswith(("token_embd", "output.")) else 6
        np.testing.assert_array_almost_equal(ours.floats(name), expected, places, name)


@pytest.mark.parametrize("rotated", [16, 64])
def test_a_file_of_floats_is_the_same_model(tmp_path: Path, rotated: int) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": rotated / 64}
    model = tiny_model("qwen3_5_text", rope_parameters=rope, **SIZES).eval()
    sizes = {"rope.dimension_count": rotated}
    source = find_checkpoint(write_qwen35(tmp_path / "model.gguf", model, None, sizes))
    assert source.kind == "dense"
    ours, theirs = logits_of(source.load().eval(), TOKENS), logits_of(model, TOKENS)
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("format", ["gguf-tq2_0", "compressed-tensors-w2a8"])
def test_sizes_that_a_config_leaves_out_are_those_of_transformers(tmp_path: Path, format: str):
    model = convert_(tiny_model("qwen3_5_text", vocab_size=320, **LINEAR_SIZES), "ternary-8:8")
    save_pretrained(model, tmp_path / "whole", train_tokenizer(iter([TEXT]), 300))
    shutil.copytree(tmp_path / "whole", tmp_path / "short")
    edit_json(tmp_path / "short" / "config.json", **dict.fromkeys(LINEAR_SIZES, ...))
    written = []
    for name in ("whole", "short"):
        export(tmp_path / name, tmp_path / f"{name}-out", ExportConfig(format=format))
        (path,) = (tmp_path / f"{name}-out").glob("model*")
        written.append(path.read_bytes().replace(b"whole", b"short"))
    assert written[0] == written[1]
    pack_checkpoint(tmp_path / "short", tmp_path / "packed")
    assert check_packed(tmp_path / "short", tmp_path / "packed") >= 0


@pytest.mark.parametrize("is_listed", [True, False])
def test_layers_of_any_order_and_tensors_that_are_not_read(tmp_path: Path, is_listed: bool) -> None:
    """Layers that predict several tokens and an image encoder are ignored by name, nothing else. Ollama's
    files, which list no kinds, count key-value heads for each layer and have another name for dt_bias."""
    kinds = ["full_attention", "linear_attention"] * 2 if is_listed else None
    model = ternary_qwen35(128, layer_types=kinds)
    unread: dict[str, Any] = {"blk.4.nextn.eh_proj.weight": np.ones((256, 512), np.float32)}
    unread |= {name: np.ones(4, np.float32) for name in ("blk.4.ssm_a", "v.post_ln.weight")}
    changes: dict[str, Any] = {"block_count": 5, "nextn_predict_layers": 1}
    listed: dict[str, Any] = {"attention.recurrent_layers": [False, True, False, True, False]}
    if not is_listed:
        listed = {"attention.head_count_kv": [0, 0, 0, 2], "ssm.v_head_reordered": 1, "vision.x": 1}
    biases = [n for n in model.state_dict() if n.endswith("dt_bias") and not is_listed]
    for own, values in (stored(name, model.state_dict()[name].numpy()) for name in biases):
        unread |= {own: None, own.removesuffix(".bias"): values}
    path = write_qwen35(tmp_path / "model.gguf", model, Q2_0, changes | listed | unread)
    source = open_checkpoint(path)
    assert_same_model(source, model)
    assert source.config["layer_types"] == model.config.layer_types
    for name in ("blk.3.nextn.enorm.weight", "x.weight"):
        more = changes | listed | {name: np.ones(4, np.float32)}
        path = write_qwen35(tmp_path / "other.gguf", model, Q2_0, more)
        with pytest.raises(UserError, match=f"tensor {name} is not supported"):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.state_size": None}, "ssm.state_size is None, not a positive size"),
        ({"ssm.inner_size": 512}, "6 value heads of 128 values fit neither"),
        ({"ssm.group_count": 4}, "nor 4 key heads"),
        ({"ssm.conv_kernel": 3}, r"blk.0.ssm_conv1d.weight is \[1280, 4\], its metadata needs"),
        ({"attention.recurrent_layers": [True]}, r"recurrent_layers is \[True\], not 4 flags"),
        ({"full_attention_interval": 2}, "tensor blk.1.attn_gate.weight is not supported"),
        ({"nextn_predict_layers": 4}, "nextn_predict_layers is above 3"),
        ({"rope.dimension_count": 15}, "rope.dimension_count is 15, but"),
        ({"attention.head_count_kv": [2, 0, 0, 2]}, r"kv is \[2, 0, 0, 2\], not \[0, 0, 0, 2\]"),
        ({"ssm.v_head_reordered": 0}, "v_head_reordered = 0 is not supported; True is"),
        ({"ssm.dt_b_c_rms": [1]}, "ssm.dt_b_c_rms = .* is not supported"),
        ({"blk.1.ssm_a": np.float32([-1, -1, 0, -1, -1, -1])}, "decay is not a negative number"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_qwen35(tmp_path / "model.gguf", ternary_qwen35(128), Q2_0, changes)
    with pytest.raises(UserError, match=message):
        open_checkpoint(path).read("model.layers.1.linear_attn.A_log")
