# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmarks on a tiny model in plain PyTorch: they run, and their rows hold together."""

import io
import json
import subprocess
import sys

import pytest
import torch

from sparse_bitnet.bench import gpu_inference, gpu_kernels, gpu_train
from sparse_bitnet.bench.gpu_models import dense_model, inference_model, ternary_model
from sparse_bitnet.bench.gpu_options import GpuBenchOptions
from sparse_bitnet.bench.gpu_record import SpeedRow, kernel_table, table
from sparse_bitnet.bench.gpu_timing import GpuRoofline, medians, those_that_fit
from sparse_bitnet.cli.bench_gpu import run
from sparse_bitnet.engine.gpu.linear import RoutePolicy
from sparse_bitnet.engine.gpu.measure import set_policy_, ternary_layers
from sparse_bitnet.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture
def options() -> GpuBenchOptions:
    return GpuBenchOptions(model="qwen2.5-0.3m", device="cpu", rounds=1, layers=1, context=3)


def text_of(printable) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=200)
    console.print(printable)
    return console.file.getvalue()


def test_prefill(options):
    options.tokens = [5, 9]
    rows = gpu_inference.run_prefill(options)
    assert [(row.variant, row.size) for row in rows] == [
        (variant, size) for size in (5, 9) for variant in ("bf16", "int8", "sparse", "chosen")
    ]
    assert all(row.tokens_per_second == row.size / row.seconds for row in rows)


def test_decode(options):
    options.batch = [2]
    rows = gpu_inference.run_decode(options)
    assert [row.variant for row in rows] == ["bf16", "int8", "sparse", "packed", "chosen"]


def test_train(options):
    options.tokens, options.batch = [16], [2]
    rows = gpu_train.run(options)
    assert [(row.variant, row.size) for row in rows] == [(name, 32) for name in gpu_train.VARIANTS]
    assert all(row.peak_bytes > 0 for row in rows)


def test_both_forwards_of_training_compute_the_same(options):
    ids = torch.randint(0, 1024, (2, 8))
    models = [gpu_train.training_model(name, options, CPU) for name in ("fake", "int8")]
    assert torch.equal(*(model(ids, labels=ids).loss for model in models))


def test_kernels_and_records(options, tmp_path):
    from rich.console import Console

    options.tokens = [2]
    out, console = tmp_path / "rows.jsonl", Console(file=io.StringIO(), width=200)
    run("kernels", options, out, console)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    layers = ternary_layers(ternary_model(options, CPU))
    assert {
        (row["out_features"], row["in_features"]) for row in rows if row["route"] == "dense"
    } == {(shape.out_features, shape.in_features) for shape in layers}
    assert all(0 < row["roofline_share"] < 2 for row in rows)
    assert {row["route"] for row in rows} == {
        *("bf16", "dense", "sparse", "packed", "select", "quantise", "quantise windows")
    }
    assert "share" in console.file.getvalue()
    assert {"commit", "hardware", "versions", "date"} <= rows[0].keys()


def test_least_times_follow_from_bytes_and_operations(options):
    options.pattern = "2:4"
    model = ternary_model(options, CPU)
    set_policy_(model, RoutePolicy(always="sparse"))
    layer = next(iter(ternary_layers(model).values()))
    rows, columns = layer.out_features, layer.in_features
    slow_memory = GpuRoofline(bytes_per_second=1.0, bf16_per_second=1e30, int8_per_second=1e30)
    slow_products = GpuRoofline(bytes_per_second=1e30, bf16_per_second=2.0, int8_per_second=4.0)
    found = gpu_kernels.roofline_seconds("dense", layer, 1, slow_memory)
    assert found == (rows * columns + 2 * (rows + columns) + 2 * columns, "memory")
    times = {
        route: gpu_kernels.roofline_seconds(route, layer, 8, slow_products)
        for route in ("bf16", "dense", "sparse")
    }
    assert {bound for _, bound in times.values()} == {"compute"}
    operations = 2 * 8 * rows * columns
    assert times["bf16"][0] == operations / 2
    assert times["dense"][0] == operations / 4
    # 2:4 does half of the operations at twice the rate.
    assert times["sparse"][0] == operations / 16


def test_the_dense_baseline_is_merged_and_unchanged(options):
    ids = torch.randint(0, 1024, (1, 6))
    with torch.no_grad():
        plain, merged = (
            inference_model(options, CPU)(ids).logits,
            dense_model(options, CPU)(ids).logits,
        )
    torch.testing.assert_close(merged, plain, rtol=2e-2, atol=2e-2)


def test_the_table_names_ratios_to_dense_int8_and_the_papers():
    rows = [
        SpeedRow(
            phase="prefill",
            variant=name,
            size=4096,
            seconds=1.0,
            spread=0.0,
            tokens_per_second=speed,
        )
        for name, speed in (("int8", 100.0), ("sparse", 130.0))
    ]
    text = text_of(table(rows, "title"))
    assert "130  1.30x" in text
    assert "1.28x" in text


def test_rounds_are_interleaved():
    calls: list[str] = []
    functions = {name: lambda name=name: calls.append(name) for name in "ab"}
    found = medians(functions, CPU, 2, lambda: calls.append("-"))
    assert "".join(calls) == "aabb-a-b-a-b"
    assert all(seconds >= 0 for seconds, _ in found.values())


def test_what_finds_no_memory_becomes_a_row(options, monkeypatch):
    def forward(self, *arguments):
        raise torch.OutOfMemoryError("no memory")

    options.tokens = [4]
    monkeypatch.setattr(gpu_inference.SlotDecoder, "prompt", forward)
    rows = gpu_inference.run_prefill(options)
    assert {row.failed for row in rows} == {"out of memory"}
    assert {row.tokens_per_second for row in rows} == {None}
    assert "out of memory" in text_of(table(rows, "title"))
    monkeypatch.setattr(gpu_kernels, "quantize_int8", forward)
    kernel_rows = gpu_kernels.run(options)
    assert {row.route: row.failed for row in kernel_rows} == {
        "select": None,
        "all": "out of memory",
    }
    assert "out of memory" in text_of(kernel_table(kernel_rows, "title"))


def test_only_variants_that_fit_are_timed():
    def lacking():
        raise torch.OutOfMemoryError("no memory")

    def recording():
        try:
            lacking()
        finally:
            raise RuntimeError("the capture failed")

    makers = {"a": lambda: lambda: None, "b": lacking, "c": lambda: recording}
    found, without = those_that_fit(makers, CPU)
    assert (list(found), without) == (["a"], ["b", "c"])
    with pytest.raises(RuntimeError, match="a defect"):
        those_that_fit({"a": lambda: exec("raise RuntimeError('a defect')")}, CPU)


def test_the_papers_sizes_are_the_defaults():
    from sparse_bitnet.bench.gpu_options import PAPER_DECODE, PAPER_PREFILL

    assert list(PAPER_PREFILL) == [2**power for power in range(9, 17)]
    assert list(PAPER_DECODE) == [64, 128, 256, 512]
    assert GpuBenchOptions().batch == GpuBenchOptions().tokens == []


def test_what_cannot_be_measured_is_refused(options):
    from rich.console import Console

    with pytest.raises(UserError, match="bench sideways: choose one of prefill, decode, train"):
        run("sideways", options, None, Console())
    with pytest.raises(UserError, match="rounds=0"):
        GpuBenchOptions(rounds=0)
    with pytest.raises(UserError, match="tokens=0"):
        GpuBenchOptions(tokens=[0])
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            gpu_train.run(GpuBenchOptions())


def test_the_command_prints_and_records(tmp_path, capsys):
    from sparse_bitnet.cli.bench_gpu import main

    out = tmp_path / "rows.jsonl"
    small = ["--model", "qwen2.5-0.3m", "--layers", "1", "--device", "cpu", "--rounds", "1"]
    main(["decode", *small, "--batch", "1", "--context", "2", "--out", str(out)])
    assert "decode: qwen2.5-0.3m 6:8, 1 layers" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 5
    with pytest.raises(UserError, match="--tokenz"):
        main(["prefill", "--tokenz", "1"])


def test_help_needs_no_torch():
    code = (
        "import sys\n"
        "from sparse_bitnet.cli.bench_gpu import main\n"
        "try:\n"
        "    main(['train', '--help'])\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--rounds" in done.stdout
