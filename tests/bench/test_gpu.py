# SPDX-License-Identifier: Apache-2.0
"""`bench gpu` rehearsed on the CPU: the steps run, resume, and say why they failed."""

import json

import pytest
import torch

from sparse_bitnet.bench import gpu
from sparse_bitnet.bench.options import PAPER_DECODE, PAPER_PREFILL, GpuBenchOptions
from sparse_bitnet.cli.bench import main
from sparse_bitnet.errors import UserError

WHERE = {"hardware": "a machine", "date": "2026-01-01", "commit": "abc"}


@pytest.fixture
def options() -> GpuBenchOptions:
    return GpuBenchOptions(rehearse=True)


@pytest.mark.parametrize("pattern", ["6:8", "2:4"])
def test_dense_and_sparse_products_give_the_trained_models_logits(options, pattern):
    ids = torch.randint(0, 1024, (1, 9))
    logits = []
    for variant in ("fake", "int8", "sparse"):
        model = gpu.build(options, variant, pattern, torch.float32).eval()
        if variant != "fake":
            gpu.for_inference_(model, variant, compiled=False)
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.equal(logits[1], logits[2])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_a_decode_step_attends_to_the_whole_context(options):
    model = gpu.build(options, "bf16", "6:8", torch.bfloat16).eval()
    rewind, call = gpu._decode(model, 2, options)
    for _ in range(2):
        rewind()
        assert call().shape == (2, 1, 1024)


@pytest.mark.parametrize("phase", ["prefill", "decode", "train"])
def test_every_variant_of_a_size_is_a_row_and_done_sizes_are_skipped(
    options, phase, tmp_path, capsys
):
    file = tmp_path / "rows.jsonl"
    gpu.run_step(options, phase, "6:8", file, WHERE)
    rows = gpu.read_rows(file)
    assert [row["variant"] for row in rows] == list(gpu.VARIANTS[phase])
    assert all(row["tokens_per_second"] > 0 and row["hardware"] == "a machine" for row in rows)
    gpu.run_step(options, phase, "6:8", file, WHERE)
    assert len(gpu.read_rows(file)) == len(rows)
    assert f"{phase} 6:8" in capsys.readouterr().out


def test_what_finds_no_memory_becomes_a_row(options, monkeypatch):
    def lacking(*arguments):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(gpu, "_prefill", lacking)
    rows = list(gpu.measure(options, "prefill", "6:8", []))
    assert {row["failed"] for row in rows} == {"out of memory"}
    assert {row["tokens_per_second"] for row in rows} == {None}


def test_training_ends_with_the_largest_batch_that_all_have_memory_for(monkeypatch):
    def step(variant, options, pattern, batch, length):
        if batch == 4 and variant == "fake":
            raise torch.OutOfMemoryError("no memory")
        return lambda: None, lambda: None

    options = GpuBenchOptions(rehearse=True)
    options.batch = []
    monkeypatch.setattr(gpu, "_training_step", step)
    rows = list(gpu.measure(options, "train", "6:8", []))
    assert [row["size"] for row in rows] == [4, 4, 4, 2, 2, 2]
    assert [row["variant"] for row in rows if row["failed"]] == ["fake"]


def test_the_command_runs_every_step_writes_a_page_and_names_what_failed(
    options, tmp_path, monkeypatch, capsys
):
    calls = []

    def process(options, step, pattern, folder, name, seconds):
        calls.append(name)
        (folder / f"{name}.txt").write_text("1 < 2")
        return "exit code 1: no driver" if name == "decode-2of4" else ""

    monkeypatch.setattr(gpu, "_in_a_process", process)
    row = {"phase": "prefill", "pattern": "6:8", "size": 512}
    speeds = zip(("bf16", "int8", "sparse"), (50, 100, 125), strict=True)
    lines = [json.dumps({**row, "variant": v, "tokens_per_second": s}) for v, s in speeds]
    (tmp_path / gpu.ROWS).write_text("\n".join(lines) + '\n{"cut')
    gains = {512: 1.1}
    for expected in (6, 1):
        assert not gpu.run_all(options, tmp_path, WHERE, lambda phase: gains)
        assert len(calls) == expected
        calls.clear()
    assert "decode-2of4: exit code 1: no driver" in capsys.readouterr().out
    page = (tmp_path / gpu.PAGE).read_text()
    assert "<td>125</td><td>1.25x</td><td>2.50x</td><td>1.10x</td>" in page
    assert "1 &lt; 2" in page


def test_the_papers_sizes_are_the_defaults():
    assert list(PAPER_PREFILL) == [2**power for power in range(9, 17)]
    assert list(PAPER_DECODE) == [64, 128, 256, 512]


def test_what_cannot_be_measured_is_refused(options):
    with pytest.raises(UserError, match="--rounds 0"):
        GpuBenchOptions(rounds=0)
    with pytest.raises(UserError, match="--tokens"):
        GpuBenchOptions(tokens=[0])
    for options.layers in (-1, 0, 99):
        with pytest.raises(UserError, match=r"--layers -?\d+: qwen2.5-0.3m has 1 to \d+$"):
            gpu.build(options, "bf16", "6:8", torch.bfloat16)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            main(["gpu"])
