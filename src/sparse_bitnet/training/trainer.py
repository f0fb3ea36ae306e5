# SPDX-License-Identifier: Apache-2.0
"""One run in memory: plain PyTorch, one optimiser step after another, resumable at any of them."""

import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sparse_bitnet.checkpoint.hub import save_pretrained
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.checkpoint.saved_steps import checkpoint_path, list_checkpoints
from sparse_bitnet.data.loader import TokenLoader
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import set_phase_, sparse_layers
from sparse_bitnet.progress import say
from sparse_bitnet.training import metrics
from sparse_bitnet.training.adapters import add_adapters_, merged
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import (
    autocast,
    compile_decoder_,
    compiles,
    peak_memory_bytes,
    prepare_device,
)
from sparse_bitnet.training.distillation import distillation, fill
from sparse_bitnet.training.distributed import World
from sparse_bitnet.training.initial_model import initial_model, learns_to_end
from sparse_bitnet.training.logit_cache import LogitCache
from sparse_bitnet.training.loss import SummedLoss
from sparse_bitnet.training.optimizer import build_optimizer
from sparse_bitnet.training.run_checkpoint import CheckpointWriter, RunState, model_files, restore
from sparse_bitnet.training.run_folder import (
    Interrupted,
    RunResult,
    claim,
    stop_signals,
)
from sparse_bitnet.training.schedule import (
    format_of,
    learning_rate,
    phase,
    weight_decay_factor,
)
from sparse_bitnet.training.sharded_linear import gathered_bytes, selected_shards, sharded
from sparse_bitnet.training.sharding import (
    check_splits,
    gather_once_,
    place_,
    reshard_,
    whole_model,
)
from sparse_bitnet.training.teacher_loss import check_finite
from sparse_bitnet.training.validation import validation_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OnStep = Callable[[dict[str, Any]], None]
_OF_RESULT = {"loss", "tokens", "sparse", "flip_rate", "zero_fraction"}
"""What a result takes from the row of the last step."""


class Trainer:
    """One run in memory: data, model, optimiser, sinks.

    Each process of the run has one; losses, norms and decisions are the same in all of them. Making one
    writes nothing, so that a config which cannot be trained leaves no trace.
    """

    def __init__(
        self,
        config: TrainConfig,
        run: Path,
        on_step: OnStep | None = None,
        world: World | None = None,
    ) -> None:
        self.config, self.run, self.on_step = config, run, on_step
        self.world = world = world or World()
        self.format = format_of(config)
        self.device, self.dtype = prepare_device(config)
        world.each(self._read_and_build)
        self.model_files = model_files(self.model)
        self.loss = SummedLoss(self.model, config.loss_chunk_tokens, self.compiles)
        self.cache: LogitCache | None = None
        if config.teacher is not None:
            world.each(self._add_teacher)
        reduction = torch.bfloat16 if config.gradient_reduction == "bf16" else None
        place_(self.loss, world, self.device, self.dtype, reduction, self.__dict__.pop("whole"))
        self.layers = sparse_layers(self.model)
        self.shards = sharded(self.layers.values())
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = build_optimizer(self.model, config)
        self.stop = Event()

    def _read_and_build(self) -> None:
        config, world = self.config, self.world
        metrics.check_sinks(config)
        self.dataset = TokenDataset.open(config.data, "train", verify=world.is_main)
        self.tokenizer = load_tokenizer(Path(config.data) / "tokenizer")
        self.loader = TokenLoader(
            self.dataset,
            sequence_length=config.sequence_length,
            batch_size=config.batch_size,
            seed=config.data_seed,
            rank=world.rank,
            world_size=world.size,
        )
        epoch = self.loader.windows // config.batch_size + 2
        if not any(map(self.loader.learnt, range(min(config.steps, epoch)))):
            raise UserError(
                f"no step of this run has anything to learn: {self.loader.cut.unlearnt()}"
            )
        if world.is_main and (unlearnt := self.loader.cut.unlearnt()):
            say(unlearnt)
        # Of a model that will be split only the first process makes the values.
        self.build = partial(initial_model, config, self.format, self.dataset, self.tokenizer)
        self.whole = self.build() if world.is_main else None
        self.model = self.build(meta=True) if world.mesh else cast(Any, self.whole)
        if world.mesh:
            check_splits(self.model)
        if config.lora:
            if world.mesh:
                raise UserError("lora trains in one process: leave out torchrun")
            self.adapted = add_adapters_(self.model, config.lora)
        if world.is_main and self.dataset.is_chat and not learns_to_end(self.model, self.dataset):
            say(
                f"{config.data}: no answer ends with an end token, so the model will not stop; have the "
                f"chat template put {self.tokenizer.eos_token} right after an answer, inside of "
                "{% generation %} where it has that"
            )
        self.model.train()
        if config.activation_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.compiles = compiles(config, self.device, self.model.num_parameters())
        self.compiles = self.compiles and not config.relations_weight
        if self.compiles:
            compile_decoder_(self.model, config, self.device, world.size)

    def _add_teacher(self) -> None:
        if self.whole is not None:
            check_finite(self.whole, self.config.init or self.config.model)
        self.loss, self.cache = distillation(
            self.config, self.model, self.loader, self.dtype, self.device
        )

    def run_to_end(self, data: dict[str, Any]) -> RunResult:
        """Continue from the newest intact checkpoint, or begin; the run folder is this process's.

        `data`: what the result says of the text, see `RunResult.data`.

        Raises `Interrupted` and `UserError` as `train` does.
        """
        config, row = self.config, {}
        identity = self.dataset.identity()
        state = RunState(parameters=self.parameters, layers=self.layers, optimizer=self.optimizer)
        start = restore(self.run, state, self.world, identity)
        if self.cache is not None:
            self.world.on_main(partial(fill, self.cache, config, self.dtype, self.device))
        self.world.on_main(lambda: claim(self.run, config))
        self.writer = CheckpointWriter(
            self.run, self.world, config, identity, self.model_files, state
        )
        self.sinks: list[metrics.RowSink] = []
        if self.world.is_main:
            self.timing = metrics.JsonLines(self.run / metrics.TIMING_FILE, start)
            self.sinks = metrics.open_sinks(config, self.run, start)
        try:
            if config.teacher is not None and start == 0:
                self._write(untrained := self._validate(0))
                if self.world.is_main:
                    say(
                        f"before the first step: validation perplexity "
                        f"{untrained['validation_perplexity']:,.3f}"
                    )
            with stop_signals(self.stop.set):
                for step in range(start + 1, config.steps + 1):
                    row = self._step(step)
                    last = step == config.steps
                    if config.validation_every and step % config.validation_every == 0 and not last:
                        self._write(self._validate(step))
                    due = config.checkpoint_every and step % config.checkpoint_every == 0
                    # Several processes have to agree, and do so in the sums of a step.
                    stopping = self.stop.is_set() if self.world.size == 1 else self.stops > 0
                    if due or last or stopping:
                        self.writer.save(step)
                    if stopping and not last:
                        self.writer.wait()
                        raise Interrupted(f"stopped after step {step} of {config.steps}")
            self.writer.wait()
            return self._finish(row or self.world.on_main(self._last_row), data)
        finally:
            self.writer.close()
            for sink in (self.timing, *self.sinks) if self.world.is_main else ():
                sink.close()

    def _step(self, step: int) -> dict[str, Any]:
        config, began = self.config, time.perf_counter()
        rate = learning_rate(config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        decay = config.weight_decay * weight_decay_factor(config, step)
        self.optimizer.param_groups[0]["weight_decay"] = decay  # the others have none
        kept, blend = phase(config, self.format, step)
        set_phase_(self.layers.values(), kept, blend)
        with selected_shards(self.layers.values(), self.world.sum_shards, self.world.sum):
            counts = metrics.selection_counts(self.layers, self.world.sum_shards)
            total = self._forward_backward(step)
        norm = torch.nn.utils.clip_grad_norm_(
            self.parameters.values(), config.gradient_clip or float("inf")
        )
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # The one moment of a step at which the host waits for the device.
        figures = torch.cat([total, norm.double().view(1), counts.double().flatten()]).tolist()
        loss, self.stops, norm = figures[:3]
        self._check_finite(step, loss, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        by_layer = config.layer_metrics_every and step % config.layer_metrics_every == 0
        count = len(self.layers)
        row = {
            "step": step,
            "tokens": step * config.tokens_per_step,
            "loss": loss if self.loader.learnt(step - 1) else None,
            "learning_rate": rate,
            "gradient_norm": norm,
            "sparse": kept == self.format.pattern.n and step >= config.first_sparse_step,
            **metrics.selection_metrics(
                self.layers, (figures[3 : 3 + count], figures[3 + count :]), bool(by_layer)
            ),
        }
        self._write(row)
        seconds = time.perf_counter() - began
        timing = {
            "step": step,
            "seconds": round(seconds, 6),
            "tokens_per_second": round(config.tokens_per_step / seconds, 1),
            "peak_memory_bytes": peak_memory_bytes(self.device),
        }
        if self.world.size > 1:
            received, dense = gathered_bytes(self.shards)
            timing.update(gathered_bytes=received, gathered_bytes_as_bf16=dense)
        if self.world.is_main:
            self.timing.write(timing)
            if self.on_step:
                self.on_step({**row, **timing})
        return row

    def _forward_backward(self, step: int) -> Tensor:
        """Make the gradients of the mean loss over the predictions that count in the whole step.

        Returns float64 [2], the same in all processes: that loss, and how many of them a signal
        asks to stop.
        """
        config = self.config
        micro = config.micro_batch_size or config.batch_size
        learnt = max(1, self.loader.learnt(step - 1))

        def parts_of(tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
            return list(zip(*(each.to(self.device).split(micro) for each in tensors), strict=True))

        parts = parts_of(self.loader.batch(step - 1))
        teachers: list[dict[str, Any]] = [{} for _ in parts]
        if self.cache is not None:
            top = parts_of(self.cache.batch(self.loader.windows_of(step - 1)))
            teachers = [{"top": each} for each in top]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, (part, teacher) in enumerate(zip(parts, teachers, strict=True), 1):
            gather_once_(self.loss, last=number == len(parts))
            with autocast(self.device, self.dtype):
                loss = self.loss(*part, **teacher)
            # Gradients are averaged over the processes.
            (loss / learnt * self.world.size).backward()
            total += loss.detach()
        for layer in self.shards:
            layer.mask_gradient_()
        stop = torch.full_like(total, float(self.stop.is_set()))
        sums = self.world.sum(torch.stack([total, stop]))
        sums[0] /= learnt
        return sums

    def _check_finite(self, step: int, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        self.writer.wait()
        good = list_checkpoints(self.run)
        kept = f"last good checkpoint {good[-1].path}" if good else "no checkpoint yet"
        self.world.fail(
            f"step {step}: loss {loss}, gradient norm {norm}, not finite; {kept}; batch "
            f"{json.dumps(self.loader.identity(step - 1))}; lower the learning rate or look at the data"
        )

    def _validate(self, step: int) -> dict[str, Any]:
        # Compiled once more, for another batch and without gradients, it would take longer.
        with torch.compiler.set_stance("force_eager"):
            loss, tokens = validation_loss(
                self.loss, self.config, device=self.device, dtype=self.dtype, world=self.world
            )
        reshard_(self.loss)
        gathered_bytes(self.shards)
        perplexity = float(torch.tensor(loss, dtype=torch.float64).exp())
        return {
            "step": step,
            "validation_loss": loss,
            "validation_perplexity": perplexity,
            "validation_tokens": tokens,
        }

    def _write(self, row: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(row)

    def _last_row(self) -> dict[str, Any]:
        """Of a run killed between its last step and its result."""
        path = self.run / metrics.METRICS_FILE
        for row in reversed(metrics.read_rows(path)):
            if row["step"] == self.config.steps and row.keys() >= _OF_RESULT:
                return row
        raise UserError(
            f"{path} lacks the row of step {self.config.steps}: bring the file back, or remove "
            f"{checkpoint_path(self.run, self.config.steps)} to train that step again"
        )

    def _merge(self) -> None:
        """The adapters into the weights; the validation before it is written, and what it changed."""
        beside = self._validate(self.config.steps)
        self.loss.model, share = merged(self.adapted)
        self._write({"step": self.config.steps, "merged_codes_changed": share})
        say(
            f"validation perplexity {beside['validation_perplexity']:,.3f} with the adapters beside the "
            f"weights; merging them changes {share:.2%} of the codes"
        )

    def _finish(self, row: dict[str, Any], data: dict[str, Any]) -> RunResult:
        # What is stored computes in the format, whatever the last step did.
        set_phase_(self.layers.values(), None)
        zero_fraction = row["zero_fraction"]
        if not row["sparse"]:
            with selected_shards(self.layers.values(), self.world.sum_shards):
                counts = metrics.selection_counts(self.layers, self.world.sum_shards).tolist()
            found = metrics.selection_metrics(self.layers, counts, by_layer=False)
            zero_fraction = found["zero_fraction"]
        if self.config.lora:
            self._merge()
        validation = self._validate(self.config.steps)
        if not math.isfinite(validation["validation_perplexity"]):
            self.world.fail(
                f"the run has diverged: validation loss {validation['validation_loss']:.6g} after step "
                f"{self.config.steps}, its perplexity is not finite; lower --learning-rate and choose "
                "another --out"
            )
        self._write(validation)
        whole = whole_model(self.model, self.world, self.build)
        self.world.on_main(
            lambda: save_pretrained(
                cast("PreTrainedModel", whole), self.run / "final", self.tokenizer
            )
        )
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
            zero_fraction=zero_fraction,
            data=data,
        )
        if self.world.is_main:
            result.write(self.run)
        return result
