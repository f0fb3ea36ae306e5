# SPDX-License-Identifier: Apache-2.0
"""A `_cpu.Decoder` over the weights of a transformers model in memory, without a file."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from factories import randomise_vectors_, tiny_model
from sparse_bitnet import _cpu
from sparse_bitnet.nn.convert import convert_, sparse_layers
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.nn.selection import select
from sparse_bitnet.packing.codec import pack
from sparse_bitnet.pattern import NMPattern

ODD_SIZES = {"hidden_size": 140, "intermediate_size": 104, "head_dim": 10}
ODD_SIZES |= {"num_attention_heads": 14}


def random_model(
    family: str = "qwen2", *, seed: int = 0, format: str = "ternary-6:8", **changes: Any
) -> Any:
    """A converted float32 model whose biases and norms are not their initial values."""
    ties = {"tie_word_embeddings": family != "bitnet"}
    model: Any = tiny_model(family, seed=seed, **(ties | changes))
    model = convert_(model, SparseBitConfig.parse(format)).eval()
    return randomise_vectors_(model, mean=0.6, std=0.2)


class DecoderInMemory:
    """Keeps the arrays alive and calls the decoder with their addresses.

    `head` and `embedding`: "float32", "bfloat16", "int8" or "int4".
    """

    def __init__(
        self,
        model: Any,
        *,
        threads: int = 1,
        cache: str = "float32",
        context_length: int | None = None,
        cache_tokens: int = 1024,
        isa: str = "",
        head: str = "float32",
        embedding: str = "float32",
        group: int = 0,
        activation_group: int = 0,
    ) -> None:
        self.kept: list[Any] = []
        self.dequantised: dict[str, np.ndarray] = {}
        config, inner = model.config, model.model
        self.vocab = config.vocab_size
        is_gemma = self.is_gemma = config.model_type == "gemma3_text"
        is_hunyuan = config.model_type == "hunyuan_v1_dense"
        head_norms = ("query_layernorm", "key_layernorm") if is_hunyuan else ("q_norm", "k_norm")
        rotary = inner.rotary_emb
        self.layers = sparse_layers(model)
        self.group = group
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        builder = _cpu.ModelBuilder(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            vocab=self.vocab,
            norm_epsilon=config.rms_norm_eps,
            activation=_cpu.Activation.gelu_tanh
            if is_gemma
            else _cpu.Activation(int(config.hidden_act == "relu2")),
            inverse_frequencies=self.floats(
                rotary.full_attention_inv_freq if is_gemma else rotary.inv_freq
            ),
            activation_group=activation_group,
            query_scale=inner.layers[0].self_attn.scaling,
            embedding_scale=float(inner.embed_tokens.embed_scale) if is_gemma else 1.0,
            norms_rotated=is_hunyuan,
        )
        if is_gemma:
            builder.add_rope(self.floats(rotary.sliding_attention_inv_freq))
        builder.set_head(self.table(model.get_output_embeddings().weight, head))
        builder.set_embedding(self.table(inner.embed_tokens.weight, embedding))
        builder.set_final_norm(self.weight_of(inner, "norm"))
        for block in inner.layers:
            attention, feed = block.self_attn, block.mlp
            window = getattr(attention, "sliding_window", 0) or 0
            if config.model_type == "mistral":
                window = config.sliding_window
            linears = {name: attention.get_submodule(f"{name}_proj") for name in "qkvo"}
            linears |= {name: feed.get_submodule(f"{name}_proj") for name in ("gate", "up", "down")}
            before = "pre_feedforward_layernorm" if is_gemma else "post_attention_layernorm"
            vectors = {
                "input_norm": self.weight_of(block, "input_layernorm"),
                "post_attention_norm": self.weight_of(block, before),
                "attention_out_norm": is_gemma
                and self.weight_of(block, "post_attention_layernorm"),
                "ffn_out_norm": self.weight_of(block, "post_feedforward_layernorm"),
                "attention_sub_norm": self.weight_of(attention, "attn_sub_norm"),
                "ffn_sub_norm": self.weight_of(feed, "ffn_sub_norm"),
                "q_norm": self.weight_of(attention, head_norms[0]),
                "k_norm": self.weight_of(attention, head_norms[1]),
                **{f"{name}_bias": self.floats(linears[name].bias) for name in "qkvo"},
            }
            weights: dict[str, Any] = {name: self.matrix(each) for name, each in linears.items()}
            weights |= {name: address for name, address in vectors.items() if address}
            builder.add_block(weights, window=window, rope=int(is_gemma and window > 0))
        self.decoder = _cpu.Decoder(
            builder,
            threads=threads,
            cache=_cpu.CacheType[cache],
            context_length=context_length or config.max_position_embeddings,
            cache_tokens=cache_tokens,
            kernels=_cpu.Kernels.choose(isa),
        )

    def address(self, array: np.ndarray) -> int:
        self.kept.append(array)
        return array.ctypes.data

    def floats(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        return self.address(np.array(tensor.detach().float().numpy(), order="C"))

    def weight_of(self, module: nn.Module, name: str) -> int:
        norm = getattr(module, name, None)
        return 0 if norm is None else self.floats(norm.weight + float(self.is_gemma))

    def rows(self, rows: np.ndarray) -> tuple[int, int]:
        """64-byte aligned copy of uint8 [rows, bytes], padding poisoned: (row_stride, address)."""
        count, width = rows.shape
        stride = -(-width // 64) * 64
        memory = np.full(-(-count // 16) * 16 * stride + 128, 0xA5, np.uint8)
        start = -memory.ctypes.data % 64
        memory[start : start + count * stride].reshape(count, stride)[:, :width] = rows
        return stride, self.address(memory) + start

    def matrix(self, linear: Any, **changes: Any) -> _cpu.Matrix:
        pattern = linear.config.pattern
        with torch.no_grad():
            codes, _, scale = select(linear.weight, linear.config)[:3]
        assert codes is not None
        assert scale is not None
        n, m = (1, 1) if pattern.is_dense else (pattern.n, pattern.m)
        rows, columns = codes.shape
        stride, address = self.rows(pack(codes, "i2", pattern).numpy())
        given = {"format": _cpu.WeightFormat.i2, "n": n, "m": m, "rows": rows, "columns": columns}
        given |= {"row_stride": stride, "address": address, "scale": float(scale)}
        if self.group:  # the same scale for every group
            scales = np.full((-(-rows // 16), columns // self.group, 16), float(scale), np.float32)
            given |= {"scales": self.address(scales), "group": self.group}
        matrix = _cpu.Matrix(**given | changes)
        if self.group:
            packed = pack(codes.contiguous(), "i2", NMPattern(n, m))
            shape = (n, m, rows, columns, packed.numel())
            stored = _cpu.StoredMatrix(_cpu.StoredFormat.i2, *shape, address=packed.data_ptr())
            _cpu.repack(_cpu.ThreadPool(1), stored, matrix)
        return matrix

    def table(self, weight: Tensor, type: str, **changes: Any) -> _cpu.Table:
        """Also leaves the values that the table stands for in `dequantised[type]`."""
        weight = weight.detach().float()
        rows, columns = weight.shape
        scales, dequantised = 0, weight
        if type == "float32":
            data = weight.contiguous().numpy().view(np.uint8)
        elif type == "bfloat16":
            data = weight.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
            dequantised = weight.to(torch.bfloat16).float()
        elif type == "int8":
            scale = weight.abs().amax(1, keepdim=True) / 127
            data = (weight / scale).round().to(torch.int8).numpy().view(np.uint8)
            dequantised = (weight / scale).round() * scale
            scales = self.floats(scale)
        else:
            grouped = weight.view(rows, -1, 64)
            scale = grouped.abs().amax(2, keepdim=True) / 7
            codes = ((grouped / scale).round() + 8).to(torch.uint8)
            data = (codes[:, :, :32] | codes[:, :, 32:] << 4).reshape(rows, -1).numpy()
            dequantised = ((codes.float() - 8) * scale).view(rows, columns)
            scales = self.floats(scale)
        self.dequantised[type] = dequantised.numpy()
        stride, address = self.rows(data)
        given = {"type": _cpu.TableType[type], "rows": rows, "columns": columns}
        given |= {"row_stride": stride, "address": address, "scales": scales}
        return _cpu.Table(**given | changes)

    def forward(
        self, requests: Sequence[tuple[int, Sequence[int]]], which: str = "all"
    ) -> list[np.ndarray]:
        """One array for each request: [tokens, vocab] ("all") or [vocab] ("last")."""
        tokens = [np.array(ids, np.int32) for _, ids in requests]
        counts = [len(ids) for ids in tokens] if which == "all" else [1] * len(tokens)
        logits = np.full((sum(counts), self.vocab), np.nan, np.float32)
        self.decoder.forward(
            [
                (sequence, ids.ctypes.data, len(ids))
                for (sequence, _), ids in zip(requests, tokens, strict=True)
            ],
            _cpu.Logits[which],
            logits.ctypes.data,
        )
        parts = np.split(logits, np.cumsum(counts)[:-1])
        return [part[0] for part in parts] if which == "last" else parts

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """[tokens, vocab] of a sequence of its own."""
        sequence = self.decoder.open()
        logits = self.forward([(sequence, ids)])[0]
        self.decoder.close(sequence)
        return logits


def ids_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 96, count).tolist()
