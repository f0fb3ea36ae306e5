# SPDX-License-Identifier: Apache-2.0
"""Small ternary models, and the GGUF files that converters of llama.cpp write of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from factories import tiny_model
from sparse_bitnet.packing.gguf_blocks import READ_TYPES

gguf = pytest.importorskip("gguf", reason="pip install gguf")
TOKENS = [number * 7 % 392 for number in range(1, 33)]
Write = Callable[[Any, str, np.ndarray], None]

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
NAMES = {
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    "self_attn.o_proj": "attn_output",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.out_proj": "ssm_out",
    **{f"linear_attn.{name}": f"ssm_{name}" for name in ("conv1d", "norm")},
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 392}


@contextmanager
def gguf_writer(path: Path, architecture: str) -> Iterator[Any]:
    """A writer of gguf-py, whose file is complete behind the block."""
    writer = gguf.GGUFWriter(path, architecture)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Name of a tensor in the file."""
    stem, _, end = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{end}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{end}"


def ternary_model(family: str, group: int, **changes: Any) -> Any:
    """A random model of the family whose linears are ternary with a scale for every `group` weights."""
    model: Any = tiny_model(family, seed=3, **(SIZES | changes))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        elif name.endswith("proj.weight"):
            codes = torch.randint(-1, 2, parameter.shape).float()
            scales = (torch.rand(len(codes), parameter.shape[1] // group, 1) * 0.1 + 0.02).half()
            parameter.data = (codes.unflatten(1, (-1, group)) * scales.float()).flatten(1)
        else:
            parameter.data = parameter.data.half().float()
    return model.eval()


def add_metadata(writer: Any, config: Any, changes: dict[str, Any]) -> None:
    """Add what a converter states of a model; `changes`: keys with other values, None leaves one out."""
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "attention.key_length": getattr(config, "head_dim", None),
    }
    types = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    for key, value in (values | changes).items():
        if value is not None:
            kind = types.get(type(value), gguf.GGUFValueType.ARRAY)
            writer.add_key_value(f"{writer.arch}.{key}", value, kind)


def add_halves(writer: Any, name: str, values: np.ndarray) -> None:
    writer.add_tensor(name, values.astype(np.float16))


def write_gguf(
    path: Path, model: Any, name: str, write: Write, extra: Any = None, tables: Write = add_halves
) -> Path:
    """Write what a converter of llama.cpp writes: metadata, floats as they are, linears through `write`,
    embedding and head through `tables`."""
    config = model.config
    with gguf_writer(path, name) as writer:
        add_metadata(writer, config, {})
        if extra is not None:
            extra(writer)
        for own, tensor in model.state_dict().items():
            if own == "lm_head.weight" and config.tie_word_embeddings:
                continue
            values = tensor.numpy()
            if name == "llama" and (".q_proj" in own or ".k_proj" in own):
                heads = config.num_attention_heads if ".q_" in own else config.num_key_value_heads
                by_head = values.reshape(heads, 2, -1, values.shape[-1])
                values = by_head.swapaxes(1, 2).reshape(values.shape)
            if own.endswith("proj.weight"):
                write(writer, gguf_name(own), values)
            elif values.ndim == 2:
                tables(writer, gguf_name(own), values)
            else:
                writer.add_tensor(gguf_name(own), values)
    return path


def quantised(type: str) -> Write:
    kind = gguf.GGMLQuantizationType[type]

    def write(writer: Any, name: str, values: np.ndarray) -> None:
        data = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)

    return write


def add_bytes(writer: Any, name: str, shape: tuple[int, ...], data: np.ndarray, type_id: int):
    """Add a tensor of a type that gguf-py lacks."""
    writer.add_tensor_info(name, shape, np.dtype(np.int8), data.nbytes, raw_dtype=type_id)
    writer.tensors[-1][name].tensor = data


def by_our_layout(name: str, codes: int) -> Write:
    """A type that gguf-py lacks, from the scales of its blocks."""
    block = next(each for each in READ_TYPES if (each.name, each.codes) == (name, codes))

    def write(writer: Any, name: str, values: np.ndarray) -> None:
        runs = values.reshape(-1, codes)
        scales = np.abs(runs).max(1, keepdims=True)
        data = block.pack(np.sign(runs).astype(np.int8), scales).reshape(len(values), -1)
        add_bytes(writer, name, values.shape, data, block.type_id)

    return write


def add_tokenizer(writer: Any) -> None:
    alphabet = [chr(code) for code in range(33, 127)]
    tokens = [*alphabet, "ab", *(f"[PAD{index}]" for index in range(len(alphabet), 391))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(alphabet) + 1) + [5] * (391 - len(alphabet)))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(5)
