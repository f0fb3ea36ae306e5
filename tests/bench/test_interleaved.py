# SPDX-License-Identifier: Apache-2.0
"""A whole `bench` run with fake child processes, and one with the engine."""

import io
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from one_process import run_python
from sparse_bitnet.bench import interleaved
from sparse_bitnet.bench.child import read_bytes
from sparse_bitnet.bench.options import BenchOptions
from sparse_bitnet.errors import UserError
from sparse_bitnet.presets import Shape

PRETENDER = """
import sys
from sparse_bitnet.bench.child import serve

options, log = {}, open(sys.argv[1], "a")

def answer(question):
    if question["op"] == "load":
        options.update(question["options"])
        return {"load_seconds": 0.5, "resident_bytes": 7, "isa": options["isa"] or "generic",
                "weight_format": "i2", "head": "int8", "weight_bytes": 3e6,
                "cache_token_bytes": 5e3, "state_bytes": 0, "block_weights": 1e6}
    log.write(f"{question['op']} {options['threads']}\\n")
    log.flush()
    seconds = question["tokens"] + 1 if question["op"] == "prefill" else question["batch"]
    return {"seconds": seconds / options["threads"], "resident_bytes": 9}

serve(answer)
"""


def pretend(tmp_path: Path, model: object, **options) -> tuple[list, list[str]]:
    """Rows of a bench with children that compute nothing, and what each of them was asked for; by default
    one prompt of 9 tokens and one step, on one thread."""
    small = {"threads": (1,), "prefill": (9,), "contexts": (0,), "batches": (1,)}
    log = tmp_path / "log"
    options = {"model": str(model)} | ({} if "quick" in options else small) | options
    rows = interleaved.run(
        BenchOptions(**options), child=("-c", PRETENDER, str(log)), read_bytes=1 << 20
    )
    return rows, log.read_text().splitlines()


def test_rows_hold_medians_rates_and_shares(tmp_path: Path, tiny_folder: Path) -> None:
    sizes = {"prefill": (9, 9), "contexts": (0, 4, 0), "batches": (1, 2, 2)}
    rows, _ = pretend(tmp_path, tiny_folder, threads=(1, 2), rounds=3, **sizes)
    assert len(rows) == 2 * (1 + 4)
    prefill = next(row for row in rows if row["phase"] == "prefill" and row["threads"] == 2)
    assert prefill["seconds"] == 5
    assert prefill["tokens_per_second"] == pytest.approx(9 / 5)
    assert prefill["memory_share"] is None
    assert prefill["pattern"] == "6:8"
    assert prefill["rounds"] == 3
    assert prefill["spread"] == 0
    decode = [row for row in rows if row["phase"] == "decode" and row["threads"] == 1]
    assert [(row["batch"], row["tokens"]) for row in decode] == [(1, 0), (1, 4), (2, 0), (2, 4)]
    assert [row["tokens_per_second"] for row in decode] == [1, 1, 1, 1]
    assert decode[1]["step_bytes"] > decode[0]["step_bytes"]
    for row in decode:
        expected = row["step_bytes"] / row["seconds"] / row["read_bytes_per_second"]
        assert row["memory_share"] == pytest.approx(expected)


def test_prompts_and_contexts_end_where_the_models_positions_do(tmp_path: Path, tiny_folder: Path):
    positions = json.loads((tiny_folder / "config.json").read_text())["max_position_embeddings"]
    far = (positions + 1,)
    rows, _ = pretend(tmp_path, tiny_folder, prefill=far, contexts=far)
    assert [row["tokens"] for row in rows] == [positions, positions - BenchOptions.steps]
    rows, _ = pretend(tmp_path, tiny_folder, threads=(1,), quick=True)
    assert rows[0]["tokens"] == min(128, positions)


def test_patterns_are_measured_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows, log = pretend(tmp_path, "qwen2.5-0.3m", pattern=("8:8", "3:4 binary"), rounds=2)
    assert [row["pattern"] for row in rows] == ["8:8", "3:4 binary"] * 2
    assert [line.split()[0] for line in log] == ["prefill", "prefill", "decode", "decode"] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": (0,)}, "--threads"),
        ({"contexts": (-1,)}, "--contexts"),
        ({"rounds": 0}, "--rounds"),
        ({"quick": True, "prefill": (64,)}, "--prefill 64 is not used here: --quick takes its own"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        BenchOptions(**options)


def test_the_table_shows_every_measurement(tmp_path: Path, tiny_folder: Path) -> None:
    rows, _ = pretend(tmp_path, tiny_folder, threads=(1, 2), rounds=1)
    console = Console(width=200, file=io.StringIO())
    console.print(interleaved.table(rows))
    text = console.file.getvalue()
    for words in ("prefill 9", "decode, context 0, batch 1", "i2, int8, 2 threads, generic"):
        assert words in text
    assert "TOP/s" in text
    assert "1.8" in text


@pytest.mark.train
@pytest.mark.parametrize("pattern", ["2:4", "6:8"])
def test_a_pattern_is_refused_for_a_model_with_its_own(
    tmp_path: Path, tiny_folder: Path, pattern: str
) -> None:
    for model in (tiny_folder, Path("bonsai-2b")):
        with pytest.raises(UserError, match=f"--pattern {pattern} is not used here: {model}"):
            pretend(tmp_path, model, pattern=(pattern,))


@pytest.mark.parametrize("config", [None, '{"model_type": "qwen2"}'])
def test_a_model_that_is_neither_preset_nor_packed_is_refused(tmp_path: Path, config: str | None):
    if config:
        (tmp_path / "config.json").write_text(config)
    out = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "sparse_bitnet", "bench", str(tmp_path), "--out", str(out)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert not out.exists()
    assert ("sparse-bitnet distill" if config else "nor a model folder") in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "head_row", "vector"),
    [
        ({"kv_cache": "float32", "head": "stored"}, 256 + 4, 256),
        ({"kv_cache": "float16", "head": "int4"}, 128 + 16, 128),
        ({"kv_cache": "int8"}, 256 + 4, 68),
        ({"kv_cache": "int4"}, 256 + 4, 36),
    ],
)
def test_a_step_reads_weights_head_keys_and_values(
    tiny_folder: Path, tiny_shape: Shape, options: dict, head_row: int, vector: int
) -> None:
    engine = pytest.importorskip("sparse_bitnet.engine.engine").Engine.load(
        tiny_folder, threads=1, weight_format="i2", **options
    )
    read = read_bytes(engine)
    assert engine.head_bytes == 512 * head_row
    assert read["cache_token_bytes"] == 2 * 2 * 2 * vector  # keys and values, layers, heads
    assert read["block_weights"] == tiny_shape.block_weights
    rows = sum(rows for rows, _ in tiny_shape.linears.values())
    blocks = read["weight_bytes"] - engine.head_bytes
    assert 0 <= blocks - tiny_shape.block_weights / 4 < 64 * rows
    engine.close()


def test_bench_writes_a_model_and_rows_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("sparse_bitnet.engine.engine")
    model, out = str(tmp_path / "model"), str(tmp_path / "rows.jsonl")
    words = "--threads 1 --prefill 9 --contexts 0 70 --batches 1 3 --rounds 2 --steps 2 --out"
    script = f"""
import sys
from sparse_bitnet.bench.random_model import write_random_model
from sparse_bitnet.cli.main import main
from sparse_bitnet.pattern import NMPattern
write_random_model({model!r}, "qwen2.5-0.3m", NMPattern(6, 8))
main(["bench", {model!r}, *{words!r}.split(), {out!r}])
assert not {{"torch", "transformers"}} & {{*sys.modules}}
"""
    run_python(script)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_every_job_comes_once_a_round_within_its_group() -> None:
    order = [job for _, job in interleaved.turns([["a", "b", "c"], ["d"]], 8)]
    rounds = [order[first : first + 4] for first in range(0, 32, 4)]
    assert all(set(jobs[:3]) == {"a", "b", "c"} and jobs[3] == "d" for jobs in rounds)
    assert len({tuple(jobs) for jobs in rounds}) > 1


@pytest.mark.parametrize("threads", [1, 2])
def test_roofline_meter_returns_plausible_speeds(threads: int) -> None:
    _cpu = pytest.importorskip("sparse_bitnet._cpu")
    meter = interleaved.RooflineMeter(threads, ["generic"], read_bytes=8 << 20)
    for _ in range(2):
        meter.visit()
    median = meter.result("generic")
    assert (median["threads"], median["isa"]) == (threads, "generic")
    for name in ("read_bytes_per_second", "int8_ops_per_second"):
        assert 1e8 < median[name] < math.inf


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("read_rate", (8, -1)),
        ("read_rate", (1, 1 << 20)),
        ("read_rate", (0, 0)),
        ("int8_rate", ("sse", 0.01)),
        ("int8_rate", ("generic", 0.0)),
        ("int8_rate", ("generic", math.nan)),
        ("int8_rate", ("generic", 1e9)),
    ],
)
def test_the_roofline_refuses_sizes_that_it_cannot_measure(method: str, arguments: tuple) -> None:
    _cpu = pytest.importorskip("sparse_bitnet._cpu")
    with pytest.raises(ValueError, match=r"out of range|this machine has"):
        getattr(_cpu.Roofline(1, 1 << 20), method)(*arguments)
    for sizes in ((0, 1), (1, 0), (1 << 20, 1), (1, -5), (1, 2**47), (1, 2**63 - 1)):
        with pytest.raises(ValueError, match="out of range"):
            _cpu.Roofline(*sizes)


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="Linux only")
def test_processor_time_of_ended_children_counts_as_ours() -> None:
    before = interleaved.processor_seconds()
    assert before is not None
    share = interleaved.others_share(before)
    assert share is None or 0 <= share <= 1
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    assert interleaved.processor_seconds()[2] > before[2]
    assert interleaved.others_share(None) is None
