# SPDX-License-Identifier: Apache-2.0
"""How a transformers causal LM gets its logits: its decoder's last hidden states, times a scale in some
families (Granite, Cohere), times the output head, with a cap in others (Gemma)."""

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_bitnet.checkpoint.load import has_states
from sparse_bitnet.errors import UserError, library_errors_as
from sparse_bitnet.nn.convert import evaluation_mode, selected

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def hidden_states(
    model: "PreTrainedModel", input_ids: Tensor, position_ids: Tensor | None = None
) -> Tensor:
    """Return the last hidden states, [batch, sequence, hidden_size], times the scale of the logits."""
    at, packed = None, {} if position_ids is None else {"position_ids": position_ids}
    if position_ids is not None and has_states(model):
        (input_ids, at), packed = _apart(input_ids, position_ids), {}
    decoder = model.get_decoder()
    hidden = decoder(input_ids=input_ids, use_cache=False, **packed).last_hidden_state
    hidden = hidden if at is None else hidden.flatten(0, 1)[at]
    scale = output_scale(model)
    return hidden if scale == 1 else hidden * scale


def _apart(input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return token ids with a row per conversation, padding in the row before it, and the index there
    of each token, [batch, sequence]: a recurrent state does not restart with the positions."""
    begins = F.pad(position_ids == 0, (0, 1), value=True)
    starts = begins[:, :-1] & ~begins[:, 1:]
    starts[:, 0] = True
    row = starts.flatten().cumsum(0) - 1
    place = torch.arange(len(row), device=row.device) - starts.flatten().nonzero()[row, 0]
    longest = int(place.max()) + 1
    at = row * longest + place
    rows = input_ids.new_zeros((int(row[-1]) + 1) * longest).index_copy(0, at, input_ids.flatten())
    return rows.view(-1, longest), at.view_as(input_ids)


def output_scale(model: "PreTrainedModel") -> float:
    """Return the factor of the head's products in the model's own forward: 1 in most families."""
    config: Any = model.config.get_text_config()
    scale = float(getattr(config, "logits_scaling", None) or 1)  # Granite, MiniCPM divide by it
    if not config.model_type.startswith("hyperclovax"):
        scale = 1 / scale
    scale /= getattr(config, "logits_mup_width_multiplier", None) or 1  # Inkling
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        value = getattr(config, name, None)
        scale *= 1 if value is None else value
    return scale


def logit_cap(model: "PreTrainedModel") -> float | None:
    """Return the limit of the logits in the model's own forward; None in most families."""
    config: Any = model.config.get_text_config()
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return next((cap for name in names if (cap := getattr(config, name, None))), None)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return `logits` squeezed between -cap and cap by tanh."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _probe(model: "PreTrainedModel") -> Tensor:
    """Return eight token ids [1, 8]."""
    embedding: Any = model.get_input_embeddings()
    return torch.arange(8, device=embedding.weight.device)[None] % embedding.num_embeddings


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ by more than rounding, which may change codes of activations."""
    return bool((one - other).abs().max() > 0.03 * one.abs().max())


@torch.no_grad()
def check_logits(model: "PreTrainedModel", is_chat: bool = False, role: str = "") -> None:
    """Raise `UserError` where `SummedLoss` is not a model's own loss: its logits come from more than
    `hidden_states` and the head, or a token sees later ones. With `is_chat`, also for a model whose
    attention does not stop where positions restart. `role`: what the model is, in the message."""
    input_ids, name = _probe(model), f"{role}{type(model).__name__}"
    head: Any = model.get_output_embeddings()
    failure = f"{name} cannot be trained or scored as a causal language model"
    with library_errors_as(failure), evaluation_mode(model), selected(model):
        own = model(input_ids=input_ids, use_cache=False).logits.float()
        if not own.isfinite().all():
            raise UserError(f"{failure}: its logits are not finite, so weights may be damaged")
        hidden = hidden_states(model, input_ids).to(head.weight.dtype)
        ours = capped(head(hidden).float(), logit_cap(model))
        if _differ(own[..., : ours.shape[-1]], ours):
            raise UserError(f"{failure}: layers lie between its decoder and its head")
        changed = torch.cat([input_ids[:, :-1], input_ids[:, :1]], 1)
        other = model(input_ids=changed, use_cache=False).logits.float()
        if _differ(own[:, :-1], other[:, :-1]):
            raise UserError(f"{failure}: its tokens see later ones")
    parameters = inspect.signature(model.get_decoder().forward).parameters
    takes = has_states(model) or "position_ids" in parameters
    if is_chat and not (takes and keeps_apart(model)):
        account = "account of positions" if takes else "positions"
        raise UserError(f"{name} takes no {account}, so conversations cannot share a window")


@torch.no_grad()
def keeps_apart(model: "PreTrainedModel") -> bool:
    """Whether attention stops where positions restart at 0."""
    input_ids = _probe(model)
    positions, others = torch.arange(8, device=input_ids.device)[None] % 4, input_ids.roll(4, 1)
    others[:, 4:] = input_ids[:, 4:]
    with evaluation_mode(model), selected(model):
        first, second = (hidden_states(model, each, positions) for each in (input_ids, others))
    return not _differ(first[:, 4:].float(), second[:, 4:].float())
