# SPDX-License-Identifier: Apache-2.0
"""`bench gpu` rehearsed on the CPU: the steps run, resume, and say why they failed."""

from unittest.mock import Mock

import pytest
import torch

from sparse_bitnet.bench import gpu
from sparse_bitnet.bench.options import GpuBenchOptions
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
            gpu.for_inference_(model, variant)
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.equal(logits[1], logits[2])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_rehearsal_measures_every_variant_writes_a_page_and_resumes(tmp_path, capsys):
    main(["gpu", "--rehearse", "--out", str(tmp_path)])
    rows = gpu.read_rows(tmp_path)
    steps = [(p, n) for p in ("prefill", "decode") for n in ("6:8", "2:4")] + [("train", "6:8")]
    expected = [(phase, n, name) for phase, n in steps for name in gpu.VARIANTS[phase]]
    assert [(row["phase"], row["pattern"], row["variant"]) for row in rows] == expected
    assert all(row["tokens_per_second"] > 0 and row["hardware"] for row in rows)
    assert "train 6:8 2 fake: " in capsys.readouterr().out
    assert (tmp_path / gpu.PAGE).read_text().count("<table") == 5
    with open(tmp_path / gpu.ROWS, "a") as file:
        file.write('{"cut')
    main(["gpu", "--rehearse", "--out", str(tmp_path)])
    assert gpu.read_rows(tmp_path) == rows
    (tmp_path / gpu.ROWS).write_text((tmp_path / gpu.ROWS).read_text().replace("-0.3m", "-3b"))
    with pytest.raises(UserError, match="has rows measured with options other than"):
        main(["gpu", "--rehearse", "--out", str(tmp_path)])


def test_a_page_shows_ratios_and_what_failed(options, tmp_path):
    row = {"phase": "prefill", "pattern": "6:8", "size": 512, "failed": None, "model": "qwen2.5-3b"}
    speeds = {"bf16": 50, "int8": 100, "sparse": 125}
    rows = [{**row, "variant": name, "tokens_per_second": s} for name, s in speeds.items()]
    (tmp_path / gpu.ROWS).write_text('{"cut off by a crash')
    gpu.append_records(tmp_path / gpu.ROWS, rows, WHERE)
    page = gpu.page(tmp_path, WHERE, lambda phase: {512: 1.1}, {"train 6:8": "1 < 2"})
    for cell in ("125", "1.25x", "2.50x", "1.10x"):
        assert f"<td>{cell}</td>" in page
    assert "train 6:8 failed: 1 &lt; 2" in page


def lacking(*arguments):
    raise torch.OutOfMemoryError("no memory")


def test_running_out_of_memory_becomes_a_row(options, monkeypatch):
    monkeypatch.setattr(gpu, "_prefill", lacking)
    rows = list(gpu.measure(options, "prefill", "6:8", []))
    assert {row["failed"] for row in rows} == {"out of memory"}
    assert {row["tokens_per_second"] for row in rows} == {None}


def test_training_uses_the_largest_batch_that_fits_all_variants(options, monkeypatch):
    def step(variant, options, pattern, batch, length):
        return lacking() if batch == 4 and variant == "fake" else lambda: None

    options.batch = ()
    monkeypatch.setattr(gpu, "_training_step", step)
    rows = list(gpu.measure(options, "train", "6:8", []))
    assert [row["size"] for row in rows] == [4, 4, 4, 2, 2, 2]
    assert [row["variant"] for row in rows if row["failed"]] == ["fake"]


def test_a_step_that_fails_is_named_and_ends_with_code_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "measure", Mock(side_effect=RuntimeError("no driver")))
    with pytest.raises(SystemExit, match="1"):
        main(["gpu", "--rehearse", "--out", str(tmp_path)])
    assert "decode 2:4: no driver" in capsys.readouterr().out


def test_invalid_sizes_are_refused(options):
    with pytest.raises(UserError, match="--rounds 0"):
        GpuBenchOptions(rounds=0)
    with pytest.raises(UserError, match="--tokens"):
        GpuBenchOptions(tokens=(0,))
    with pytest.raises(UserError, match=r"--rounds.*--rehearse takes its own"):
        GpuBenchOptions(rehearse=True, rounds=3)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            main(["gpu"])
