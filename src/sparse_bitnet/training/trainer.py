# SPDX-License-Identifier: Apache-2.0
"""A training run from its config to its result: plain PyTorch, resumable at every step.

`train` starts the processes, opens the data and locks the folder; `Trainer` builds the model, resumes
from the newest checkpoint and runs the steps. Read from top to bottom.
"""

import importlib.util
import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, fingerprint
from sparse_bitnet.checkpoint.saved_steps import checkpoint_path, clean_run, list_checkpoints
from sparse_bitnet.checkpoint.trained import first_unpackable, read_format, save_pretrained
from sparse_bitnet.data.loader import TokenLoader, Windows
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.errors import UserError, install, library_errors_as
from sparse_bitnet.files import write_atomic
from sparse_bitnet.nn.convert import set_phase_, sparse_layers
from sparse_bitnet.progress import Progress, say
from sparse_bitnet.training import distributed, metrics, schedule
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import (
    autocast,
    compile_decoder_,
    compiles,
    prepare_device,
    resolve_device,
)
from sparse_bitnet.training.distillation import DistillationLoss, find_teacher
from sparse_bitnet.training.distributed import World, open_world
from sparse_bitnet.training.loss import SummedLoss, held_out_windows, validation_loss
from sparse_bitnet.training.model import add_adapters_, build_optimizer, initial_model, merged
from sparse_bitnet.training.reconstruction import start_from_teacher_
from sparse_bitnet.training.run_folder import (
    RESULT,
    Interrupted,
    RunCheckpoints,
    RunResult,
    check_run,
    finished_result,
    model_files,
    run_lock,
    stop_signals,
)
from sparse_bitnet.training.sharded_linear import selected_shards, sharded

OnStep = Callable[[dict[str, Any]], None]
OnSample = Callable[[dict[str, Any], str], None]


def train(
    config: TrainConfig,
    *,
    on_step: OnStep | None = None,
    on_sample: OnSample | None = None,
    progress: Progress | None = None,
    shard: int | None = None,
    timeout_seconds: float = 600.0,
) -> RunResult:
    """Train, or continue, the run in `config.out` to its last step; a finished run returns at once.

    Under torchrun all processes call it with the same config; they share one run.

    Args:
        config: the run. A folder that holds a checkpoint must be of a run of the same config.
        on_step: called after every step with its metrics and timing in one dict, in the first process.
        on_sample: called with a validation's row and `metrics.sample`, for a pretrained model in a run of
            one process.
        progress: display that shows validations which take more than 5 s, in the first process.
        shard, timeout_seconds: how several processes share the work, see `open_world`.

    Raises `UserError` for bad input, a locked folder, a loss that is not finite, or a lost process;
    `Interrupted` after SIGINT or SIGTERM, once a checkpoint of the last whole step is on the disk.
    Refused input leaves no trace in the folder.
    """
    with ExitStack() as held:
        device = resolve_device(config.device)
        world = held.enter_context(open_world(device, shard, timeout_seconds))
        with world.agreed():
            text = TokenDataset.open(config.data, "train", verify=world.is_main)
            held_out = held_out_windows(config, verify=world.is_main)
        data, finished = world.on_main(lambda: _take_folder(config, text, held_out, held))
        if finished is not None:
            return finished
        trainer = Trainer(config, text, held_out, data, world, on_step, on_sample, progress)
        return trainer.run_to_end()


def _take_folder(
    config: TrainConfig, text: TokenDataset, held_out: Windows, held: ExitStack
) -> tuple[dict[str, Any], RunResult | None]:
    """Lock the run folder for this process until `held` ends; return the identity of the run's inputs, as
    in `RunResult`, and the result of a finished run."""
    run, format = Path(config.out), schedule.format_of(config)
    check_run(run, config)
    data: dict[str, Any] = {"teacher": config.teacher and fingerprint(config.teacher)}
    data["init"] = None if config.init in (None, config.teacher) else fingerprint(config.init)
    data |= {each.split: each.identity() for each in (text, held_out.dataset)}
    if (finished := finished_result(run, config, data)) is not None:
        return data, finished
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError(f"--tensorboard: the package is not installed: {install('tensorboard')}")
    if config.lora and format.variant("activation").has("transform"):  # adapters get plain inputs
        raise UserError(f"--lora needs activation=int8, not {format.activation}")
    if config.lora and importlib.util.find_spec("peft") is None:
        raise UserError(f"--lora needs peft, which is not installed: {install('fine-tuning')}")
    for name in dict.fromkeys(filter(None, (config.init, config.teacher))):
        stored = find_checkpoint(name)
        if not text.check_tokenizer(stored.folder, name):
            say(f"{name} has no tokenizer: assuming that it is the tokenizer of {config.data}")
        if name != config.init:
            continue
        if stored.kind == "trained":
            before = read_format(stored.entry, str(stored.folder / "config.json"))
            if before != format:
                say(f"{name} is {before}: the run converts it to {config.format} (--format)")
        if layer := first_unpackable(stored.model, format.keeps_dense):
            say(
                f"{layer} of {name} is not a plain linear layer: `pack` and `export` will not support "
                "the trained model. `generate` runs it through transformers"
            )
    held.enter_context(run_lock(run))
    clean_run(run)
    return data, None


class Trainer:
    """One run in memory, from its newest checkpoint on: data, model, optimiser, metrics files.

    Each process of the run has one; losses, norms and decisions are the same in all of them.
    """

    def __init__(
        self,
        config: TrainConfig,
        text: TokenDataset,
        held_out: Windows,
        data: dict[str, Any],
        world: World,
        on_step: OnStep | None = None,
        on_sample: OnSample | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Build model and optimiser, and resume from the newest checkpoint of the locked folder.

        Raises `UserError` for a config that cannot be trained, before anything is written.
        """
        self.config, self.run, self.world, self.on_step = config, Path(config.out), world, on_step
        self.held_out, self.data = held_out, data
        self.format = schedule.format_of(config)
        self.on_sample = on_sample if config.init and world.mesh is None else None
        self.progress = (world.is_main and progress) or Progress()  # not started, it shows nothing
        self.stop, self.stops = Event(), 0.0
        self.device, self.dtype = prepare_device(config)
        with world.agreed():
            self.loader = TokenLoader(
                text,
                sequence_length=config.sequence_length,
                batch_size=config.batch_size,
                seed=config.data_seed,
                rank=world.rank,
                world_size=world.size,
            )
            text.check_tokenizer(Path(config.data) / "tokenizer", "its own tokenizer folder")
            self.tokenizer = load_tokenizer(Path(config.data) / "tokenizer")
            self.build = partial(initial_model, config, self.format, text, self.tokenizer)
            # Only the first process makes the values of a model that will be split.
            whole = self.build() if world.is_main else None
            self.model = self.build(meta=True) if world.mesh else cast(Any, whole)
            if world.mesh:
                if config.lora:
                    raise UserError("--lora trains in one process: leave out torchrun")
                distributed.check_splits(self.model)
            self._check_learnt()
            identity = {**data["train"], **{name: data[name] for name in ("teacher", "init")}}
            where, is_new = (self.dtype, self.device), not list_checkpoints(self.run)
            self.teacher, self.cache = find_teacher(
                config, data["teacher"], self.model, self.loader, *where, is_new=is_new
            )
            if (teacher := self.teacher) and whole and is_new:
                start_from_teacher_(whole, teacher, config, text, *where, alone=world.size == 1)
            self.adapted = add_adapters_(self.model, config.lora) if config.lora else None
            self.model.train()
            if config.activation_checkpointing:
                with library_errors_as("--activation-checkpointing"):
                    self.model.gradient_checkpointing_enable({"use_reentrant": False})
            compiled = compiles(config, self.device, self.model.num_parameters())
            if compiled:
                compile_decoder_(self.model, config, self.device, world.size)
                if self.teacher and not self.cache:
                    compile_decoder_(self.teacher.model, config, self.device, world.size)
            files = model_files(self.model, Path(config.data) / "tokenizer")
            self.loss = SummedLoss(self.model, config.loss_chunk_tokens, compiled)
            if (source := self.cache or self.teacher) is not None:
                self.loss = DistillationLoss(self.model, config, source, compiled)
        reduction = torch.bfloat16 if config.gradient_reduction == "bf16" else torch.float32
        distributed.place_(self.loss, world, self.device, self.dtype, reduction, whole)
        self.layers = sparse_layers(self.model)
        self.optimizer = build_optimizer(self.model, config)
        self.checkpoints = RunCheckpoints(
            config, world, self.model, self.optimizer, files=files, data_identity=identity
        )
        self.start = self.checkpoints.restore()
        world.on_main(lambda: write_atomic(self.run / "config.json", config.to_json()))
        if (cache := self.cache) is not None:
            batch = config.micro_batch_size or config.batch_size
            world.on_main(lambda: cache.fill(self.teacher, batch))
        self.sinks: list[Any] = []
        self.timing: list[metrics.JsonLines] = []
        if world.is_main:
            at_end = self.start == config.steps
            self.timing.append(metrics.JsonLines(self.run / metrics.TIMING_FILE, self.start))
            rows = metrics.JsonLines(self.run / metrics.METRICS_FILE, self.start, at_end=at_end)
            self.sinks.append(rows)
            if config.tensorboard:
                self.sinks.append(metrics.TensorBoard(self.run / "tensorboard", self.start))

    def _check_learnt(self) -> None:
        """Print which conversations teach nothing. Raises `UserError` when no step learns anything."""
        cut, dataset = self.loader.cut, self.loader.dataset
        epoch = self.loader.windows // self.config.batch_size + 2
        if not any(map(self.loader.learnt, range(min(self.config.steps, epoch)))):
            raise UserError(f"no step of this run has anything to learn: {cut.unlearnt()}")
        if not (self.world.is_main and dataset.is_chat):
            return
        if unlearnt := cut.unlearnt():
            say(unlearnt)
        if not np.isin(cut.learnt_ids, self.model.generation_config.eos_token_id).any():
            say(
                f"{dataset.folder}: no answer ends with an end token, so the model will never stop; let "
                f"the chat template write {self.tokenizer.eos_token} right after each answer, inside its "
                "{% generation %} block if it has one"
            )

    def run_to_end(self) -> RunResult:
        """Run the remaining steps. Raises `Interrupted` and `UserError` as `train` does."""
        config, row = self.config, {}
        try:
            if self.teacher and self.start == 0:
                self._compare_with_teacher(SummedLoss(self.teacher.model, config.loss_chunk_tokens))
            self.teacher = None  # frees its memory if its logits are cached
            with stop_signals(self.stop.set):
                for step in range(self.start + 1, config.steps + 1):
                    row = self._step(step)
                    last = step == config.steps
                    if config.validation_every and step % config.validation_every == 0 and not last:
                        self._write(self._validate(step))
                    due = config.checkpoint_every and step % config.checkpoint_every == 0
                    # Several processes agree on stopping through the sums of a step.
                    stopping = self.stop.is_set() if self.world.size == 1 else self.stops > 0
                    if due or last or stopping:
                        self.checkpoints.save(step)
                    if stopping and not last:
                        stopped = f"stopped after step {step} of {config.steps}"
                        raise Interrupted(f"{stopped}; run the same command to resume")
            return self._finish(row or self.world.on_main(self._last_row))
        finally:
            for sink in (*self.timing, *self.sinks):
                sink.close()

    def _compare_with_teacher(self, teacher: SummedLoss) -> None:
        """Write and say the perplexities of the untrained student and its teacher."""
        row, name = self._validate(0), "validation_perplexity"
        own, theirs = row[name], self._validate(0, teacher)[name]
        self._write(row | {"teacher_perplexity": theirs})
        if self.world.is_main:
            say(
                f"before the first step: validation perplexity {own:,.3f}, the teacher's {theirs:,.3f}"
            )

    def _step(self, step: int) -> dict[str, Any]:
        config, began = self.config, time.perf_counter()
        rate = schedule.learning_rate(config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        decay = config.weight_decay * schedule.weight_decay_factor(config, step)
        self.optimizer.param_groups[0]["weight_decay"] = decay  # the others have none
        kept, blend = schedule.phase(config, self.format, step)
        set_phase_(self.layers.values(), kept, blend)
        # Seed dropout, whose masks differ between processes.
        entropy = (config.seed % 2**64, step, self.world.rank)
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))
        with selected_shards(self.layers.values(), self.world.sum_shards, self.world.sum):
            counts = metrics.selection_counts(self.layers, self.world.sum_shards)
            total = self._forward_backward(step)
        norm = torch.nn.utils.clip_grad_norm_(
            self.checkpoints.parameters.values(), config.gradient_clip or float("inf")
        )
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # The only place in a step where the host waits for the device.
        figures = torch.cat([total, norm.double().view(1), counts.double().flatten()]).tolist()
        loss, divergence, self.stops, norm = figures[:4]
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
            "sparse": kept == self.format.pattern.n,
            **metrics.selection_metrics(
                self.layers, (figures[4 : 4 + count], figures[4 + count :]), bool(by_layer)
            ),
        }
        if isinstance(self.loss, DistillationLoss):
            row |= self.loss.apart(loss, divergence)
        self._write(row)
        seconds = time.perf_counter() - began
        timing = {
            "step": step,
            "seconds": round(seconds, 6),
            "tokens_per_second": round(config.tokens_per_step / seconds, 1),
        }
        for sink in self.timing:
            sink.write(timing)
        if self.world.is_main and self.on_step:
            self.on_step({**row, **timing})
        return row

    def _forward_backward(self, step: int) -> Tensor:
        """Compute the gradients of the mean loss over all predictions that count in the step.

        Returns float64 [3], the same in all processes: that loss, the mean divergence from a teacher (0
        without one), and how many processes got a signal to stop.
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
        self.loss.divergence = torch.zeros_like(total)
        for number, (part, teacher) in enumerate(zip(parts, teachers, strict=True), 1):
            distributed.gather_once_(self.loss, last=number == len(parts))
            with autocast(self.device, self.dtype):
                loss = self.loss(*part, **teacher)
            # Gradients are averaged over the processes.
            (loss / learnt * self.world.size).backward()
            total += loss.detach()
        for layer in sharded(self.layers.values()):
            layer.mask_gradient_()
        stop = torch.full_like(total, float(self.stop.is_set()))
        sums = self.world.sum(torch.stack([total, self.loss.divergence, stop]))
        sums[:2] /= learnt
        return sums

    def _check_finite(self, step: int, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        good = list_checkpoints(self.run)
        kept = f"last good checkpoint {good[-1].path}" if good else "no checkpoint yet"
        self.world.fail(
            f"step {step}: loss {loss}, gradient norm {norm}, not finite; {kept}; windows "
            f"{self.loader.windows_of(step - 1).tolist()} of {self.loader.dataset.folder}; lower the "
            "learning rate, or look at the data and at the weights of --init and --teacher"
        )

    def _validate(self, step: int, loss: SummedLoss | None = None) -> dict[str, Any]:
        """Score the held-out windows by the run's loss, and sample its model; or by a given loss."""
        # The model is scored in its full format; the next step sets its own phase.
        set_phase_(self.layers.values(), None)
        what = "validating" if loss in (None, self.loss) else "validating the teacher"
        line = self.progress.line(what, "tokens", after=5)
        # Compiling again, for another batch size and without gradients, would take longer.
        with torch.compiler.set_stance("force_eager"):
            mean, tokens = validation_loss(
                self.loss if loss is None else loss,
                self.config,
                self.held_out,
                device=self.device,
                dtype=self.dtype,
                world=self.world,
                on_batch=line,
            )
            line.end()
            row = {
                "step": step,
                "validation_loss": mean,
                "validation_perplexity": float(torch.tensor(mean, dtype=torch.float64).exp()),
                "validation_tokens": tokens,
            }
            if self.on_sample and loss is None:
                with autocast(self.device, self.dtype):
                    text = self.held_out.dataset[:16].tolist()
                    self.on_sample(row, metrics.sample(self.loss.model, self.tokenizer, text))
        distributed.reshard_(self.loss)
        return row

    def _write(self, row: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(row)

    def _last_row(self) -> dict[str, Any]:
        """Return the last step's row of a run killed between that step and its result."""
        path = self.run / metrics.METRICS_FILE
        for row in metrics.read_rows(path):
            if row["step"] == self.config.steps and {"loss", "zero_fraction"} <= row.keys():
                return row
        raise UserError(
            f"{path} lacks the row of step {self.config.steps}: restore the file, or remove "
            f"{checkpoint_path(self.run, self.config.steps)} to train that step again"
        )

    def _finish(self, row: dict[str, Any]) -> RunResult:
        # The stored model uses the full format, whatever phase the last step was in.
        set_phase_(self.layers.values(), None)
        zero_fraction = row["zero_fraction"]
        if self.adapted is not None:
            beside = self._validate(self.config.steps, self.loss)
            self.loss.model, share = merged(self.adapted)
            self._write({"step": self.config.steps, "merged_codes_changed": share})
            say(
                f"validation perplexity {beside['validation_perplexity']:,.3f} with the adapters beside "
                f"the weights; merging them changes {share:.2%} of the codes"
            )
        if not row["sparse"] or self.adapted is not None:
            with selected_shards(self.layers.values(), self.world.sum_shards):
                counts = metrics.selection_counts(self.layers, self.world.sum_shards).tolist()
            figures = metrics.selection_metrics(self.layers, counts, by_layer=False)
            zero_fraction = figures["zero_fraction"]
        validation = self._validate(self.config.steps)
        if not math.isfinite(validation["validation_perplexity"]):
            self.world.fail(
                f"the run has diverged: validation loss {validation['validation_loss']:.6g} after step "
                f"{self.config.steps}, its perplexity is not finite; lower --learning-rate and choose "
                "another folder"
            )
        self._write(validation)
        whole: Any = distributed.whole_model(self.model, self.world, self.build)
        self.world.on_main(lambda: save_pretrained(whole, self.run / "final", self.tokenizer))
        steps = validation.pop("step")
        result = RunResult(
            run=str(self.run),
            format=self.config.format,
            steps=steps,
            tokens=row["tokens"],
            training_loss=row["loss"],
            flip_rate=row["flip_rate"],
            zero_fraction=zero_fraction,
            data=self.data,
            **validation,
        )
        if self.world.is_main:
            write_atomic(self.run / RESULT, json.dumps(asdict(result), indent=2) + "\n")
        return result
