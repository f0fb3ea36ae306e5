"""Estimates of what runs would take, against numbers known from elsewhere."""

import dataclasses

import pytest
from rich.console import Console

from sparse_bitnet.cli import reproduce
from sparse_bitnet.errors import UserError
from sparse_bitnet.experiments.paper import plan
from sparse_bitnet.experiments.paper_plan import GPUS, estimate, print_estimates
from sparse_bitnet.experiments.scales import find_scale


def paper_run(model="qwen2.5-0.5b", **changes):
    runs = [run for run in plan(find_scale("paper"), ["table2"]) if run.config.model == model]
    return dataclasses.replace(runs[0].config, **changes)


@pytest.mark.parametrize(
    ("model", "weights"),  # of the published models, norms and biases aside
    [("qwen2.5-0.5b", 494_032_768), ("qwen2.5-1.5b", 1_543_714_304), ("qwen2.5-3b", 3_085_938_688)],
)
def test_weights_are_those_of_the_published_models(model, weights):
    assert estimate(paper_run(model)).weights == pytest.approx(weights, rel=3e-4)


def test_tokens_and_flops_of_the_papers_smallest_model():
    one = estimate(paper_run())
    assert one.tokens == pytest.approx(50e9, rel=1e-4)
    assert one.flops == pytest.approx(6 * one.weights * one.tokens, rel=0.15)
    assert one.flops > 6 * one.weights * one.tokens
    assert one.hours("H100", utilisation=0.5) == pytest.approx(one.hours("H100", 0.25) / 2)
    assert one.hours("B200") < one.hours("H100") < one.hours("A100")


def test_memory_of_activations_follows_the_micro_batch_and_checkpointing():
    one, two = estimate(paper_run()), estimate(paper_run(micro_batch_size=32))
    chunk = 8 * 512 * 151936
    assert (two.activation_bytes - chunk) == 2 * (one.activation_bytes - chunk)
    assert one.checkpointed_bytes < one.activation_bytes / 5
    assert two.state_bytes == one.state_bytes


def test_the_plan_lists_every_run_and_its_cost(capsys):
    scale = find_scale("paper")
    runs = plan(scale, ["table2", "sweep"])
    print_estimates(scale, runs, Console(width=200))
    text = capsys.readouterr().out
    assert all(run.name in text for run in runs)
    assert all(f"{gpu} h" in text for gpu in GPUS)
    assert "all runs" in text


def test_a_dry_run_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    reproduce.main(["table2", "--scale", "cpu", "--dry-run"])
    assert "0.3m-full-6-8" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())


def test_the_papers_sizes_are_not_started_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=r"needs GPUs; --dry-run"):
        reproduce.main(["table2", "--scale", "paper"])
    assert not any(tmp_path.iterdir())
