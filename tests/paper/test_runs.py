# SPDX-License-Identifier: Apache-2.0
"""The paper's experiments as run lists: complete, shared, fair."""

import dataclasses
from pathlib import Path

import pytest

from sparse_bitnet.cli import paper
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.presets import PRESETS
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.runs import EXPERIMENTS, NOT_IN_NAME, plan
from sparse_bitnet_paper.scales import SCALES, QuickstartConfig, find_scale, four_formats

ROOT = Path(__file__).parents[2]
ALL = list(EXPERIMENTS)


def formats(runs):
    return {run.config.format for run in runs}


@pytest.mark.parametrize("name", SCALES)
def test_every_run_is_complete_and_trainable(name):
    for run in plan(find_scale(name), ALL):
        assert run.config.model in PRESETS
        SparseBitConfig.parse(run.config.format)
        assert run.config.validation_every * 2 <= run.config.steps


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("experiment", ["table2", "sweep", "ablations", "schedule"])
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


def test_a_run_of_several_experiments_is_one_run():
    scale = find_scale("cpu")
    asked = [run for name in ALL for run in EXPERIMENTS[name](scale)]
    planned = {run.name: run.config for run in plan(scale, ALL)}
    assert len(planned) < len(asked)
    assert planned == {run.name: run.config for run in asked}


def test_seed_zero_of_everything_comes_first_and_the_main_size_before_others():
    scale = find_scale("cpu")
    runs = plan(scale, ALL)
    assert [run.config.seed for run in runs] == sorted(run.config.seed for run in runs)
    first = [run.config.model for run in runs if run.config.seed == 0]
    assert first == sorted(first, key=lambda model: model != scale.main)
    assert [run.config.format for run in runs[:4]] == list(four_formats("6:8"))


def test_seeds_on_request_replace_those_of_the_scale():
    assert {run.config.seed for run in plan(find_scale("cpu"), ALL, seeds=2)} == {0, 1}
    assert {run.config.seed for run in plan(find_scale("gpu"), ["ideas"], seeds=2)} == {0, 1}
    assert QuickstartConfig(pattern="06:8").pattern == "6:8"
    with pytest.raises(UserError, match="at least 1"):
        plan(find_scale("cpu"), ALL, seeds=0)


@pytest.mark.parametrize(
    "command",
    [
        lambda typo: QuickstartConfig(dense_layers=typo),
        lambda typo: paper.reproduce(["--scale", "smoke", "--dry-run", "--dense-layers", typo]),
    ],
)
def test_dense_layers_that_match_no_layer_are_refused(command):
    missing = r"dense_layers donw: no linear layer of .* has such a name"
    for globs, message in (("down_proj,donw", missing), (",", "give names of layers")):
        with pytest.raises(UserError, match=message):
            command(globs)


@pytest.mark.parametrize(("folder", "names"), [("cpu", ALL), ("cpu-ideas", ["ideas"])])
def test_the_committed_sets_hold_the_runs_of_their_scale(folder, names):
    """A field that is added to `TrainConfig` renames no run."""
    done = set(Results(ROOT / "docs" / "results" / folder).rows.name)
    assert {run.name for run in plan(find_scale("cpu"), names)} <= done
