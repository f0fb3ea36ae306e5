# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmarks on a tiny model in plain PyTorch: they run, and their rows hold together."""

import io
import json
import subprocess
import sys

import pytest
import torch

from sparse_bitnet.bench import gpu_kernels, gpu_models
from sparse_bitnet.bench.gpu_models import ternary_model
from sparse_bitnet.bench.gpu_record import rows_of, table
from sparse_bitnet.bench.gpu_timing import GpuRoofline, measured
from sparse_bitnet.bench.options import GpuBenchOptions
from sparse_bitnet.cli.bench import on_gpu
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
    rows = list(gpu_models.run_inference(options, "prefill"))
    assert [(row.variant, row.size) for row in rows] == [
        (variant, size) for size in (5, 9) for variant in ("bf16", "int8", "sparse", "chosen")
    ]
    assert all(row.tokens_per_second == row.size / row.seconds for row in rows)


def test_decode(options):
    options.batch = [2]
    rows = list(gpu_models.run_inference(options, "decode"))
    assert [row.variant for row in rows] == ["bf16", "int8", "sparse", "packed", "chosen"]


def test_train(options):
    options.tokens, options.batch = [16, 8], [2]
    rows = list(gpu_models.run_training(options))
    assert [(row.variant, row.layer, row.size) for row in rows] == [
        (name, f"2 x {length}", 2 * length) for length in (16, 8) for name in gpu_models.VARIANTS
    ]
    assert all(row.peak_bytes > 0 for row in rows)


def test_both_forwards_of_training_compute_the_same(options):
    ids = torch.randint(0, 1024, (2, 8))
    models = [gpu_models.training_model(name, options, CPU) for name in ("fake", "int8")]
    assert torch.equal(*(model(ids, labels=ids).loss for model in models))


def test_kernels_and_records(options, tmp_path, capsys):
    options.tokens = [2]
    out = tmp_path / "rows.jsonl"
    on_gpu("kernels", options, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    layers = ternary_layers(ternary_model(options, CPU))
    shapes = {f"{shape.out_features} x {shape.in_features}" for shape in layers}
    assert {row["layer"] for row in rows if row["variant"] == "dense"} == shapes
    assert all(0 < row["share"] < 2 for row in rows)
    assert {row["variant"] for row in rows} == {
        *("bf16", "dense", "sparse", "packed", "select", "quantise", "quantise windows")
    }
    printed = capsys.readouterr().out
    assert "share of the roofline" in printed
    assert all(shape in printed for shape in shapes)
    assert {"commit", "hardware", "versions", "date"} <= rows[0].keys()


def test_a_profile_names_the_kernels(options, capsys):
    options.tokens = [1, 4]
    rows = list(gpu_kernels.run_profile(options))
    assert {row.size for row in rows} == {1, 4}
    assert any("rope_cache" in row.variant for row in rows)
    assert 0 < sum(row.share for row in rows if row.size == 4) <= 1.001
    assert "Self CPU" in capsys.readouterr().out


def test_least_times_follow_from_bytes_and_operations(options):
    options.pattern = "2:4"
    model = ternary_model(options, CPU)
    set_policy_(model, RoutePolicy(always="sparse"))
    layer = next(iter(ternary_layers(model).values()))
    rows, columns = layer.out_features, layer.in_features
    slow_memory = GpuRoofline(bytes_per_second=1.0, bf16_per_second=1e30, int8_per_second=1e30)
    slow_products = GpuRoofline(bytes_per_second=1e30, bf16_per_second=2.0, int8_per_second=4.0)
    found = gpu_kernels.roofline_seconds("dense", layer, 1, slow_memory)
    assert found == (rows * columns + 2 * rows + columns, "memory")
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


def test_the_table_names_ratios_to_dense_int8_and_the_papers():
    rows = rows_of("prefill", 4096, {"int8": (40.96, 0.0), "sparse": (32.0, 0.0)})
    text = text_of(table(rows, "title"))
    assert "128  1.28x" in text
    assert text.count("1.28x") == 2


def test_rounds_are_interleaved():
    calls: list[str] = []
    makers = {name: lambda name=name: lambda: calls.append(name) for name in "ab"}
    found = measured(makers, CPU, 2, lambda: calls.append("-"))
    assert "".join(calls) == "abaabb-a-b-a-b"
    assert all(times[0] >= 0 for times in found.values())


def test_what_finds_no_memory_becomes_a_row(options, monkeypatch):
    def forward(self, *arguments):
        raise torch.OutOfMemoryError("no memory")

    options.tokens = [4]
    monkeypatch.setattr(gpu_models.SlotDecoder, "prompt", forward)
    rows = list(gpu_models.run_inference(options, "prefill"))
    assert {row.failed for row in rows} == {"out of memory"}
    assert {row.tokens_per_second for row in rows} == {None}
    assert "out of memory" in text_of(table(rows, "title"))
    monkeypatch.setattr(gpu_kernels, "quantized", forward)
    rows = list(gpu_kernels.run(options))
    assert {row.variant for row in rows if row.failed is None} == {"select", "bf16"}


def test_only_variants_that_fit_are_timed():
    def lacking():
        raise torch.OutOfMemoryError("no memory")

    def recording():
        try:
            lacking()
        finally:
            raise RuntimeError("the capture failed")

    found = measured({"a": lambda: lambda: None, "b": lacking, "c": lambda: recording}, CPU, 1)
    assert [name for name, times in found.items() if times is None] == ["b", "c"]
    with pytest.raises(RuntimeError, match="a defect"):
        measured({"a": lambda: exec("raise RuntimeError('a defect')")}, CPU, 1)


def test_training_takes_the_largest_batch_that_all_have_memory_for(options, monkeypatch):
    def step(variant, options, device, batch, length):
        if batch == 4 and variant == "fake":
            raise torch.OutOfMemoryError("no memory")
        return lambda: None

    monkeypatch.setattr(gpu_models, "_training_step", step)
    rows = list(gpu_models.run_training(options))
    assert [row.size // 2048 for row in rows] == [4, 4, 4, 2, 2, 2]
    assert [row.variant for row in rows if row.failed] == ["fake"]


def test_the_papers_sizes_are_the_defaults():
    from sparse_bitnet.bench.options import PAPER_DECODE, PAPER_PREFILL

    assert list(PAPER_PREFILL) == [2**power for power in range(9, 17)]
    assert list(PAPER_DECODE) == [64, 128, 256, 512]
    assert GpuBenchOptions().batch == GpuBenchOptions().tokens == []


def test_what_cannot_be_measured_is_refused(options):
    with pytest.raises(UserError, match="rounds=0"):
        GpuBenchOptions(rounds=0)
    with pytest.raises(UserError, match="tokens=0"):
        GpuBenchOptions(tokens=[0])
    for options.layers in (-1, 0, 99):
        with pytest.raises(UserError, match=r"--layers -?\d+: qwen2.5-0.3m has 1 to \d+$"):
            ternary_model(options, CPU)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            list(gpu_models.run_training(GpuBenchOptions()))


def test_the_command_prints_and_records(tmp_path, capsys):
    from sparse_bitnet.cli.bench import main

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
        "from sparse_bitnet.cli.bench import main\n"
        "try:\n"
        "    main(['train', '--help'])\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--rounds" in done.stdout
