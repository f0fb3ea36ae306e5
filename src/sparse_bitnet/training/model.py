# SPDX-License-Identifier: Apache-2.0
"""The model of a run: initial weights, LoRA adapters, and the optimiser.

Adapters are peft's own, in full precision, beside the linear layers of a model whose weights are frozen.
Merged, they become part of the weight that is quantised: their update is rounded then, and `merged`
returns how much of it.
"""

from typing import TYPE_CHECKING, Any, cast

import torch

from sparse_bitnet.checkpoint.build_model import build_model
from sparse_bitnet.checkpoint.load import max_positions
from sparse_bitnet.data.chat import end_of_turn_tokens
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.errors import UserError, library_errors_as
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.nn.convert import set_integer_forward_, sparse_layers
from sparse_bitnet.presets import PRESETS
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.logits import check_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def initial_model(
    config: TrainConfig,
    format: SparseBitConfig,
    dataset: TokenDataset,
    tokenizer: Any,
    *,
    meta: bool = False,
) -> "PreTrainedModel":
    """Return a preset with random weights, or `config.init`, converted to `format`; with `meta` without
    values.

    Its config names the special tokens of the data's tokenizer. Raises `UserError` for a model that the
    data does not fit: too few rows of the embedding, or positions.
    """
    preset = PRESETS.get(config.model) if config.init is None else None
    own = None if preset is None or preset.published else dataset.vocab_size
    model = build_model(
        config.model,
        format,
        seed=config.seed,
        vocab_size=config.vocab_size or own,
        init=config.init,
        meta=meta,
        uniform=config.initial_weights == "uniform",
    )
    if config.masters == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    set_integer_forward_(model, config.forward == "int8")
    embedding = cast(torch.nn.Embedding, model.get_input_embeddings())
    embedding.padding_idx = None  # that token often ends documents: it learns like any other
    dataset.check_vocab(embedding.num_embeddings)
    check_positions(model, config, config.init or config.model)
    if config.init and not meta:
        check_logits(model, dataset.is_chat)
    ends = _end_tokens(model, dataset, tokenizer)
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(tokenizer, field, None)
        with library_errors_as(f"{field} of the tokenizer does not fit {type(model).__name__}"):
            setattr(model.config, field, value)
        setattr(model.generation_config, field, value)
    if len(ends) > 1:
        model.generation_config.eos_token_id = ends
    return model


def check_positions(model: "PreTrainedModel", config: TrainConfig, name: str) -> None:
    """Raise `UserError` for a student or teacher, called `name`, with fewer positions than a window."""
    most = max_positions(model)
    if most is not None and config.sequence_length > most:
        raise UserError(
            f"--sequence-length {config.sequence_length}: {name} has at most {most} positions"
        )


def _end_tokens(model: Any, dataset: TokenDataset, tokenizer: Any) -> list[int]:
    """Return the tokens that end a text: the token after a document, the model's previous end tokens,
    and those with which the chat template ends an answer."""
    own = model.generation_config.eos_token_id
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    kept = [end for end in (own if isinstance(own, list) else [own]) if end in special]
    turns = end_of_turn_tokens(tokenizer) if dataset.is_chat else []
    return list(dict.fromkeys([tokenizer.eos_token_id, *kept, *turns]))


def add_adapters_(model: "PreTrainedModel", rank: int) -> Any:
    """Freeze a model and add an adapter of this rank to each `SparseBitLinear` (Hu et al., "LoRA", ICLR
    2022; alpha is twice the rank).

    Returns peft's wrapper, for `merged`; the model itself has the adapters.
    """
    from peft import LoraConfig, get_peft_model

    names = list(sparse_layers(model))
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names))


@torch.no_grad()
def merged(adapted: Any) -> tuple["PreTrainedModel", float]:
    """Return the model with its adapters added to the weights, and the share of the weights whose code
    (in full precision: whose mask) changes."""

    def chosen(model: Any) -> list[torch.Tensor]:
        selections = [layer.select() for layer in sparse_layers(model).values()]
        codes = [each.mask if each.codes is None else each.codes for each in selections]
        return [each for each in codes if each is not None]

    before = chosen(adapted)
    model = adapted.merge_and_unload()
    changed = [a != b for a, b in zip(before, chosen(model), strict=True)]
    return model, sum(int(c.sum()) for c in changed) / max(1, sum(c.numel() for c in changed))


def build_optimizer(model: "PreTrainedModel", config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW that decays the matrices of the blocks, and on request the embeddings."""
    tables = [each for each in model.modules() if isinstance(each, torch.nn.Embedding)]
    embeddings = {id(each.weight) for each in (*tables, model.get_output_embeddings()) if each}
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": config.weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
        matrix = parameter.dim() >= 2
        decays = matrix and (config.decay_embeddings or id(parameter) not in embeddings)
        groups[not decays]["params"].append(parameter)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True
    )
