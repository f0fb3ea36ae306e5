# SPDX-License-Identifier: Apache-2.0
"""The engine without Python, cross-compiled and emulated, writes the token ids of the engine here."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from cross_compiled import emulated, run
from packed_models import make_packed
from sparse_bitnet.engine.architecture import BLOCK_LINEARS
from sparse_bitnet.engine.engine import Engine
from sparse_bitnet.engine.engine_model import open_engine_model

pytestmark = pytest.mark.slow

PROMPT, STEPS = [5, 17, 3, 60, 44], 24
TABLES = {"F32": 0, "BF16": 1}
STORED = ("i2", "b3", "nm-enum", "nm-sign")
CACHES = ("float32", "float16", "int8")
VECTORS = (
    *(f"self_attn.{name}_proj.bias" for name in "qkvo"),
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
    *("self_attn.attn_sub_norm.weight", "mlp.ffn_sub_norm.weight"),
    *("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
)


def plan_of(folder: Path, kv_cache: str) -> str:
    """Return the input of selftest.cpp in its order: sizes, places of the tensors, what to write."""
    model = open_engine_model(folder)
    shape, file, pattern = model.architecture, model.file, model.metadata.pattern

    def place(name: str) -> list[object]:
        entry = file.entries.get(name)
        assert entry is None or name.endswith(("weight", "packed")) or entry.dtype == "F32"
        return [-1 if entry is None else entry.begin]

    def crc32(name: str) -> int:
        return int(file.metadata["crc32"][name], 16)

    words: list[object] = [shape.hidden, shape.intermediate, shape.heads, shape.kv_heads]
    words += [shape.head_dim, shape.vocab, shape.norm_epsilon, shape.activation, shape.rope.scaling]
    words += np.asarray(shape.rope.inverse_frequencies, np.float32).tolist()
    words += [pattern.n, pattern.m, STORED.index(model.metadata.packed_format)]
    for number, name in enumerate(model.table_names):
        words += [] if number == 0 else [0]
        words += [TABLES[file.entries[name].dtype], *place(name), crc32(name)]
    words += [1] if shape.ties_head else []
    words += [*place("model.norm.weight"), shape.layers]
    for layer in range(shape.layers):
        block = f"model.layers.{layer}."
        for linear in BLOCK_LINEARS.values():
            packed = f"{block}{linear}.weight_packed"
            words += [*place(packed), *model.metadata.layers[f"{block}{linear}"], crc32(packed)]
            words += place(f"{block}{linear}.weight_scale")
        for vector in VECTORS:
            words += place(block + vector)
    words += [len(PROMPT), *PROMPT, CACHES.index(kv_cache), STEPS]
    return " ".join(map(str, words))


FAMILIES = pytest.mark.parametrize(
    ("family", "packed_format", "kv_cache"), [("qwen2", "i2", "float16"), ("bitnet", "b3", "int8")]
)
RUNNERS = {
    "x86_64-linux-musl": [],
    "aarch64-linux-musl": ["qemu-aarch64"],
    "x86_64-windows-gnu": ["wine"],
}
"""Targets of .ci/cross that can run here, each by what."""


def made(
    tmp_path: Path, family: str, packed_format: str, kv_cache: str
) -> tuple[list[str], list[str]]:
    """Arguments of the self-test, and the ids that it has to print."""
    folder = make_packed(tmp_path, family, packed_format=packed_format, vocab_size=96)
    engine = Engine.load(folder, threads=1, kv_cache=kv_cache)
    sequence, tokens, expected = engine.new_sequence(), PROMPT, []
    for _ in range(STEPS):
        (logits,) = engine.forward([(sequence, tokens)])
        tokens = [int(logits.argmax())]
        expected += tokens
    engine.close()
    (tmp_path / "plan").write_text(plan_of(folder, kv_cache))
    return [str(tmp_path / "plan"), str(folder / "model.safetensors")], list(map(str, expected))


@FAMILIES
def test_ids_are_those_of_the_engine(tmp_path, tmp_path_factory, family, packed_format, kv_cache):
    arguments, expected = made(tmp_path, family, packed_format, kv_cache)
    source = Path(__file__).parent / "selftest.cpp"
    assert emulated(source, tmp_path_factory, *arguments).split() == expected


@FAMILIES
@pytest.mark.parametrize("target", RUNNERS)
@pytest.mark.skipif("SPARSE_BITNET_CROSS" not in os.environ, reason="run by `make cross`")
def test_cross_compiled_ids_are_those_of_the_engine(
    tmp_path, family, packed_format, kv_cache, target
):
    program = Path(os.environ["SPARSE_BITNET_CROSS"], target, "selftest.exe")
    if not program.exists():
        pytest.skip(f"{target} was not compiled")
    for runner in RUNNERS[target]:
        if shutil.which(runner) is None:
            pytest.skip(f"{target} needs {runner}")
    arguments, expected = made(tmp_path, family, packed_format, kv_cache)
    for isa in ("", "generic"):
        assert run([*RUNNERS[target], str(program), *arguments, isa]).split() == expected
