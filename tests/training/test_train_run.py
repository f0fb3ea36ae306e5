# SPDX-License-Identifier: Apache-2.0
"""The loop: what it logs, that it learns, and that stopping at any moment changes nothing."""

import dataclasses
import filecmp
import json
from pathlib import Path

import pytest
import torch
from small_runs import final_weights, interrupted, logged, losses

from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint
from sparse_bitnet.checkpoint.saved_steps import list_checkpoints
from sparse_bitnet.errors import UserError
from sparse_bitnet.training import loss as loss_module
from sparse_bitnet.training import trainer as trainer_module
from sparse_bitnet.training.loss import SummedLoss, held_out_windows, validation_loss
from sparse_bitnet.training.trainer import Trainer, train


def assert_same_run(a: Path, b: Path) -> None:
    """Weights, optimiser, masks, random state and logs are the same bytes."""
    last_a, last_b = list_checkpoints(a)[-1].path, list_checkpoints(b)[-1].path
    for name in ("sharded/__0_0.distcp", "model/config.json"):
        assert filecmp.cmp(last_a / name, last_b / name, shallow=False), name
    states = [json.loads((last / "state.json").read_text()) for last in (last_a, last_b)]
    for state in states:
        del state["files"]["sharded/.metadata"]  # it names the time of its writing
    assert states[0] == states[1]
    for name in ("metrics.jsonl", "final/model.safetensors"):
        assert filecmp.cmp(a / name, b / name, shallow=False), name


def test_a_run_logs_every_step_and_learns(small_run):
    config = small_run(steps=60, learning_rate=1e-2, checkpoint_every=0)
    seen = []
    result = train(config, on_step=seen.append)
    steps = [row for row in logged(config) if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 61)) == [row["step"] for row in seen]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert steps[0]["flip_rate"] is None
    assert 0 < steps[1]["flip_rate"] < 0.2
    assert 0.25 < steps[0]["zero_fraction"] < 0.75
    assert steps[2]["tokens"] == 3 * 4 * 32
    by_layer = [row["step"] for row in steps if "flip_rate_by_layer" in row]
    assert by_layer == list(range(3, 61, 3))
    assert {"tokens_per_second", "seconds"} <= seen[-1].keys()
    assert result.validation_tokens == 256
    assert logged(config)[-1]["validation_perplexity"] == result.validation_perplexity
    assert train(config) == result, "a finished run returns its result"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sparse_fraction": 0.0},
        {"format": "ternary-6:8,schedule=gradual:until=1"},
        {"format": "ternary-6:8,schedule=lambda:until=1"},
    ],
)
def test_validations_score_the_model_that_is_stored(small_run, changes):
    config = small_run(validation_every=4, **changes)
    result = train(config)
    scored = {row["step"]: row for row in logged(config) if "validation_loss" in row}
    assert scored[6]["validation_loss"] == result.validation_loss
    where = {"device": torch.device("cpu"), "dtype": torch.float32}
    for step, folder in ((4, list_checkpoints(Path(config.out))[0].path), (6, config.out)):
        model = find_checkpoint(folder).load()
        loss, tokens = validation_loss(SummedLoss(model), config, held_out_windows(config), **where)
        assert (loss, tokens) == (scored[step]["validation_loss"], result.validation_tokens)
    assert result.zero_fraction > 0.25, "pruned"
    assert model.config.eos_token_id is not None


def test_the_four_cells_start_alike_and_see_the_same_batches(small_run, tmp_path, monkeypatch):
    seen = []

    def forward_backward(self: Trainer, step: int) -> torch.Tensor:
        weights = [value.detach().clone() for value in self.model.parameters()]
        seen.append([*weights, *self.loader.batch(step - 1)])
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_forward_backward", forward_backward)
    for format in ("full-8:8", "full-6:8", "ternary-8:8", "ternary-6:8"):
        with pytest.raises(KeyboardInterrupt):
            train(small_run(format=format, out=str(tmp_path / format)))
    for other in seen[1:]:
        assert all(torch.equal(*pair) for pair in zip(seen[0], other, strict=True))


def test_dense_to_sparse_switches_the_mask_on(small_run):
    config = small_run(steps=8, sparse_fraction=0.5, checkpoint_every=0)
    train(config)
    steps = [row for row in logged(config) if "loss" in row]
    assert [row["sparse"] for row in steps] == [False] * 4 + [True] * 4
    assert {row["flip_rate"] for row in steps[1:4]} == {0.0}
    assert steps[4]["flip_rate"] == 0.25, "a mask of ones becomes one of three quarters"


def test_the_options_of_the_published_recipe_take_effect(small_run, monkeypatch):
    made = []
    monkeypatch.setattr(
        trainer_module, "Trainer", lambda *all: made.append(Trainer(*all)) or made[0]
    )
    changes = {"initial_weights": "uniform", "final_weight_decay_fraction": 0.0}
    config = small_run(masters="bf16", learning_rate=1e-9, steps=3, **changes)
    assert train(config).steps == 3
    (trainer,) = made
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    layer = next(iter(trainer.layers.values()))
    bound = layer.in_features**-0.5
    assert 0.95 * bound < layer.weight.abs().max() <= 1.01 * bound
    near_zero = (layer.weight.abs() < layer.weight.abs().mean() / 2).float().mean()
    assert near_zero == pytest.approx(0.25, abs=0.03)
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.0, 0.0]


@pytest.mark.parametrize("sparse_fraction", [1.0, 0.5])
def test_interrupting_and_continuing_gives_the_same_bytes(small_run, tmp_path, sparse_fraction):
    changes = {"steps": 7, "sparse_fraction": sparse_fraction}
    whole = small_run(out=str(tmp_path / "whole"), **changes)
    train(whole)
    parts = small_run(out=str(tmp_path / "parts"), **changes)
    for step in (1, 3, 4):
        interrupted(parts, step)
    train(parts)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("sparse_fraction", [1.0, 0.0])
def test_a_run_stopped_after_its_last_step_finishes_once(
    small_run, tmp_path, monkeypatch, sparse_fraction
):
    changes = {"sparse_fraction": sparse_fraction, "validation_every": 2}
    whole = train(small_run(out=str(tmp_path / "whole"), **changes))

    def killed(*_):
        raise KeyboardInterrupt

    stopped = small_run(out=str(tmp_path / "stopped"), **changes)
    with monkeypatch.context() as patched:
        patched.setattr(trainer_module, "save_pretrained", killed)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                train(stopped)
    assert dataclasses.replace(train(stopped), run=whole.run) == whole
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_metrics_without_the_last_row_are_refused(small_run):
    config = small_run(steps=2)
    train(config)
    for name in ("metrics.jsonl", "result.json"):
        (Path(config.out) / name).unlink()
    with pytest.raises(UserError, match=r"lacks the row of step 2: .*remove .*step-00000002"):
        train(config)


def test_a_folder_that_is_not_a_run_is_refused(small_run, tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("x")
    with pytest.raises(UserError, match="neither empty nor a run folder"):
        train(small_run(out=str(tmp_path / "letters")))
    assert [path.name for path in (tmp_path / "letters").iterdir()] == ["dear.txt"]


def test_a_loss_that_is_not_finite_stops_with_step_checkpoint_and_batch(small_run, monkeypatch):
    config = small_run(steps=5)
    calls = []

    def poisoned(*args, **kwargs):
        calls.append(1)
        loss = real_loss(*args, **kwargs)
        return loss * float("nan") if len(calls) > 5 else loss

    real_loss = loss_module.SummedLoss.forward
    monkeypatch.setattr(loss_module.SummedLoss, "forward", poisoned)
    with pytest.raises(UserError, match="step 3: loss nan") as caught:
        train(config)
    message = str(caught.value)
    assert "step-00000002" in message
    assert "windows [" in message
    assert "\n" not in message
    assert [row["step"] for row in logged(config)] == [1, 2]
    assert not (Path(config.out) / "result.json").exists()


def test_tensorboard_events_are_written(small_run):
    pytest.importorskip("tensorboard")
    config = small_run(steps=3, tensorboard=True)
    train(config)
    assert list((Path(config.out) / "tensorboard").glob("events*"))


def test_micro_batches_give_the_gradient_of_the_whole_batch(small_run, tmp_path):
    norms = []
    for micro in (1, 2, 4):
        config = small_run(micro_batch_size=micro, steps=1, out=str(tmp_path / str(micro)))
        train(config)
        norms.append(logged(config)[0]["gradient_norm"])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


@pytest.mark.parametrize("changes", [{"activation_checkpointing": True}, {"forward": "int8"}])
def test_an_option_for_memory_or_speed_changes_no_bit_in_float32(small_run, tmp_path, changes):
    train(plain := small_run(out=str(tmp_path / "plain")))
    train(changed := small_run(**changes))
    assert logged(changed) == logged(plain)
    assert final_weights(changed) == final_weights(plain)


def test_int8_forward_trains_as_the_fake_quantised_one_in_bf16(small_run, tmp_path):
    options = {"steps": 20, "checkpoint_every": 0, "learning_rate": 1e-3, "precision": "bf16"}
    train(fake := small_run(**options))
    train(integer := small_run(**options, forward="int8", out=str(tmp_path / "int8")))
    assert losses(integer) == pytest.approx(losses(fake), abs=2e-2)
