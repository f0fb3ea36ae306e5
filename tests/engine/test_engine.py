# SPDX-License-Identifier: Apache-2.0
"""The CPU engine on packed folders: what transformers computes, for every form of weights and head."""

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from packed_models import (
    FAMILIES,
    assert_close,
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
from sparse_bitnet.engine import format_tuning
from sparse_bitnet.engine.engine import Engine, _cache_type
from sparse_bitnet.engine.weight_memory import WeightMemory

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 96, 60)]
EXACT = {"kv_cache": "float32", "head": "stored", "threads": 1}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured here is short, and remembered nowhere else."""
    monkeypatch.setenv("SPARSE_BITNET_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(format_tuning, "_BYTES", 1 << 20)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_packed(tmp_path_factory.mktemp("qwen"), max_position_embeddings=256)


def all_logits(engine: Engine, tokens: list[int]) -> np.ndarray:
    sequence = engine.new_sequence()
    (logits,) = engine.forward([(sequence, tokens)], "all")
    sequence.close()
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ties", [True, False])
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, ties: bool) -> None:
    folder = make_packed(tmp_path, family, tie_word_embeddings=ties)
    expected = reference_logits(folder, TOKENS)
    for weight_format in ("i2", "b3", "lookup"):
        engine = Engine.load(folder, weight_format=weight_format, **EXACT)
        assert (engine.weight_format, engine.head_format) == (weight_format, "float32")
        assert_close(all_logits(engine, TOKENS), expected)
        engine.close()


@pytest.mark.parametrize("isa", _cpu.supported_isas(for_tests=True))
def test_every_instruction_set_computes_the_same(qwen: Path, isa: str) -> None:
    expected = reference_logits(qwen, TOKENS)
    for weight_format in ("auto", "i2", "b3", "lookup"):
        engine = Engine.load(qwen, weight_format=weight_format, isa=isa, **EXACT)
        assert engine.isa == isa
        assert_close(all_logits(engine, TOKENS), expected)
        engine.close()
    engine = Engine.load(qwen, isa=isa, threads=2)
    assert relative_error(all_logits(engine, TOKENS), expected) < 0.1
    engine.close()


@pytest.mark.parametrize("family", ["qwen2", "bitnet"])
def test_hidden_states_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = make_packed(tmp_path, family)
    with torch.no_grad():
        given = torch.tensor([TOKENS])
        expected = load_reference(folder).base_model(given).last_hidden_state[0].numpy()
    engine = Engine.load(folder, cache_tokens=256, **EXACT)
    one, two = engine.new_sequence(), engine.new_sequence()
    found, other = engine.forward([(one, TOKENS[:40]), (two, TOKENS[:7])], "hidden")
    (rest,) = engine.forward([(one, TOKENS[40:])], "hidden")
    assert_close(np.concatenate([found, rest]), expected)
    np.testing.assert_array_equal(other, found[:7])
    assert engine.hidden_size == expected.shape[1]
    engine.close()


@pytest.mark.parametrize("attention_bias", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_variants_of_a_family(tmp_path: Path, family: str, attention_bias: bool) -> None:
    folder = make_packed(
        tmp_path,
        family,
        attention_bias=attention_bias,
        head_dim=24,
        num_hidden_layers=1,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    )
    engine = Engine.load(folder, **EXACT)
    assert_close(all_logits(engine, TOKENS), reference_logits(folder, TOKENS))


@pytest.mark.parametrize("format", ["ternary-8:8", "ternary-2:4", "ternary-2:8"])
def test_every_packed_format_gives_the_same_bits(tmp_path: Path, format: str) -> None:
    found = []
    for packed_format in ("i2", "b3", "nm-enum"):
        folder = make_packed(
            tmp_path / packed_format,
            format=format,
            packed_format=packed_format,
            num_hidden_layers=1,
        )
        for weight_format in ("i2", "b3", "lookup"):
            engine = Engine.load(folder, weight_format=weight_format, **EXACT)
            found.append(all_logits(engine, TOKENS))
        if packed_format.startswith("nm-e"):
            expected = reference_logits(folder, TOKENS)
    assert all(np.array_equal(found[0], logits) for logits in found)
    assert_close(found[0], expected)


@pytest.mark.parametrize("pattern", ["3:4", "8:8"])
def test_binary_weights_in_every_form(tmp_path: Path, pattern: str) -> None:
    """nm-sign, which auto takes for them, is run from codes that know of no fewer non-zeros."""
    format = f"ternary-{pattern},quantizer=binary"
    found = []
    for packed_format in ("i2", "nm-sign"):
        folder = make_packed(tmp_path / packed_format, format=format, packed_format=packed_format)
        for weight_format in ("i2", "b3", "lookup", "auto"):
            engine = Engine.load(folder, weight_format=weight_format, **EXACT)
            found.append(all_logits(engine, TOKENS))
    assert all(np.array_equal(found[0], logits) for logits in found)
    assert_close(found[0], reference_logits(folder, TOKENS))
    with pytest.raises(UserError, match=r"nm-sign.* is for files: choose one of i2"):
        Engine.load(folder, weight_format="stored", threads=1)


def test_rows_of_whole_cache_lines_are_multiplied_in_the_mapped_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    folder = make_packed(tmp_path, embeddings="int8", num_hidden_layers=2, **sizes)
    copied = all_logits(Engine.load(folder, weight_format="i2", **EXACT), TOKENS)
    found, in_place = [], WeightMemory.in_place
    monkeypatch.setattr(
        WeightMemory, "in_place", lambda *a: found.append(in_place(*a)) or found[-1]
    )
    engine = Engine.load(folder, weight_format="stored", **EXACT)
    # Behind the last one the file has no bytes to be read ahead.
    assert [place is None for place in found] == [False] * 14 + [True]
    np.testing.assert_array_equal(all_logits(engine, TOKENS), copied)
    engine.close()
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[TensorFile(path).entries["model.layers.1.mlp.up_proj.weight_packed"].begin] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"up_proj\.weight_packed"):
        Engine.load(folder, weight_format="stored", threads=1)


def test_patterns_that_only_some_formats_hold(tmp_path: Path) -> None:
    folder = make_packed(
        tmp_path, format="ternary-3:5", packed_format="nm-enum", hidden_size=60, intermediate_size=85,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    expected = reference_logits(folder, TOKENS)
    for weight_format in ("auto", "i2", "b3", "lookup"):
        engine = Engine.load(folder, weight_format=weight_format, **EXACT)
        assert_close(all_logits(engine, TOKENS), expected)
    with pytest.raises(UserError, match=r"nm-enum.* is for files"):
        Engine.load(folder, weight_format="stored", threads=1)
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
def test_heads_are_close(tmp_path: Path, embeddings: str, ties: bool) -> None:
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
    logits = {}
    for activations in ("auto", "token", "group"):
        engine = Engine.load(tmp_path / "model", activations=activations, **EXACT)
        assert engine.weight_format == "i2"
        logits[activations] = all_logits(engine, TOKENS)
        engine.close()
    assert np.array_equal(logits["auto"], logits["group"])
    difference = relative_error(logits["token"], logits["group"])
    assert 0 < difference < 0.1
    with pytest.raises(
        UserError, match=r"--activations group asks for .* these have none; use token"
    ):
        Engine.load(qwen, activations="group")


def test_caches_are_close(qwen: Path) -> None:
    expected = reference_logits(qwen, TOKENS)
    for kv_cache, bound in (("float16", 2e-2), ("int8", 0.1), ("int4", 0.5)):
        engine = Engine.load(qwen, kv_cache=kv_cache, head="stored", threads=1)
        assert relative_error(all_logits(engine, TOKENS), expected) < bound


@pytest.mark.parametrize(("name", "most"), [("k_proj.bias", "float16"), ("q_proj.bias", "int8")])
def test_keys_with_outliers_stay_in_float16(qwen: Path, name: str, most: str) -> None:
    assert Engine.load(qwen, threads=1).kv_cache == "int8"
    large = np.array([1.0, -90.0], np.float32)
    weights: Any = SimpleNamespace(vectors={f"model.layers.0.self_attn.{name}": large})
    assert _cache_type(weights) == most
    weights.vectors = {name: large / 9}
    assert _cache_type(weights) == "int8"


def test_sequences(qwen: Path) -> None:
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


def test_a_step_that_is_broken_off_is_undone(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(qwen, threads=1, cache_tokens=256)
    expected = all_logits(engine, TOKENS)
    first, second = engine.new_sequence(), engine.new_sequence()
    engine.forward([(first, TOKENS[:10]), (second, TOKENS[:10])])
    append = EngineSequence.append

    def broken_off(sequence: EngineSequence, tokens: list[int]) -> None:
        if sequence is second:
            raise KeyboardInterrupt
        append(sequence, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(EngineSequence, "append", broken_off)
        with pytest.raises(KeyboardInterrupt):
            engine.forward([(first, TOKENS[10:]), (second, TOKENS[10:])])
    assert first.tokens == second.tokens == TOKENS[:10]
    for rows in engine.forward([(first, TOKENS[10:]), (second, TOKENS[10:])], "all"):
        np.testing.assert_array_equal(rows, expected[10:])


def test_an_int8_head_has_no_more_columns_than_its_sums_hold(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cpu, "MOST_INT8_COLUMNS", 63)
    with pytest.raises(
        UserError, match="head int8 takes a hidden size up to 63, this model has 64"
    ):
        Engine.load(qwen)
    assert Engine.load(qwen, head="int4").head_format == "int4"


def test_limits_and_misuse(qwen: Path) -> None:
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads 0"),
        ({"weight_format": "nm-enum"}, "weight format 'nm-enum': choose one of"),
        ({"head": "int2"}, "head 'int2': choose one of"),
        ({"kv_cache": "int2"}, "kv-cache 'int2': choose one of"),
        ({"context_length": 257}, "--context-length 257: .* 1 to 256 tokens"),
        ({"context_length": 0}, "--context-length 0"),
        ({"cache_tokens": 0}, "cache tokens 0: must be within 1.."),
        ({"cache_tokens": 2**40}, "cache tokens 1099511627776: must be within 1.."),
        ({"isa": "sse9"}, "sse9"),
    ],
)
def test_options_are_checked(qwen: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Engine.load(qwen, **options)


def test_a_measurement_without_memory_is_one_line(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format_tuning, "_BYTES", 1 << 62)
    with pytest.raises(UserError, match="not enough memory for its weights and its cache"):
        Engine.load(qwen, threads=1)


def test_progress_and_the_mapping_of_the_file(qwen: Path) -> None:
    seen: list[tuple[int, int]] = []
    engine = Engine.load(qwen, threads=1, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] <= seen[-1][1] < (qwen / "model.safetensors").stat().st_size
    assert engine.load_seconds > 0
    maps = Path("/proc/self/maps")
    if maps.is_file():
        assert str(qwen) not in maps.read_text()


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


@pytest.mark.parametrize("packed_format", ["i2", "nm-enum"])
def test_neither_torch_nor_transformers_is_imported(tmp_path: Path, packed_format: str) -> None:
    folder = make_packed(tmp_path, packed_format=packed_format)
    script = f"""
import sys
from sparse_bitnet.engine.engine import Engine
engine = Engine.load({str(folder)!r}, threads=1)
sequence = engine.new_sequence()
print(engine.forward([(sequence, [1, 2, 3])])[0].shape)
heavy = {{name.partition(".")[0] for name in sys.modules}} & {{"torch", "transformers", "pyarrow"}}
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "(96,)\n"), done.stderr


class Gate:
    """Holds `_compute` of an engine until it is opened; says who has come in and gone."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.entered, self.opened = threading.Event(), threading.Event()
        compute = engine._compute

        def held(batch, logits):
            self.events.append("in")
            self.entered.set()
            assert self.opened.wait(60)
            found = compute(batch, logits)
            self.events.append("out")
            return found

        monkeypatch.setattr(engine, "_compute", held)


def test_two_threads_take_turns(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(qwen, threads=2)
    expected = all_logits(engine, TOKENS)[-1]
    sequences = [engine.new_sequence() for _ in range(4)]
    gate, found = Gate(engine, monkeypatch), []

    def forward(sequence) -> None:
        found.extend(engine.forward([(sequence, TOKENS)]))

    threads = [threading.Thread(target=forward, args=(sequence,)) for sequence in sequences]
    threads[0].start()
    assert gate.entered.wait(60)
    for thread in threads[1:]:
        thread.start()
    assert not engine._turns.acquire(blocking=False), "the first has the turn"
    gate.opened.set()
    for thread in threads:
        thread.join(60)
    assert gate.events == ["in", "out"] * 4
    assert len(found) == 4
    assert all(np.array_equal(logits, expected) for logits in found)


def test_closing_waits_for_the_forward_of_another_thread(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(qwen, threads=2)
    expected = all_logits(engine, TOKENS)[-1]
    sequence = engine.new_sequence()
    gate, found = Gate(engine, monkeypatch), []
    forward = threading.Thread(target=lambda: found.extend(engine.forward([(sequence, TOKENS)])))
    forward.start()
    assert gate.entered.wait(60)
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert engine._weights is not None
    gate.opened.set()
    for thread in (forward, closing):
        thread.join(60)
    assert np.array_equal(found[0], expected)
    assert (engine._weights, sequence.is_open) == (None, False)
    with pytest.raises(ValueError, match="closed"):
        engine.forward([(sequence, [1])])


@pytest.mark.parametrize("order", ["sequence sequence", "engine engine", "engine sequence"])
def test_two_threads_close_the_same(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    engine = Engine.load(qwen, threads=1)
    closed = {"engine": engine, "sequence": engine.new_sequence()}
    gate, other, errors = Gate(engine, monkeypatch), engine.new_sequence(), []

    def call(method, *given) -> threading.Thread:
        def run() -> None:
            try:
                method(*given)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    threads = [call(engine.forward, [(other, TOKENS)])]
    assert gate.entered.wait(60)
    for name in order.split():
        threads.append(call(closed[name].close))
        threads[-1].join(0.1)
    gate.opened.set()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert not closed["sequence"].is_open
    engine.close()


def test_the_child_of_a_fork_is_refused_and_ends_in_order(qwen: Path) -> None:
    """Forked while another thread of the parent is in a forward."""
    script = f"""
import os, sys, threading
import numpy as np
from sparse_bitnet.engine.engine import Engine
engine = Engine.load({str(qwen)!r}, threads=2)
tokens = {TOKENS}
sequence, other = engine.new_sequence(), engine.new_sequence()
expected = engine.forward([(other, tokens)])
entered, forked = threading.Event(), threading.Event()
compute, found = engine._compute, []
def held(batch, logits):
    entered.set()
    forked.wait(60)
    return compute(batch, logits)
engine._compute = held
thread = threading.Thread(target=lambda: found.extend(engine.forward([(sequence, tokens)])))
thread.start()
assert entered.wait(60)
child = os.fork()
if child == 0:
    for call in (lambda: engine.forward([(other, [1])]), engine.new_sequence, other.fork,
                 lambda: other.truncate(1), lambda: engine.free_tokens):
        try:
            call()
            os._exit(3)
        except ValueError as error:
            assert "loaded before this process was forked" in str(error)
    other.close()
    engine.close()
    del engine, other, sequence
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
forked.set()
thread.join(60)
assert np.array_equal(found[0], expected[0])
engine.close()
print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38, -1e-45])
@pytest.mark.parametrize("kv_cache", ["float32", "float16", "int8", "int4"])
def test_activations_that_are_no_numbers_harm_nobody(qwen: Path, bad: float, kv_cache: str) -> None:
    """Damaged memory, say: nothing crashes, what does not pass through it stays the same."""
    engine = Engine.load(qwen, kv_cache=kv_cache, threads=2)
    first, second = engine.new_sequence(), engine.new_sequence()
    before = engine.forward([(first, TOKENS), (second, TOKENS[:3])])
    assert engine._weights is not None
    for vector in engine._weights.vectors.values():
        kept = vector.copy()
        vector[::3] = bad
        broken = engine.new_sequence()
        engine.forward([(broken, TOKENS), (first, TOKENS[:1])], "all")
        for _ in range(2):
            engine.forward([(broken, [1]), (second, [2])])
        first.truncate(len(TOKENS))
        second.truncate(3)
        broken.close()
        vector[:] = kept
    first.truncate(len(TOKENS) - 1)
    second.truncate(2)
    after = engine.forward([(first, TOKENS[-1:]), (second, TOKENS[2:3])])
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new, old, atol=1e-4)
    engine.close()
