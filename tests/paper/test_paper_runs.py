# SPDX-License-Identifier: Apache-2.0
"""The paper's experiments as run lists: complete, shared, fair."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from sparse_bitnet.checkpoint.build_model import PRESETS, build_model
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet_paper.cells import paper_results
from sparse_bitnet_paper.paper_runs import ABLATIONS, EXPERIMENTS, plan
from sparse_bitnet_paper.rate_runs import IDEAS
from sparse_bitnet_paper.scales import PAPER_SWEEP, SCALES, find_scale, four_formats
from sparse_bitnet_paper.training_run import NOT_IN_NAME, Run, config_hash

ROOT = Path(__file__).parents[2]
ALL = list(EXPERIMENTS)
SCALE_NAMES = list(SCALES)


def formats(runs):
    return {run.config.format for run in runs}


@pytest.mark.parametrize("name", SCALE_NAMES)
def test_every_run_is_complete_and_trainable(name):
    for run in plan(find_scale(name), ALL):
        config = run.config
        assert config.model in PRESETS
        SparseBitConfig.parse(config.format)
        assert config.validation_every * 2 <= config.steps
        assert run.purpose


@pytest.mark.parametrize("name", SCALE_NAMES)
@pytest.mark.parametrize("experiment", ["table2", "sweep", "ablations", "schedule", "mask-source"])
def test_runs_of_one_experiment_differ_in_format_and_schedule_alone(name, experiment):
    free = {"format", "sparse_fraction", *NOT_IN_NAME}
    groups = {}
    for run in EXPERIMENTS[experiment](find_scale(name)):
        config = dataclasses.asdict(run.config)
        assert config["data_seed"] == config["seed"]
        shared = {key: value for key, value in config.items() if key not in free}
        groups.setdefault((config["model"], config["seed"]), []).append(shared)
    assert groups
    for configs in groups.values():
        assert all(config == configs[0] for config in configs)


def test_models_of_one_seed_start_from_the_same_weights():
    runs = plan(find_scale("smoke"), ALL)
    first = {}
    for run in runs:
        model = build_model(
            run.config.model,
            SparseBitConfig.parse(run.config.format),
            seed=run.config.seed,
            vocab_size=64,
        )
        weights = first.setdefault(run.config.model, model.state_dict())
        assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    assert len(runs) > 3


def test_a_run_that_several_experiments_ask_for_is_one_run():
    scale = find_scale("cpu")
    asked = [run for name in ALL for run in EXPERIMENTS[name](scale)]
    planned = plan(scale, ALL)
    assert len({run.name for run in planned}) == len(planned) < len(asked)
    assert {run.name for run in asked} == {run.name for run in planned}
    for run in asked:
        (same,) = [other for other in planned if other.name == run.name]
        assert same.config == run.config


def test_names_are_readable_and_follow_the_config():
    run = plan(find_scale("cpu"), ["schedule"], seeds=1)[1]
    assert run.name.startswith("0.3m-ternary-6-8-rho25-lr")
    assert run.name.endswith(config_hash(run.config))
    moved = dataclasses.replace(run.config, data="elsewhere", out="there", keep_checkpoints=9)
    assert Run(config=moved, purpose="").name == run.name
    for change in ({"steps": 7}, {"format": "ternary-5:8"}, {"data_seed": 5}, {"threads": 3}):
        assert config_hash(dataclasses.replace(run.config, **change)) != config_hash(run.config)


def test_a_stored_config_of_the_same_name_is_compared():
    run = plan(find_scale("smoke"), ["table2"])[0]
    stored = dataclasses.asdict(run.config)
    assert run.differences({**stored, "data": "data", "out": "runs/x"}) == ""
    assert run.differences({k: v for k, v in stored.items() if k != "compile"}) == ""
    assert run.differences({**stored, "beta2": 0.9}) == "beta2 0.9 there, 0.95 here"


def test_seed_zero_of_everything_comes_first_and_the_main_size_before_others():
    scale = find_scale("cpu")
    runs = plan(scale, ALL)
    assert [run.config.seed for run in runs] == sorted(run.config.seed for run in runs)
    first = [run.config.model for run in runs if run.config.seed == 0]
    assert first == sorted(first, key=lambda model: model != scale.main)
    assert [run.config.format for run in runs[:4]] == list(four_formats("6:8"))


def test_seeds_on_request_replace_those_of_the_scale():
    assert {run.config.seed for run in plan(find_scale("cpu"), ALL, seeds=2)} == {0, 1}
    with pytest.raises(UserError, match="at least 1"):
        plan(find_scale("cpu"), ALL, seeds=0)


def test_experiments_are_those_of_the_paper():
    scale = find_scale("cpu")
    assert list(PAPER_SWEEP) == paper_results()["nm_sweep_ppl_0.5B"]["patterns"]
    assert formats(EXPERIMENTS["sweep"](scale)) == {
        f"{weight}-{pattern}" for weight in ("full", "ternary") for pattern in PAPER_SWEEP
    }
    assert formats(EXPERIMENTS["ablations"](scale)) == set(ABLATIONS.values())
    fractions = {
        (run.config.format, run.config.sparse_fraction) for run in EXPERIMENTS["schedule"](scale)
    }
    assert fractions == {("ternary-8:8", 1.0)} | {
        ("ternary-6:8", share) for share in (0.25, 0.5, 0.75, 1.0)
    }
    rates = {run.config.learning_rate for run in EXPERIMENTS["search"](scale)}
    assert rates == set(scale.size(scale.main).search)
    assert len(scale.sizes) == len(find_scale("paper").sizes) == 3
    assert {run.config.seed for run in EXPERIMENTS["table2"](scale)} >= {0, 1, 2}


def test_dense_runs_keep_the_checkpoints_that_the_heat_maps_need():
    for run in plan(find_scale("cpu"), ALL):
        kept = run.config.keep_checkpoints
        assert kept == (0 if run.is_dense else 1)
        if run.is_dense:
            assert 16 <= run.config.steps / run.config.checkpoint_every <= 18


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_scale("huge"), "scale 'huge' is unknown: choose one of smoke, cpu"),
        (lambda: plan(find_scale("cpu"), ["table9"]), "experiment 'table9' is unknown"),
    ],
)
def test_unknown_names_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_a_field_added_later_leaves_the_names_of_older_runs():
    config = TrainConfig()
    assert config_hash(dataclasses.replace(config, forward="int8")) != config_hash(config)
    committed = ROOT / "docs" / "results" / "cpu" / "results.jsonl"
    done = {json.loads(line)["name"] for line in committed.read_text().splitlines()}
    assert {run.name for run in plan(find_scale("cpu"), ALL)} <= done


def test_a_search_goes_on_until_the_best_rate_is_inside():
    scale = find_scale("cpu-paper")
    losses: dict[str, float] = {}
    asked = []
    while new := [run for run in plan(scale, ["search"], None, losses) if run.name not in losses]:
        found = [run.config for run in new if run.config.format == "full-8:8"]
        asked.append({(config.model[8:], config.learning_rate) for config in found})
        for run in new:
            # Full precision is best at 2.4e-2, the ternary models in the middle of the grid.
            best = 2.4e-2 if run.config.format.startswith("full") else 6e-3
            losses[run.name] = abs(run.config.learning_rate - best)
    assert asked == [
        {*(("0.3m", rate) for rate in (3e-3, 6e-3, 1.2e-2))}
        | {*(("0.5m", rate) for rate in (3e-3, 6e-3))}
        | {*(("1m", rate) for rate in (1.5e-3, 3e-3, 6e-3))},
        {("0.3m", 2.4e-2), ("0.5m", 1.2e-2), ("1m", 1.2e-2)},
        {("0.3m", 4.8e-2), ("0.5m", 2.4e-2), ("1m", 2.4e-2)},
        {("0.5m", 4.8e-2), ("1m", 4.8e-2)},
    ]
    own = plan(scale, ["own-rates"], None, losses)
    assert {(r.config.model[8:], r.config.format[:4], r.config.learning_rate) for r in own} == {
        *((model, "full", 2.4e-2) for model in ("0.3m", "0.5m", "1m")),
        *((model, "tern", 6e-3) for model in ("0.3m", "0.5m", "1m")),
        # What is best for all four together, of the rates that all have tried.
        *((model, kind, 1.2e-2) for model in ("0.3m", "0.5m", "1m") for kind in ("full", "tern")),
    }
    assert len(own) == 3 * (4 + 4) * scale.seeds["own-rates"]
    assert not plan(scale, ["own-rates"])


def test_the_published_recipe_changes_one_thing_at_a_time():
    scale = find_scale("cpu-paper")
    base = plan(scale, ["table2"], 1)[0].config
    found = {
        frozenset(base.difference(run.config)) - {"format", "seed", "data_seed"}
        for run in plan(scale, ["recipe"], 1)
    }
    assert found == {
        frozenset(("batch_size", "micro_batch_size", "steps")),
        frozenset(("final_learning_rate_fraction",)),
        frozenset(("final_weight_decay_fraction",)),
        frozenset(("masters",)),
        frozenset(("initial_weights",)),
    }


def test_the_smallest_size_ends_first_then_the_largest():
    models = [run.config.model for run in plan(find_scale("cpu-paper"), ["table2"])]
    sizes = [f"qwen2.5-{size}" for size in ("0.3m", "3m", "1m", "0.5m")]
    assert list(dict.fromkeys(models)) == sizes
    assert models == sorted(models, key=list(dict.fromkeys(models)).index)


def test_ideas_are_run_by_name_alone() -> None:
    runs = plan(find_scale("cpu"), ["ideas"], 1)
    assert [run.config.format for run in runs] == list(IDEAS.values())
    assert "ideas" not in EXPERIMENTS
    assert (
        len({(run.config.model, run.config.steps, run.config.learning_rate) for run in runs}) == 1
    )
