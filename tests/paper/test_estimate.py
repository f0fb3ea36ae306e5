# SPDX-License-Identifier: Apache-2.0
"""Estimates of what runs would take, against numbers known from elsewhere."""

import dataclasses

import pytest
from rich.console import Console

from sparse_bitnet.cli import reproduce
from sparse_bitnet.errors import UserError
from sparse_bitnet_paper.estimate import (
    GPUS,
    Speed,
    flops,
    gpu_hours,
    parameters,
    print_plan,
)
from sparse_bitnet_paper.paper_runs import plan
from sparse_bitnet_paper.scales import find_scale


def paper_run(model="qwen2.5-0.5b", **changes):
    runs = [run for run in plan(find_scale("paper"), ["table2"]) if run.config.model == model]
    return dataclasses.replace(runs[0].config, **changes)


@pytest.mark.parametrize(
    ("model", "weights"),  # of the published models, norms and biases aside
    [("qwen2.5-0.5b", 494_032_768), ("qwen2.5-1.5b", 1_543_714_304), ("qwen2.5-3b", 3_085_938_688)],
)
def test_weights_are_those_of_the_published_models(model, weights):
    assert parameters(paper_run(model)) == pytest.approx(weights, rel=3e-4)


def test_tokens_and_flops_of_the_papers_smallest_model():
    one = paper_run()
    tokens = one.steps * one.tokens_per_step
    assert tokens == pytest.approx(50e9, rel=1e-4)
    assert flops(one) == pytest.approx(6 * parameters(one) * tokens, rel=0.15)
    assert flops(one) > 6 * parameters(one) * tokens
    assert gpu_hours(one, "B200") < gpu_hours(one, "H100") < gpu_hours(one, "A100")


def test_the_plan_on_gpus_lists_every_run_and_its_cost(capsys):
    scale = find_scale("paper")
    runs = plan(scale, ["table2", "sweep"])
    print_plan(scale, runs, [runs[0].name], None, 1, Console(width=80))
    text = capsys.readouterr().out
    assert all(run.name in text for run in runs)
    assert all(f"{gpu} h" in text for gpu in GPUS)
    assert "all runs" in text
    assert "…" not in text
    assert f"done  {runs[0].name}" in text
    assert text.count("\ndone  ") == 1
    assert max(map(len, text.splitlines())) <= 80


def test_minutes_follow_from_runs_that_have_ended_here(make_row, capsys):
    scale = find_scale("smoke")
    runs = plan(scale, ["table2"])
    tokens = runs[0].config.steps * runs[0].config.tokens_per_step
    speed = Speed([make_row(model=scale.main, tokens=tokens, seconds=60.0)])
    assert speed.seconds(runs[0].config) == pytest.approx(66)
    done = [run.name for run in runs if run.config.model == scale.main][:2]
    print_plan(scale, runs, done, speed, 1, Console(width=80))
    line = next(x for x in capsys.readouterr().out.splitlines() if x.split()[:1] == [scale.main])
    assert line.split()[1:3] == ["4", "2"]
    assert line.split()[-1] == "2.2"


def test_a_dry_run_trains_nothing_and_says_what_is_done(tmp_path, monkeypatch, capsys):
    """Within 80 columns, with minutes of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    reproduce.main(["table2", "--scale", "smoke", "--dry-run"])
    text = capsys.readouterr().out
    assert "runs/smoke: 0 of 8 runs are done" in text
    assert "0.3m-full-6-8" in text
    assert "minutes" in text
    assert "left on this machine" in text
    assert max(map(len, text.splitlines())) <= 80
    assert not any(tmp_path.iterdir())


def test_threads_are_part_of_the_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = []
    for options in ([], ["--threads", "2"]):
        reproduce.main(["table2", "--scale", "smoke", "--dry-run", *options])
        names.append({x for x in capsys.readouterr().out.split() if x.startswith("0.3m-")})
    assert len(names[0]) == len(names[1]) == 4
    assert not names[0] & names[1]


@pytest.mark.parametrize("scale", ["paper", "gpu"])
def test_large_scales_are_not_started_on_a_cpu(tmp_path, monkeypatch, scale):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=r"needs GPUs; --dry-run"):
        reproduce.main(["table2", "--scale", scale])
    assert not any(tmp_path.iterdir())
