# SPDX-License-Identifier: Apache-2.0
"""The model with which a run begins, checked against the data that it will see."""

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from sparse_bitnet.checkpoint.build_model import PRESETS, build_model
from sparse_bitnet.data.chat import IDS, LEARNT, end_of_turn_tokens
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.nn.convert import set_integer_forward_
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.loss import check_packs

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
    """A preset with random weights, or `config.init`, converted to `format`.

    Args:
        config: of the run.
        format: of its sparse layers.
        dataset: the training data: its tokens need rows of the embedding, its windows positions.
        tokenizer: of the data, whose special tokens the model's config names.
        meta: without values, on the meta device.

    Raises `UserError` for a model that the data does not fit.
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
        sub_norms=config.sub_norms,
    )
    if config.masters == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    set_integer_forward_(model, config.forward == "int8")
    dataset.check_vocab(cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and config.sequence_length > most:
        raise UserError(
            f"sequence_length={config.sequence_length}: {config.init or config.model} has positions for "
            f"{most}"
        )
    if dataset.is_chat:
        check_packs(model)
    ends = _end_tokens(model, dataset, tokenizer)
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(tokenizer, field, None)
        setattr(model.config, field, value)
        setattr(model.generation_config, field, value)
    if len(ends) > 1:
        model.generation_config.eos_token_id = ends
    return model


def _end_tokens(model: Any, dataset: TokenDataset, tokenizer: Any) -> list[int]:
    """Return what ends a text: the token after a document, the special tokens that ended the texts of the
    model so far, and those with which the chat template ends an answer."""
    own = model.generation_config.eos_token_id
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    kept = [end for end in (own if isinstance(own, list) else [own]) if end in special]
    turns = end_of_turn_tokens(tokenizer) if dataset.is_chat else []
    return list(dict.fromkeys([tokenizer.eos_token_id, *kept, *turns]))


def learns_to_end(model: "PreTrainedModel", dataset: TokenDataset) -> bool:
    """Whether an end token of the model is among what is learnt of conversations."""
    stored = dataset.stored(slice(None))
    learnt = stored[stored & LEARNT != 0] & IDS
    return bool(np.isin(learnt, model.generation_config.eos_token_id).any())
