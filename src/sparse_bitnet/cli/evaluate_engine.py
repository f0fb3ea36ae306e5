# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet evaluate` of packed models: on the CPU engine, where that can run them."""

from typing import TYPE_CHECKING, Any

from sparse_bitnet.errors import refuse_unused
from sparse_bitnet.progress import OnProgress

if TYPE_CHECKING:
    from sparse_bitnet.cli.evaluate import EvaluateConfig
    from sparse_bitnet.engine.engine_options import EngineOptions
    from sparse_bitnet.evaluation.perplexity import Evaluation

_ENGINE_FIELDS = ("head", "kv_cache", "activations", "threads")


def position_count(folder):
    """Positions of a local model by its config.json; 2048 where it does not say."""
    from pathlib import Path

    from sparse_bitnet.checkpoint.model_folder import read_json_if_there

    found = read_json_if_there(Path(folder) / "config.json").get("max_position_embeddings")
    return found if type(found) is int and found > 0 else 2048


_TASK_TOKENS = 4096
"""Room for each question of a batch with its answers; longer ones are computed in smaller batches."""


def uses_cpu_engine(checkpoint: str, config: "EvaluateConfig") -> bool:
    """Whether the CPU engine is asked for, or left to us and able to run the checkpoint.

    Raises `UserError` for options of the engine where it does not run, and the other way round.
    """
    from sparse_bitnet.engine.engine_options import EngineOptions
    from sparse_bitnet.generation.open_model import why_not_cpu

    if config.engine == "cpu":
        return True
    if config.engine == "transformers":
        why: str | None = "--engine transformers"
    elif config.device == "cuda" or config.precision == "bf16":
        why = "it computes in float32 on the CPU"
    else:
        why = why_not_cpu(checkpoint, EngineOptions())
    if why is not None:
        refuse_unused(config, _ENGINE_FIELDS, f"it is the CPU engine's, which does not run ({why})")
    return why is None


def _engine_options(
    config: "EvaluateConfig", *, context_length: int | None, cache_tokens: int
) -> "EngineOptions":
    from sparse_bitnet.engine.engine_options import EngineOptions

    return EngineOptions(
        engine="cpu",
        threads=config.threads,
        head=config.head,
        kv_cache=config.kv_cache,
        activations=config.activations,
        context_length=context_length,
        cache_tokens=cache_tokens,
    )


def tasks_of_engine(checkpoint: str, config: "EvaluateConfig") -> dict[str, Any]:
    """As `evaluation.harness.evaluate_tasks`."""
    from sparse_bitnet.evaluation.harness import load_tasks, score_tasks
    from sparse_bitnet.generation.open_model import open_model

    loaded = load_tasks(config.tasks, config.include_path)
    # After that check, which names lm-eval where it is missing.
    from sparse_bitnet.generation.engine_lm import EngineLM

    positions = position_count(checkpoint)
    options = _engine_options(
        config,
        context_length=None,
        cache_tokens=max(positions, config.batch_size * min(positions, _TASK_TOKENS)),
    )
    model = open_model(checkpoint, options)
    try:
        return score_tasks(
            EngineLM(model, batch_size=config.batch_size),
            loaded,
            checkpoint,
            fewshot=config.fewshot,
            limit=config.limit,
        )
    finally:
        model.engine.close()


def perplexity_of_engine(
    checkpoint: str, config: "EvaluateConfig", on_batch: OnProgress
) -> "Evaluation":
    """As `evaluation.perplexity.evaluate`."""
    from sparse_bitnet.checkpoint.checkpoint import trained_context_length
    from sparse_bitnet.checkpoint.model_folder import quantization_entry, read_config
    from sparse_bitnet.engine.engine import Engine
    from sparse_bitnet.evaluation.held_out import DEFAULT_CONTEXT_LENGTH, read_held_out
    from sparse_bitnet.evaluation.perplexity import Evaluation, format_name
    from sparse_bitnet.generation.engine_perplexity import engine_perplexity
    from sparse_bitnet.generation.open_model import open_engine
    from sparse_bitnet.layer_config import SparseBitConfig

    assert config.data is not None
    text = read_held_out(config.data, checkpoint, column=config.column, chat=config.chat)
    length = config.context_length or min(
        trained_context_length(checkpoint) or DEFAULT_CONTEXT_LENGTH, position_count(checkpoint)
    )
    pages = -(-length // Engine.page_tokens)
    options = _engine_options(
        config, context_length=length, cache_tokens=config.batch_size * pages * Engine.page_tokens
    )
    engine = open_engine(checkpoint, options)[0]
    try:
        text.check_vocab(engine.vocab_size)
        tokens, text_bytes = text.first(config.max_tokens)
        result = engine_perplexity(
            engine,
            tokens,
            context_length=length,
            stride=config.stride,
            batch_size=config.batch_size,
            text_bytes=text_bytes,
            chat=text.chat,
            on_batch=lambda done: on_batch(done, len(tokens) - 1),
        )
    finally:
        engine.close()
    entry = quantization_entry(read_config(checkpoint))
    return Evaluation(
        checkpoint=checkpoint,
        format=format_name(SparseBitConfig.from_dict(entry["format"]), entry["packed_format"]),
        data=text.name,
        precision=f"float32, head {config.head}, cache {config.kv_cache}",
        device="cpu engine",
        result=result,
    )
