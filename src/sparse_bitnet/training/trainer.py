"""One run in memory: plain PyTorch, one optimiser step after another, resumable at any of them."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from sparse_bitnet.checkpoint import saved_steps
from sparse_bitnet.convert import set_dense_phase_, set_integer_forward_, sparse_layers
from sparse_bitnet.data.loader import TokenLoader
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.data.tokenizer import load_tokenizer
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import write_atomic
from sparse_bitnet.hub import save_pretrained
from sparse_bitnet.layer import SparseBitConfig
from sparse_bitnet.models import PRESETS, build_model
from sparse_bitnet.training import checkpoint as checkpoints
from sparse_bitnet.training import metrics
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import (
    autocast,
    peak_memory_bytes,
    prepare_device,
)
from sparse_bitnet.training.distributed import World
from sparse_bitnet.training.loss import causal_lm_loss, mean_of, token_loss_sum
from sparse_bitnet.training.optimizer import build_optimizer
from sparse_bitnet.training.run_folder import Interrupted, StopSignal
from sparse_bitnet.training.schedule import is_sparse, learning_rate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OnStep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished (or interrupted) run amounts to; `result.json` of the run folder."""

    run: str
    format: str
    steps: int
    tokens: int
    training_loss: float
    validation_loss: float
    validation_perplexity: float
    validation_tokens: int
    flip_rate: float | None
    zero_fraction: float


class Trainer:
    """One run in memory: data, model, optimiser, sinks."""

    def __init__(
        self, config: TrainConfig, run: Path, on_step: OnStep | None, world: World | None = None
    ) -> None:
        self.config, self.run, self.on_step = config, run, on_step
        self.world = world = world or World()
        self.device, self.dtype = prepare_device(config)
        self.dataset = TokenDataset.open(
            config.data, "train", verify="changed" if world.is_main else "never"
        )
        self.tokenizer = load_tokenizer(Path(config.data) / "tokenizer")
        self.loader = TokenLoader(
            self.dataset,
            sequence_length=config.sequence_length,
            batch_size=config.batch_size,
            seed=config.data_seed,
            rank=world.rank,
            world_size=world.size,
        )
        self.model = self._place(self._build_model())
        self.layers = sparse_layers(self.model)
        self.optimizer = build_optimizer(self.model, config)
        self.start = self._restore()
        self.sinks = self._open_sinks()

    def _build_model(self) -> "PreTrainedModel":
        config = self.config
        model = build_model(
            config.model,
            SparseBitConfig.parse(config.format),
            seed=config.seed,
            vocab_size=config.vocab_size or self._default_vocab_size(),
            init=config.init,
        )
        set_integer_forward_(model, config.forward == "int8")
        self.dataset.check_vocab(
            cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings
        )
        if config.sequence_length > model.config.max_position_embeddings:
            raise UserError(
                f"sequence_length={config.sequence_length}: {config.model} has positions for "
                f"{model.config.max_position_embeddings}"
            )
        for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self.tokenizer, field, None)
            setattr(model.config, field, value)
            setattr(model.generation_config, field, value)
        return model

    def _place(self, model: "PreTrainedModel") -> "PreTrainedModel":
        """The model on its device, ready to train."""
        model.to(self.device)  # type: ignore[arg-type]
        return self._prepare(model)

    def _prepare(self, model: "PreTrainedModel") -> "PreTrainedModel":
        model.train()
        if self.config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.config.compile:
            for block in model.get_decoder().layers:
                block.compile()
        return model

    def _restore(self) -> int:
        """Continue from the newest intact checkpoint; returns its step, 0 without one."""
        listed = saved_steps.list_checkpoints(self.run)

        def put_aside(checkpoint: saved_steps.Checkpoint, message: str) -> None:
            saved_steps.rename_damaged(checkpoint)
            say(message)

        found = saved_steps.newest_intact(listed, saved_steps.damage, put_aside)
        if found is None:
            return 0
        if found.is_sharded:
            from sparse_bitnet.training.sharded_checkpoint import RunTensors, load_sharded

            parameters = dict(self.model.named_parameters())
            tensors = RunTensors(
                parameters=parameters, layers=self.layers, optimizer=self.optimizer
            )
            load_sharded(found, tensors, self.world, self.dataset.identity())
        else:
            checkpoints.load_checkpoint(found, self.model, self.optimizer, self.dataset.identity())
        return found.step

    def _default_vocab_size(self) -> int | None:
        """None keeps the preset's own."""
        preset = PRESETS.get(self.config.model)
        return None if preset is None or preset.published else self.dataset.vocab_size

    def _open_sinks(self) -> list[metrics.RowSink]:
        if not self.world.is_main:
            return []
        self.timing = metrics.JsonLines(self.run / metrics.TIMING_FILE, self.start)
        sinks: list[metrics.RowSink] = [
            metrics.JsonLines(self.run / metrics.METRICS_FILE, self.start)
        ]
        if self.config.tensorboard:
            sinks.append(metrics.TensorBoard(self.run / "tensorboard", self.start))
        if self.config.wandb:
            sinks.append(metrics.WeightsAndBiases(self.config))
        return sinks

    def run_to_end(self) -> RunResult:
        config, row = self.config, {}
        try:
            with StopSignal() as self.stop:
                for step in range(self.start + 1, config.steps + 1):
                    row = self._step(step)
                    last = step == config.steps
                    if config.validation_every and step % config.validation_every == 0 and not last:
                        self._write(self._validate(step))
                    due = config.checkpoint_every and step % config.checkpoint_every == 0
                    stopping = self._stopping()
                    if due or last or stopping:
                        self._save(step)
                    if stopping and not last:
                        self._settle()
                        raise Interrupted(f"stopped after step {step} of {config.steps}")
            self._settle()
            return self._finish(row or self._last_row())
        finally:
            for sink in self.sinks:
                sink.close()
            if self.world.is_main:
                self.timing.close()

    def _stopping(self) -> bool:
        """Whether a signal asks to stop after this step."""
        return self.stop.received

    def _settle(self) -> None:
        """Wait for what is still being written."""

    def _step(self, step: int) -> dict[str, Any]:
        config, began = self.config, time.perf_counter()
        rate = learning_rate(config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sparse = is_sparse(config, step)
        set_dense_phase_(self.model, not sparse)
        by_layer = config.layer_metrics_every and step % config.layer_metrics_every == 0
        with self.world.selection(self.model):
            chosen = metrics.selection_metrics(
                self.layers, by_layer=bool(by_layer), total=self.world.sum_shards
            )
            loss = self._forward_backward(step)
        norm = self._clip_gradient()
        self._check_finite(step, loss, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        row = {
            "step": step,
            "tokens": step * config.tokens_per_step,
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": norm,
            "sparse": sparse,
            **chosen,
        }
        self._write(row)
        seconds = time.perf_counter() - began
        timing = {
            "step": step,
            "seconds": round(seconds, 6),
            "tokens_per_second": round(config.tokens_per_step / seconds, 1),
            "peak_memory_bytes": peak_memory_bytes(self.device),
        }
        timing.update(self._communication())
        if self.world.is_main:
            self.timing.write(timing)
            if self.on_step:
                self.on_step({**row, **timing})
        return row

    def _forward_backward(self, step: int) -> float:
        """Mean loss over the tokens of the whole step; gradients are of that mean."""
        config = self.config
        input_ids, labels = (part.to(self.device) for part in self.loader.batch(step - 1))
        tokens = config.tokens_per_step
        micro = config.micro_batch_size or config.batch_size
        total = 0.0
        parts = list(zip(input_ids.split(micro), labels.split(micro), strict=True))
        for number, (ids, targets) in enumerate(parts, 1):
            with autocast(self.device, self.dtype):
                loss = self._loss(ids, targets, last=number == len(parts))
            self._backward(loss / tokens)
            total += loss.item()
        return total / tokens

    def _loss(self, input_ids: torch.Tensor, labels: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Summed loss of a micro-batch; `last` of its step and process."""
        return causal_lm_loss(
            self.model, input_ids, labels, chunk_tokens=self.config.loss_chunk_tokens
        )

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def _clip_gradient(self) -> float:
        """The global norm of the gradient before it is clipped."""
        return torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.config.gradient_clip or float("inf")
        ).item()

    def _communication(self) -> dict[str, Any]:
        """What the step sent, for the timing row."""
        return {}

    def _check_finite(self, step: int, loss: float, norm: float) -> None:
        if all(value - value == 0 for value in (loss, norm)):
            return
        good = saved_steps.list_checkpoints(self.run)
        kept = f"last good checkpoint {good[-1].path}" if good else "no checkpoint yet"
        self.world.fail(
            f"step {step}: loss {loss}, gradient norm {norm}, not finite; {kept}; batch "
            f"{json.dumps(self.loader.identity(step - 1))}; lower the learning rate or look at the data"
        )

    def _validate(self, step: int) -> dict[str, Any]:
        loss, tokens = validation_loss(
            self.model, self.config, device=self.device, dtype=self.dtype, world=self.world
        )
        return {
            "step": step,
            "validation_loss": loss,
            "validation_perplexity": float(torch.tensor(loss, dtype=torch.float64).exp()),
            "validation_tokens": tokens,
        }

    def _write(self, row: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(row)

    def _last_row(self) -> dict[str, Any]:
        """Of a run killed between its last step and its result."""
        rows = metrics.read_rows(self.run / metrics.METRICS_FILE)
        return next(row for row in reversed(rows) if "loss" in row)

    def _save(self, step: int) -> None:
        checkpoints.save_checkpoint(
            self.run, step, self.model, self.optimizer, self.config, self.dataset.identity()
        )

    def _finish(self, row: dict[str, Any]) -> RunResult:
        validation = self._validate(self.config.steps)
        self._write(validation)
        self._export()
        result = RunResult(
            run=str(self.run),
            format=self.config.format,
            steps=self.config.steps,
            tokens=row["tokens"],
            training_loss=row["loss"],
            validation_loss=validation["validation_loss"],
            validation_perplexity=validation["validation_perplexity"],
            validation_tokens=validation["validation_tokens"],
            flip_rate=row["flip_rate"],
            zero_fraction=row["zero_fraction"],
        )
        if self.world.is_main:
            write_atomic(self.run / "result.json", json.dumps(asdict(result), indent=2) + "\n")
        return result

    def _export(self) -> None:
        """Write the trained model as `final`."""
        save_pretrained(self.model, self.run / "final", self.tokenizer)


def say(message: str) -> None:
    """A line that belongs to no result, on stderr."""
    print(f"sparse-bitnet: {message}", file=sys.stderr, flush=True)


def validation_loss(
    model: "PreTrainedModel",
    config: TrainConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    world: World | None = None,
) -> tuple[float, int]:
    """Mean loss over the first `validation_tokens` of the validation split, in whole sequences.

    The processes of `world` share the batches; all get the mean over all of them.
    """
    world = world or World()
    dataset = TokenDataset.open(
        config.data, "validation", verify="changed" if world.is_main else "never"
    )
    length = config.sequence_length
    windows = (len(dataset) - 1) // length
    if config.validation_tokens:
        windows = min(windows, max(1, config.validation_tokens // length))
    size = config.micro_batch_size or config.batch_size

    def batch(first: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = min(size, windows - first)
        tokens = dataset[first * length : (first + count) * length + 1]
        flat = torch.from_numpy(tokens.astype("int64"))
        return flat[:-1].view(count, length), flat[1:].view(count, length)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start in range(0, windows, size * world.size):
            first = start + size * world.rank
            if first < windows:
                yield batch(first)
            else:  # a sharded model computes in step: nothing of this batch is scored
                input_ids, labels = batch(start)
                yield input_ids, torch.full_like(labels, -100)

    total, scored = token_loss_sum(
        model,
        batches(),
        device=device,
        dtype=dtype,
        chunk_tokens=config.loss_chunk_tokens,
        loss=world.loss,
        selection=world.selection,
    )
    if world.is_distributed:
        sums = torch.tensor([total, scored], dtype=torch.float64, device=device)
        total, scored = world.sum(sums)[0].item(), int(sums[1])
    return mean_of(total, scored)
