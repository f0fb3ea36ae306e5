# SPDX-License-Identifier: Apache-2.0
"""The CPU engine on packed folders: what transformers computes, for every form of weights and head."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from one_process import run_in_fork
from packed_models import (
    FAMILIES,
    all_logits,
    assert_close,
    engine_logits,
    load_reference,
    make_packed,
    reference_logits,
    relative_error,
)
from sparse_bitnet.bench.random_model import write_random_model
from sparse_bitnet.engine.protocol import CacheFull, ContextFull, EngineSequence
from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.tensor_file import TensorFile
from sparse_bitnet.pattern import NMPattern

pytest.importorskip("sparse_bitnet._cpu")
from sparse_bitnet import _cpu
from sparse_bitnet.engine import run_time_formats
from sparse_bitnet.engine.engine import Engine

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 96, 60)]
EXACT = {"kv_cache": "float32", "head": "stored", "threads": 1}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep measurements short, and their results out of the user's cache."""
    monkeypatch.setenv("SPARSE_BITNET_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(run_time_formats, "_BYTES", 1 << 20)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_packed(tmp_path_factory.mktemp("qwen"), max_position_embeddings=256)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ties", [True, False])
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, ties: bool) -> None:
    folder = make_packed(tmp_path, family, tie_word_embeddings=ties)
    expected = reference_logits(folder, TOKENS)
    for weight_format in ("i2", "b3", "lookup"):
        assert_close(engine_logits(folder, TOKENS, weight_format=weight_format), expected)


@pytest.mark.parametrize("kv_cache", ["float32", "float16", "int8", "int4"])
@pytest.mark.parametrize(
    ("family", "size"), [("llama", 64), ("gemma3_text", 80), ("qwen3_5_text", 128)]
)
def test_every_instruction_set_returns_the_same_bits(
    tmp_path: Path, family: str, size: int, kv_cache: str
) -> None:
    """Tokens are more than a chunk of pages; matrix units attend to heads of 64 and 128, not of 80."""
    sizes = {"head_dim": size, "max_position_embeddings": 1024, "sliding_window": 100}
    folder = make_packed(tmp_path, family, embeddings="bf16", **sizes)
    head = "int8" if kv_cache == "float16" else "stored"
    options: dict[str, Any] = {"kv_cache": kv_cache, "head": head}
    expected = None
    for isa in _cpu.supported_isas(for_tests=True):
        for weight_format, tokens in (("i2", 9 * TOKENS), ("b3", TOKENS), ("lookup", TOKENS)):
            options |= {"isa": isa, "weight_format": weight_format, "cache_tokens": 576}
            logits = engine_logits(folder, tokens, **options)
            expected = logits if expected is None else expected
            np.testing.assert_array_equal(logits, expected[: len(tokens)], f"{isa} {weight_format}")


@pytest.mark.parametrize("family", ["qwen2", "bitnet"])
def test_hidden_states_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = make_packed(tmp_path, family)
    with torch.no_grad():
        given = torch.tensor([TOKENS])
        expected = load_reference(folder).base_model(given).last_hidden_state[0].numpy()
    engine = Engine.load(folder, cache_tokens=256, **EXACT)
    one, two = engine.new_sequence(), engine.new_sequence()
    states, other = engine.forward([(one, TOKENS[:40]), (two, TOKENS[:7])], "hidden")
    (rest,) = engine.forward([(one, TOKENS[40:])], "hidden")
    assert_close(np.concatenate([states, rest]), expected)
    np.testing.assert_array_equal(other, states[:7])
    assert engine.hidden_size == expected.shape[1]
    engine.close()


@pytest.mark.parametrize("attention_bias", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_variants_of_a_family_equal_transformers(tmp_path: Path, family: str, attention_bias: bool):
    folder = make_packed(
        tmp_path,
        family,
        attention_bias=attention_bias,
        head_dim=24,
        num_hidden_layers=1,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    )
    assert_close(engine_logits(folder, TOKENS), reference_logits(folder, TOKENS))


@pytest.mark.parametrize(
    "format",
    ["ternary-8:8", "ternary-2:4", "ternary-2:8"]
    + [f"ternary-{pattern},quantizer=binary" for pattern in ("3:4", "8:8")],
)
def test_every_packed_format_gives_the_same_bits(tmp_path: Path, format: str) -> None:
    """nm-sign, which auto takes for binary weights, is run from codes that know of no fewer non-zeros."""
    all_formats, in_files = [], "nm-sign" if "binary" in format else "nm-enum"
    for packed_format in ("i2", "b3", in_files):
        folder = tmp_path / packed_format
        options: dict[str, Any] = {"packed_format": packed_format, "num_hidden_layers": 1}
        folder = make_packed(folder, format=format, **options)
        for weight_format in ("i2", "b3", "lookup", "auto"):
            all_formats.append(engine_logits(folder, TOKENS, weight_format=weight_format))
    assert all(np.array_equal(all_formats[0], logits) for logits in all_formats)
    assert_close(all_formats[0], reference_logits(folder, TOKENS))
    with pytest.raises(UserError, match=f"{in_files}.* exists only in files: choose one of i2"):
        Engine.load(folder, weight_format="stored", threads=1)


def test_stored_rows_of_whole_cache_lines_are_multiplied_in_the_mapped_file(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    folder = make_packed(tmp_path, embeddings="int8", num_hidden_layers=2, **sizes)
    maps = Path("/proc/self/maps")
    logits = []
    for weight_format in ("i2", "stored"):
        engine = Engine.load(folder, weight_format=weight_format, **EXACT)
        if maps.is_file():
            assert (str(folder) in maps.read_text()) == (weight_format == "stored")
        logits.append(all_logits(engine, TOKENS))
        engine.close()
    np.testing.assert_array_equal(*logits)
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[TensorFile(path).entries["model.layers.1.mlp.up_proj.weight_packed"].begin] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"up_proj\.weight_packed"):
        Engine.load(folder, weight_format="stored", threads=1)


def test_rows_of_groups_of_5_run_in_every_format(tmp_path: Path) -> None:
    sizes = {"hidden_size": 60, "intermediate_size": 85, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1}
    folder = make_packed(tmp_path, format="ternary-3:5", packed_format="nm-enum", **sizes)
    expected = reference_logits(folder, TOKENS)
    for weight_format in ("auto", "i2", "b3", "lookup"):
        assert_close(engine_logits(folder, TOKENS, weight_format=weight_format), expected)
    with pytest.raises(UserError, match="int4 needs a hidden size in groups of 64"):
        Engine.load(folder, head="int4", threads=1)


def test_greedy_continuation_is_that_of_transformers(qwen: Path) -> None:
    prompt, count = TOKENS[:12], 200
    model = load_reference(qwen)
    ids = torch.tensor([prompt])
    continued = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    engine = Engine.load(qwen, **EXACT)
    sequence = engine.new_sequence()
    (logits,) = engine.forward([(sequence, prompt)])
    for _ in range(count):
        (logits,) = engine.forward([(sequence, [int(logits.argmax())])])
    assert sequence.tokens == continued[0].tolist()


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("embeddings", ["float32", "bf16", "int8"])
def test_rounded_heads_are_close_to_transformers(tmp_path: Path, embeddings: str, ties: bool):
    folder = make_packed(tmp_path, embeddings=embeddings, tie_word_embeddings=ties)
    expected = reference_logits(folder, TOKENS)
    stored = {"bf16": "bfloat16"}.get(embeddings, embeddings)
    for head, head_format, bound in (
        ("stored", stored, 1e-2),
        ("auto", "int8", 2e-2),
        ("int8", "int8", 2e-2),
        ("int4", "int4", 0.3),
    ):
        engine = Engine.load(folder, head=head, kv_cache="float32", threads=2)
        assert engine.head_format == head_format
        assert relative_error(all_logits(engine, TOKENS), expected) < bound, head


def test_activations_share_a_scale_by_token_or_by_group(tmp_path: Path, qwen: Path) -> None:
    write_random_model(tmp_path / "model", "qwen2.5-0.3m", NMPattern(8, 8), scale_group=32)
    auto, by_token, by_group = (
        engine_logits(tmp_path / "model", TOKENS, activations=activations)
        for activations in ("auto", "token", "group")
    )
    assert np.array_equal(auto, by_group)
    assert Engine.load(tmp_path / "model", threads=1).weight_format == "i2"
    assert 0 < relative_error(by_token, by_group) < 0.1
    with pytest.raises(UserError, match=r"--activations group needs .*; use token"):
        Engine.load(qwen, activations="group")
    with pytest.raises(UserError, match="lookup needs scale groups of 64 or more, or none: use i2"):
        Engine.load(tmp_path / "model", weight_format="lookup")


@pytest.mark.parametrize("group", [64, 128])
def test_lookup_with_group_scales_gives_the_bits_of_i2(tmp_path: Path, group: int) -> None:
    write_random_model(tmp_path / "model", "qwen2.5-30m", NMPattern(6, 8), scale_group=group)
    logits = []
    for weight_format in ("i2", "lookup"):
        engine = Engine.load(tmp_path / "model", weight_format=weight_format, **EXACT)
        assert engine.weight_format == weight_format
        sequence = engine.new_sequence()
        (step,) = engine.forward([(sequence, TOKENS[:1])])
        logits.append(np.vstack([step, all_logits(engine, TOKENS)]))
        engine.close()
    assert np.array_equal(*logits)


def test_sequences_fork_and_batch_like_separate_ones(qwen: Path) -> None:
    engine = Engine.load(qwen, threads=1, cache_tokens=256)
    assert (engine.vocab_size, engine.context_length, engine.free_tokens) == (96, 256, 256)
    whole = engine.new_sequence()
    assert engine.forward([(whole, TOKENS)], "none") == []
    assert whole.tokens == TOKENS
    assert engine.free_tokens == 192
    part = whole.fork(20)
    assert (part.tokens, len(part)) == (TOKENS[:20], 20)
    together = engine.forward([(part, [1, 2, 3]), (whole, [4])])
    assert [logits.shape for logits in together] == [(96,), (96,)]
    assert part.tokens == [*TOKENS[:20], 1, 2, 3]
    alone = engine.new_sequence()
    (expected,) = engine.forward([(alone, part.tokens)])
    assert np.array_equal(together[0], expected)
    whole.truncate(5)
    assert whole.tokens == TOKENS[:5]
    (again,) = engine.forward([(whole, TOKENS[5:])], "all")
    assert again.shape == (55, 96)
    for sequence in (whole, part, alone):
        sequence.close()
        sequence.close()
    assert engine.free_tokens == 256


# nanobind must not throw where it reads a list of one or two requests: 24 or 48 bytes.
ALLOCATOR = """
#include <cstdlib>
#include <new>
extern "C" { long left = -1; }
static void* take(std::size_t size, std::size_t alignment) {
  if (size != 24 && size != 48 && left >= 0 && left-- == 0) throw std::bad_alloc();
  return std::aligned_alloc(alignment, (size + alignment) / alignment * alignment);
}
void* operator new(std::size_t size) { return take(size, 16); }
void* operator new(std::size_t size, std::align_val_t to) { return take(size, std::size_t(to)); }
"""
SCRIPT = """
import ctypes, sys
import numpy as np
from sparse_bitnet.engine.engine import Engine
left = ctypes.c_long.in_dll(ctypes.CDLL(None), "left")
tokens = [int(token) for token in np.random.default_rng(5).integers(0, 96, 60)]
whole, engine = (Engine.load(sys.argv[1], threads=1, weight_format="i2", cache_tokens=256) for _ in "12")
(expected,) = whole.forward([(whole.new_sequence(), tokens)], "all")
sequences = engine.new_sequence(), engine.new_sequence()
engine.forward([(sequences[0], tokens[:30])], "none")
for count in (1, 9, 20):
    for allocations in range(1000):
        at = [len(sequence) for sequence in sequences]
        step = [(s, tokens[len(s) : len(s) + count]) for s in sequences]
        left.value = allocations
        try:
            parts = engine.forward(step, "all")
            break
        except MemoryError:
            assert at == [len(sequence) for sequence in sequences]
    left.value = -1
    assert allocations > 5
    for begin, part in zip(at, parts):
        np.testing.assert_array_equal(part, expected[begin : begin + count])
"""


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_step_whose_memory_ends_is_undone(tmp_path: Path, family: str) -> None:
    """No token is lost, and the next step has the same bits, whichever allocation fails."""
    folder, library = make_packed(tmp_path, family), str(tmp_path / "allocator.so")
    (tmp_path / "allocator.cpp").write_text(ALLOCATOR)
    subprocess.run(
        ["g++", "-shared", "-fPIC", tmp_path / "allocator.cpp", "-o", library], check=True
    )
    subprocess.run(
        [sys.executable, "-c", SCRIPT, folder], check=True, env=os.environ | {"LD_PRELOAD": library}
    )


def test_misuse_and_full_caches_raise(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(qwen, threads=1, context_length=100, cache_tokens=128)
    first, second = engine.new_sequence(), engine.new_sequence()
    engine.forward([(first, TOKENS)], "none")
    with pytest.raises(ContextFull, match="60 tokens and 41 more pass the context length of 100"):
        engine.forward([(first, [1] * 41)])
    with pytest.raises(CacheFull, match="close sequences"):
        engine.forward([(first, [1] * 40), (second, [1] * 10)])
    assert (first.tokens, second.tokens) == (TOKENS, [])
    closed = engine.new_sequence()
    closed.close()
    other = Engine.load(qwen, threads=1).new_sequence()
    for batch, message in (
        ([(first, [96])], "outside the vocabulary"),
        ([(first, [-1])], "outside the vocabulary"),
        ([(first, [1 << 40])], "outside the vocabulary"),
        ([(first, [])], "at least one"),
        ([(first, [0.5])], "whole number"),
        ([(first, [1]), (first, [2])], "twice"),
        ([(closed, [1])], "closed"),
        ([(other, [1])], "another engine"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.forward(batch)
    for length in (-1, 61):
        with pytest.raises(ValueError, match="the sequence has 60 tokens"):
            first.truncate(length)
        with pytest.raises(ValueError, match="the sequence has 60 tokens"):
            first.fork(length)
    assert engine.forward([]) == []
    engine.close()
    engine.close()
    first.close()
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.new_sequence()
    monkeypatch.setattr("sparse_bitnet.engine.engine.Weights", Mock(side_effect=MemoryError))
    with pytest.raises(UserError, match=r"not enough memory for .*, or choose --kv-cache int4"):
        Engine.load(qwen, threads=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads 0"),
        ({"weight_format": "nm-enum"}, "--weight-format 'nm-enum': choose one of auto, stored, i2"),
        ({"head": "int2"}, "--head 'int2': choose one of"),
        ({"kv_cache": "int2"}, "kv-cache 'int2': choose one of"),
        ({"context_length": 257}, "--context-length 257: .* 1 to 256 tokens"),
        ({"context_length": 0}, "--context-length 0"),
        ({"cache_tokens": 0}, "--cache-tokens 0: must be at least 1"),
        ({"cache_tokens": 2**70}, f"--cache-tokens {2**70}: must be at most 2147483648"),
        ({"isa": "sse9"}, "sse9"),
    ],
)
def test_options_outside_their_range_are_named(
    qwen: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Engine.load(qwen, **options)


def test_a_very_wide_model_takes_its_prompts_in_smaller_parts(tmp_path: Path) -> None:
    wide = 1 << 19  # of which 64 tokens are the most at once
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 80}
    engine = Engine.load(
        make_packed(tmp_path, intermediate_size=wide, **sizes), cache_tokens=256, **EXACT
    )
    tokens = list(range(80))
    whole, one = engine.new_sequence(), engine.new_sequence()
    (last,) = engine.forward([(whole, tokens)])
    for token in tokens:
        (wanted,) = engine.forward([(one, [token])])
    assert np.array_equal(last, wanted)


def test_threads_take_turns_and_closing_waits_for_them(qwen: Path) -> None:
    engine = Engine.load(qwen, threads=2)
    expected = all_logits(engine, TOKENS)[-1]
    sequences = [engine.new_sequence() for _ in range(4)]
    results: list[np.ndarray] = []

    def forward(sequence: EngineSequence) -> None:
        results.extend(engine.forward([(sequence, TOKENS)]))

    threads = [threading.Thread(target=forward, args=(sequence,)) for sequence in sequences]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    assert all(np.array_equal(logits, expected) for logits in results)
    closing = [threading.Thread(target=close) for close in (engine.close, sequences[0].close) * 2]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(60)
    assert not any(sequence.is_open for sequence in sequences)
    with pytest.raises(ValueError, match="closed"):
        engine.forward([(sequences[0], [1])])


def test_the_child_of_a_fork_is_refused(qwen: Path) -> None:
    engine = Engine.load(qwen, threads=2)
    sequence = engine.new_sequence()

    def check() -> None:
        with pytest.raises(RuntimeError, match="load it after the fork"):
            engine.forward([(sequence, [1])])

    run_in_fork(check)
    engine.forward([(sequence, [1])])
