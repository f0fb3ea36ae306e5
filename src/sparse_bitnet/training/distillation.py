# SPDX-License-Identifier: Apache-2.0
"""The loss of a student: its teacher's distribution over the next token, and how its attention relates
tokens.

    ce_weight * cross-entropy
    + logits_weight * T^2 * KL(teacher || student), both softened by the temperature T (Hinton et al.,
      2015)
    + relations_weight * KL of the relations among queries, keys and values of one layer (MiniLMv2,
      Wang et al., 2021, as BitNet Distillation, Wu et al., 2025, uses them)

The student starts from the teacher's weights. The teacher is not part of the model: nothing of it is
trained, split, or stored.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_bitnet.errors import UserError
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import blocks_of
from sparse_bitnet.training.loss import (
    SoftTargets,
    SummedLoss,
    chunked_cross_entropy,
    hidden_states,
    logit_cap,
)
from sparse_bitnet.training.teacher import LogitCache, Teacher

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RELATED = ("q_proj", "k_proj", "v_proj")


class DistillationLoss(SummedLoss):
    """`SummedLoss` of the student, in training with what the teacher adds; in evaluation without."""

    def __init__(
        self, model: "PreTrainedModel", config: TrainConfig, teacher: Teacher | LogitCache
    ) -> None:
        """`teacher`: with a cache, its top logits come with every batch.

        Raises `UserError` for models that the options do not fit.
        """
        super().__init__(model, config.loss_chunk_tokens)
        self.config = config
        self._teacher = [teacher]  # in a list, it is not a submodule: neither split nor trained
        self._states: tuple[dict[str, Tensor], ...] = ()
        self._heads = 1
        head = model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise UserError(
                f"distillation takes no output head with a bias ({type(model).__name__})"
            )
        if not config.relations_weight:
            return
        if config.compile == "on" or config.activation_checkpointing:
            raise UserError(
                "relations_weight reads a layer's states: it takes neither compile nor "
                "activation_checkpointing"
            )
        assert isinstance(teacher, Teacher)
        (own, widths), (theirs, _) = (
            _kept_projections(each, config.relations_layer) for each in (model, teacher.model)
        )
        self._states = own, theirs
        sizes: Any = teacher.model.config
        self._heads = heads = (
            getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
        )
        if any(width % heads for width in widths):
            raise UserError(
                f"relations_weight: the student's projections, of {widths} values, are not cut into the "
                f"teacher's {heads} heads"
            )

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        top: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`top`: ids and logits of the teacher, [batch, sequence, k], where it is not there itself."""
        if not self.model.training:
            return super().forward(input_ids, labels, position_ids)
        config, (teacher,) = self.config, self._teacher
        probabilities: Callable[[slice], Tensor]
        if isinstance(teacher, Teacher):
            states = teacher.hidden(input_ids, position_ids)

            def probabilities(rows: slice) -> Tensor:
                return (teacher.logits(states[rows]) / config.temperature).softmax(-1)
        else:
            assert top is not None
            ids, values = (each.flatten(0, 1) for each in top)

            def probabilities(rows: slice) -> Tensor:
                share = (values[rows].float() / config.temperature).softmax(-1)
                empty = share.new_zeros((len(share), teacher.vocab_size))
                return empty.scatter_(-1, ids[rows].long(), share)

        hidden = hidden_states(self.model, input_ids, position_ids)
        loss = chunked_cross_entropy(
            hidden.flatten(0, 1),
            self.model.get_output_embeddings().weight,
            labels.flatten(),
            chunk_tokens=self.chunk_tokens,
            soft=SoftTargets(
                probabilities=probabilities,
                temperature=config.temperature,
                weight=config.logits_weight,
                hard_weight=config.ce_weight,
            ),
            cap=logit_cap(self.model),
        )
        if not self._states:
            return loss
        own, wanted = self._states
        related = torch.stack(
            [relation_loss(own.pop(name), wanted.pop(name), self._heads) for name in RELATED]
        )
        return loss + config.relations_weight * (labels >= 0).sum() * related.sum().double()


def relation_loss(student: Tensor, teacher: Tensor, heads: int) -> Tensor:
    """Mean over heads and tokens of KL(R_teacher || R_student), R = softmax(A A^T / sqrt(d)).

    Args:
        student, teacher: states A [batch, sequence, width]; widths may differ.
        heads: into which each A is cut, [batch, heads, sequence, d].
    """

    def log_relations(states: Tensor) -> Tensor:
        a = states.float().unflatten(-1, (heads, -1)).transpose(1, 2)
        return (a @ a.transpose(-1, -2) / a.shape[-1] ** 0.5).log_softmax(-1)

    with torch.autocast(student.device.type, enabled=False):
        wanted, own = log_relations(teacher.detach()), log_relations(student)
        return F.kl_div(own, wanted, reduction="none", log_target=True).sum(-1).mean()


def _kept_projections(model: "PreTrainedModel", layer: int) -> tuple[dict[str, Tensor], list[int]]:
    """A dict into which every forward puts the queries, keys and values of a layer; and their widths.

    Raises `UserError` for a layer that is not there, and for attention of another form.
    """
    blocks = blocks_of(model)
    if not -len(blocks) <= layer < len(blocks):
        raise UserError(f"relations_layer={layer}: the model has {len(blocks)} layers")
    modules = {full.rpartition(".")[2]: part for full, part in blocks[layer].named_modules()}
    states: dict[str, Tensor] = {}
    for name in RELATED:
        if name not in modules:
            raise UserError(f"relations_weight: {type(model).__name__} has no {name}")
        modules[name].register_forward_hook(
            lambda module, inputs, output, name=name: states.__setitem__(name, output)
        )
    return states, sorted({int(modules[name].weight.shape[0]) for name in RELATED})
