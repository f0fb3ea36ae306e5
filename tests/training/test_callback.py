# SPDX-License-Identifier: Apache-2.0
"""SparseBitCallback under transformers.Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from factories import tiny_model
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import convert_, sparse_layers
from sparse_bitnet.nn.layer import SparseBitConfig, SparseBitLinear
from sparse_bitnet.ops.mask_words import mask_flip_rate
from sparse_bitnet.ops.nm_mask import nm_mask
from sparse_bitnet.training.callback import SparseBitCallback


class Windows(Dataset):
    def __init__(self, count: int = 32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, 96, (count, 16), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Recorder(TrainerCallback):
    """Masks at the start of every step, taken from the weights themselves."""

    def __init__(self) -> None:
        self.masks: list[torch.Tensor] = []

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        layers = sparse_layers(kwargs["model"]).values()
        masks = [nm_mask(layer.weight, layer.config.pattern).flatten() for layer in layers]
        self.masks.append(torch.cat(masks))


@pytest.fixture
def make_trainer(tmp_path: Path):
    def build(model: nn.Module, *callbacks: TrainerCallback, **arguments: Any) -> Trainer:
        settings: dict[str, Any] = {"output_dir": str(tmp_path / "out"), "max_steps": 4}
        settings |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 4}
        settings |= {"learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no"}
        settings |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
        return Trainer(
            model=model,
            args=TrainingArguments(**(settings | arguments)),
            train_dataset=Windows(),
            eval_dataset=Windows(8),
            callbacks=list(callbacks),
        )

    return build


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> list[SparseBitLinear]:
    """Every layer that selects, once per selection."""
    made: list[SparseBitLinear] = []
    original = SparseBitLinear._source

    def source(self):
        made.append(self)
        return original(self)

    monkeypatch.setattr(SparseBitLinear, "_source", source)
    return made


def converted(text: str = "ternary-6:8", **changes: Any) -> nn.Module:
    return convert_(tiny_model(**changes), SparseBitConfig.parse(text))


def training_logs(trainer: Trainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_selects_once_per_step_over_micro_batches_and_recomputation(make_trainer, selections):
    model = converted()
    trainer = make_trainer(
        model, SparseBitCallback(), gradient_accumulation_steps=3, gradient_checkpointing=True
    )
    trainer.train()
    assert len(selections) == 4 * len(sparse_layers(model))
    assert not any(layer.is_selected for layer in sparse_layers(model).values())


def test_follows_the_schedule_and_evaluates_in_the_full_format(make_trainer) -> None:
    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs) -> None:
            seen.append((layer.kept, layer.blend))

    model, plain, seen = converted("ternary-6:8,schedule=lambda:until=1"), converted(), []
    layer = next(iter(sparse_layers(model).values()))
    trainer = make_trainer(model, SparseBitCallback(), Watch(), eval_strategy="steps", eval_steps=4)
    trainer.train()
    assert seen == [(6, 0.0), (6, 0.25), (6, 0.5), (6, 0.75)]
    plain.load_state_dict(model.state_dict())
    for layer.kept, layer.blend in [(8, 0.5)]:  # as after a step that another callback stopped
        SparseBitCallback().on_train_end(model=model, args=None, state=None, control=None)
    assert (layer.kept, layer.blend) == (None, 1.0)
    evaluated = make_trainer(plain).evaluate()["eval_loss"]
    assert evaluated in [entry.get("eval_loss") for entry in trainer.state.log_history]


def test_trains_to_the_same_weights_as_without_it(make_trainer) -> None:
    models = [converted(), converted()]
    make_trainer(models[0], SparseBitCallback(), gradient_accumulation_steps=2).train()
    make_trainer(models[1], gradient_accumulation_steps=2).train()
    assert not torch.equal(models[0].lm_head.weight, converted().lm_head.weight)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("evaluate", [False, True])
def test_logs_the_flip_rate_between_consecutive_steps(make_trainer, evaluate: bool) -> None:
    recorder = Recorder()
    trainer = make_trainer(
        converted(),
        SparseBitCallback(),
        recorder,
        eval_strategy="steps" if evaluate else "no",
        eval_steps=1,
    )
    trainer.train()
    logs = training_logs(trainer)
    assert "flip_rate" not in logs[0]
    pairs = zip(recorder.masks[:-1], recorder.masks[1:], strict=True)
    expected = [mask_flip_rate(before, after).item() for before, after in pairs]
    assert [entry["flip_rate"] for entry in logs[1:]] == expected
    assert all(rate > 0 for rate in expected)
    assert all(0.25 <= entry["zero_fraction"] < 0.7 for entry in logs)
    assert not [
        entry
        for entry in trainer.state.log_history
        if "eval_loss" in entry and "flip_rate" in entry
    ]


def test_a_step_that_raises_leaves_nothing_stale(make_trainer) -> None:
    class Trap(TrainerCallback):
        armed = True

        def on_substep_end(self, args, state, control, **kwargs) -> None:
            if self.armed and state.global_step == 1:
                raise RuntimeError("of the user")

    model, trap, ids = converted(), Trap(), Windows().ids[:2]
    trainer = make_trainer(model, SparseBitCallback(), trap, gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match="of the user"):
        trainer.train()
    # The weights are still those of the selection; then they change, and the selection is not used.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    optimizer.step()
    fresh = converted()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(ids).logits, fresh.eval()(ids).logits)
    assert trainer.evaluate()["eval_loss"] == make_trainer(fresh).evaluate()["eval_loss"]
    trap.armed = False
    trainer.train()
    assert not any(layer.is_selected for layer in sparse_layers(model).values())


def test_a_loaded_model_can_be_fine_tuned_and_saved_by_trainer(make_trainer, tmp_path: Path):
    save_pretrained(converted(), tmp_path / "model")
    model = from_pretrained(tmp_path / "model")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = make_trainer(model, SparseBitCallback())
    trainer.train()
    logs = training_logs(trainer)
    assert "flip_rate" in logs[1]
    trained = model.state_dict()
    names = [f"{name}.weight" for name in sparse_layers(model)]
    assert all(not torch.equal(trained[name], before[name]) for name in names)
    trainer.save_model(str(tmp_path / "tuned"))
    again = from_pretrained(tmp_path / "tuned")
    assert all(torch.equal(value, trained[name]) for name, value in again.state_dict().items())
    assert {str(layer.config) for layer in sparse_layers(again).values()} == {"ternary-6:8"}


def test_a_model_that_was_not_converted_is_refused(make_trainer) -> None:
    with pytest.raises(UserError, match="Qwen2ForCausalLM has no SparseBitLinear; use convert_"):
        make_trainer(tiny_model(), SparseBitCallback()).train()
