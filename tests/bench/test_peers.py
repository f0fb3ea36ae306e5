# SPDX-License-Identifier: Apache-2.0
"""benchmarks/peers.py: the reading of other engines' results, ratios, and llama.cpp itself."""

import io
import json
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from benchmark_scripts import load_script
from sparse_bitnet.bench.child import Child
from sparse_bitnet.errors import UserError


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    return load_script("peers")


@pytest.fixture(scope="module")
def engines() -> ModuleType:
    return load_script("peer_engines")


def executable(path: Path, output: str) -> str:
    path.write_text(f"#!{sys.executable}\nimport sys\nprint({output!r})\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_llama_bench_results_become_seconds(engines: ModuleType, tmp_path: Path) -> None:
    command = [executable(tmp_path / "llama-bench", json.dumps([{"avg_ts": 50.0}]))]
    assert engines.llama_bench(command, "prefill", 512) == pytest.approx(10.24)
    assert engines.llama_bench(command, "decode", 32) == pytest.approx(0.02)


@pytest.mark.parametrize("output", ["", "[]", "{}", '[{"avg_ts": null}]', "no JSON"])
def test_a_binary_other_than_llama_bench_is_refused(
    engines: ModuleType, tmp_path: Path, output: str
) -> None:
    command = [executable(tmp_path / "other", output)]
    with pytest.raises(UserError, match="gave no JSON result"):
        engines.llama_bench(command, "decode", 32)
    with pytest.raises(UserError, match="cannot run"):
        engines.llama_bench([str(tmp_path / "absent")], "decode", 32)


def test_ratios_compare_the_best_of_one_instruction_set(peers: ModuleType) -> None:
    def row(engine: str, type: str, isa: str, threads: int, rate: float):
        return peers.Row(
            engine=engine,
            version="1",
            type=type,
            isa=isa,
            threads=threads,
            phase="decode",
            tokens=32,
            tokens_per_second=rate,
            seconds=[1 / rate],
        )

    rows = [
        row(peers.OURS, "i2", "avx2", 1, 30.0),
        row(peers.OURS, "b3", "avx2", 2, 40.0),
        row(peers.OURS, "i2", "avx512", 2, 70.0),
        row("llama.cpp", "TQ2_0", "avx2", 1, 25.0),
        row("llama.cpp", "TQ2_0", "avx2", 2, 20.0),
        row("other", "Q2_0", "avx512vnni", 2, 90.0),
    ]
    (ratio,) = peers.ratios(rows)
    assert ratio["ours"] == "b3, 2 threads"
    assert ratio["peer"] == "llama.cpp TQ2_0, 1 threads"
    assert ratio["ratio"] == 1.6


def test_another_engine_is_measured_beside_ours(peers: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("sparse_bitnet.engine.engine")
    binary = executable(tmp_path / "llama-bench", json.dumps([{"avg_ts": 50.0}]))
    options = (
        "--model tiny --pattern 6:8 --type --rounds 2 --prompt 5 --steps 2 --threads 1 --isa generic "
        f"--weight-format i2 b3 --models {tmp_path} --out {tmp_path}/rows.jsonl "
        f"--llama-bench {binary} --gguf some.gguf --llama-bench-args=-rtr=0 --built-for generic "
        f"--llama-bench {binary} --gguf q2_0 --llama-bench-args=-rtr=1"
    )
    made = tmp_path / "tiny-6of8-scale_group-0-v3-gguf-q2_0" / "model-Q2_0.gguf"
    made.parent.mkdir()
    made.touch()
    console = Console(file=io.StringIO(), width=80)
    peers.run(peers.parse_arguments(options.split()), console, read_bytes=1 << 20)
    text = console.file.getvalue()
    assert "x llama" in text or "x " + tmp_path.name in text
    assert "b3" in text
    for row in ("some -rtr=0", "Q2_0 -rtr=1"):
        assert row in " ".join(text.split()), "a row of its own"
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "engine" in line]
    assert len(rows) == 2 * 2 + 2 * 2
    assert all(len(row["seconds"]) == 2 for row in rows)
    assert sum("roofline" in line for line in lines) == 1


@pytest.mark.parametrize("options", ["--llama-bench a", "--type tq2_0 --gguf b", "--threads two"])
def test_contradicting_options_are_refused(peers: ModuleType, options: str) -> None:
    with pytest.raises(SystemExit) as stop:
        peers.parse_arguments(options.split())
    assert stop.value.code == 2


def test_llama_cpp_is_measured(engines: ModuleType, tiny_folder: Path) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    path = engines.gguf_file(tiny_folder, "tq2_0")
    with Child(engines.LLAMA_CPP) as child:
        with pytest.raises(UserError, match="cannot load"):
            child.ask({"op": "load", "path": str(tiny_folder), "context_length": 64})
        loaded = child.ask({"op": "load", "path": str(path), "context_length": 64})
        assert loaded["version"].startswith("llama-cpp-python")
        for question in (
            {"op": "prefill", "tokens": 20, "threads": 1},
            {"op": "decode", "steps": 4, "context": 3, "threads": 1},
        ):
            assert child.ask(question)["seconds"] > 0
