# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet evaluate`: held-out perplexity and lm-eval tasks of any checkpoint.

Packed models run on the CPU engine, by default with everything around their linear layers in float32, so
that the numbers are those of the PyTorch code; --head and --kv-cache show what smaller forms cost.
"""

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from sparse_bitnet.cli.arguments import APPENDED, command
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import UserError, check_least, refuse_unused
from sparse_bitnet.files import check_new_file, write_atomic

_ENGINE_FIELDS = ("head", "kv_cache", "activations", "threads")
_SHARED = ("batch_size", "precision", "device")
_OF_TEXT = ("context_length", "max_tokens", "column", "chat")
_OF_TASKS = ("include_path", "fewshot", "limit")
_TASK_TOKENS = 4096
"""Room for each question of a batch with its answers; longer ones are computed in smaller batches."""


@dataclass(kw_only=True)
class EvaluateConfig:
    """Text or tasks to score, and the settings of the evaluation."""

    GROUPS: ClassVar = {
        **{"data": "text", "tasks": "tasks", "context_length": "text", "batch_size": "computation"},
        **{"max_tokens": "text", "precision": "computation", "column": "text", "out": "result"},
    }

    data: str | None = None
    """Text to score: the validation split of a folder written by `sparse-bitnet prepare`, or all
    documents of a file or glob that `prepare` could read."""

    chat: bool = False
    """Read the documents of --data as conversations, like `prepare --chat`, and score only what the
    assistant says. Folders of prepared conversations need no --chat."""

    tasks: Annotated[tuple[str, ...], APPENDED] = ()
    """lm-eval tasks, groups or tags to score instead of --data, separated by commas; `paper`: the paper's
    five zero-shot tasks."""

    include_path: str | None = None
    """Folder with data sets of the paper's tasks (FOLDER/hellaswag, FOLDER/ai2_arc, FOLDER/piqa,
    FOLDER/super_glue), for use without a network, or with your own lm-eval task files (.yaml)."""

    fewshot: int | None = None
    """Number of examples before each question of a task. Default: the task's own number."""

    limit: int | None = None
    """Score only the first N questions of each task. Default: all."""

    context_length: int | None = None
    """Context length in tokens. Default: as in training of the first model, or 2048."""

    batch_size: int = 8
    """Sequences per forward pass."""

    max_tokens: int = 0
    """Score only the first N tokens; 0: all."""

    precision: Literal["auto", "bf16", "float32"] = "auto"
    """Data type to compute in. auto: bf16 if the device has fast bf16 matrix products, else float32."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""

    engine: Literal["auto", "cpu", "transformers"] = "auto"
    """Inference engine. cpu runs packed models, and packs ternary models of other tools first.
    transformers runs any model that it can load. auto: cpu for packed models that it can run."""

    threads: int | None = None
    """Number of compute threads (cpu). Default: one for each core."""

    head: Literal["stored", "int8", "int4"] = "stored"
    """Run-time format of the output head (cpu)."""

    kv_cache: Literal["float32", "float16", "int8", "int4"] = "float32"
    """Data type of the KV cache (cpu)."""

    activations: Literal["auto", "token", "group"] = "auto"
    """Granularity of the int8 activation scales (cpu); `generate --help` explains the choices."""

    column: str | None = None
    """Column that holds the text in .jsonl, .json, .csv and .parquet files. Default: "text", or
    "messages" for conversations."""

    out: str | None = None
    """JSON file to write the result to; results of tasks have lm-eval's layout."""

    def __post_init__(self) -> None:
        check_least(self, fewshot=0, limit=1, context_length=1)
        check_least(self, batch_size=1, max_tokens=0, threads=1)
        others, kind = (_OF_TEXT, "--data") if self.tasks else (_OF_TASKS, "--tasks")
        refuse_unused(self, others, f"it has no effect without {kind}")
        if self.engine == "cpu" and (self.device == "cuda" or self.precision == "bf16"):
            raise UserError(
                "--engine cpu always computes in float32 on the CPU: leave out --device and --precision"
            )


@command("evaluate")
def main(checkpoints: Annotated[tuple[str, ...], "CHECKPOINT ..."], config: EvaluateConfig) -> None:
    """Measure perplexity over all tokens of held-out text; with --tasks, measure accuracy on lm-eval's
    tasks instead.

    Args:
        checkpoints: Run folder, checkpoint folder, GGUF file, or any transformers folder or hub id.
            Several, such as a student and its teacher, are compared in one table.
    """
    if bool(config.tasks) == bool(config.data):
        raise UserError("give either --data (measures perplexity) or --tasks (measures accuracy)")
    if config.out:
        check_new_file(config.out)
    from sparse_bitnet.checkpoint.model_folder import is_gguf
    from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, resolve_checkpoint
    from sparse_bitnet.generation.open_model import runnable_folder

    models = dict[str, tuple[str, EngineOptions | None]]()
    for name in map(resolve_checkpoint, checkpoints):
        packs = config.engine == "cpu" or (is_gguf(name) and find_checkpoint(name).kind != "dense")
        folder = runnable_folder(name, EngineOptions()) if packs else name
        models[name] = folder, _engine_options(folder, config)
    results = (_score_tasks if config.tasks else _score_text)(models, config)
    if config.out:
        result = results if len(results) > 1 else results[0]
        write_atomic(config.out, json.dumps(result, indent=2) + "\n")


def _engine_options(checkpoint: str, config: EvaluateConfig) -> EngineOptions | None:
    """Return the options of the CPU engine where it scores the checkpoint; None where PyTorch does.

    Raises `UserError` for options of the engine where it does not run, and the other way round.
    """
    from sparse_bitnet.generation.open_model import why_not_cpu

    options = EngineOptions(
        engine=config.engine,
        device=config.device,
        **{name: getattr(config, name) for name in _ENGINE_FIELDS},
    )
    why = why_not_cpu(checkpoint, options)
    if config.precision == "bf16":
        why = "it computes in float32"
    if why is None:
        return options
    refuse_unused(config, _ENGINE_FIELDS, f"only the CPU engine has it, which is not in use: {why}")
    return None


def _score_tasks(models: dict[str, Any], config: EvaluateConfig) -> list[dict[str, Any]]:
    """Score tasks under lm-eval's own progress bar and print their metrics; returns lm-eval's results."""
    from sparse_bitnet.checkpoint.config_fields import text_config_of
    from sparse_bitnet.checkpoint.load import load_tokenizer
    from sparse_bitnet.checkpoint.model_folder import read_config
    from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint
    from sparse_bitnet.evaluation.harness import evaluate_tasks

    for folder, _ in models.values():  # each before any is scored
        load_tokenizer(find_checkpoint(folder).folder)
    options = {name: getattr(config, name) for name in (*_SHARED, *_OF_TASKS)}
    results = []
    for name, (folder, engine) in models.items():
        if engine is not None:
            positions = text_config_of(read_config(folder)).get("max_position_embeddings", 2048)
            room = config.batch_size * min(positions, _TASK_TOKENS)
            engine = replace(engine, cache_tokens=max(positions, room))
        results.append(evaluate_tasks(folder, config.tasks, engine=engine, **options))
        results[-1]["config"]["model"] = name
        from lm_eval.utils import make_table

        print(f"{name}:\n{make_table(results[-1])}")
    return results


def _score_text(models: dict[str, Any], config: EvaluateConfig) -> list[dict[str, Any]]:
    """Evaluate perplexity with a progress bar and print it; returns the results as JSON holds them."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    from sparse_bitnet.evaluation.perplexity import evaluate, read_text
    from sparse_bitnet.progress import Progress

    assert config.data is not None
    console = Console(markup=False)
    options = {name: getattr(config, name) for name in (*_SHARED, "max_tokens")}
    length, scored = config.context_length, []
    how: dict[str, Any] = {"column": config.column, "chat": config.chat}
    for name, (folder, engine) in models.items():  # each before any is scored
        read = read_text(folder, config.data, context_length=length, **how)
        length = read[-1]  # for the others too
        scored.append((name, read, engine))
    results = []
    with Progress(console) as progress:
        for name, read, engine in scored:
            on_batch = progress.line("scoring", "tokens")
            result = evaluate(*read, engine=engine, on_batch=on_batch, **options)
            results.append(replace(result, checkpoint=name))
    rows = {
        "checkpoint": "{0.checkpoint}",
        "format": "{0.format}",
        "data": "{0.data}",
        "perplexity": "{0.perplexity:.4f}",
        "mean loss": "{0.mean_nll:.6f} nats per token",
        "tokens": "{0.tokens:,}",
        "context": "{0.context_length} tokens",
        "computed in": "{0.precision} on {0.device}",
    }
    if all(each.bits_per_byte is not None for each in results):
        rows["bits per byte"] = "{0.bits_per_byte:.4f} ({0.text_bytes:,} bytes)"
    columns = [Column(style="dim"), *(Column(overflow="fold") for _ in results)]
    table = Table(*columns, box=box.SIMPLE, show_header=False)
    for name, text in rows.items():
        table.add_row(name, *map(text.format, results), style={"perplexity": "bold"}.get(name))
    console.print(table)
    return [each.to_dict() for each in results]
