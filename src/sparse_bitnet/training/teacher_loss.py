# SPDX-License-Identifier: Apache-2.0
"""A loss with a teacher: its distribution over the next token, and how its attention relates tokens.

    ce_weight * cross-entropy
    + logits_weight * T^2 * KL(teacher || student), both softened by the temperature T (Hinton et al.,
      2015)
    + relations_weight * KL of the relations among queries, keys and values of one layer (MiniLMv2,
      Wang et al., 2021, as BitNet Distillation, Wu et al., 2025, uses them)

The student starts from the teacher's weights. The teacher is not part of the model: nothing of it is
trained, split, or stored.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import blocks_of
from sparse_bitnet.training.loss import (
    SoftTargets,
    SummedLoss,
    chunked_cross_entropy,
    hidden_states,
)
from sparse_bitnet.training.output_scale import capped, logit_cap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RELATED = ("q_proj", "k_proj", "v_proj")


class Teacher:
    """A frozen causal LM on the device of its student."""

    def __init__(
        self,
        path: str | Path,
        dtype: torch.dtype,
        device: torch.device,
        vocab_size: int | None = None,
    ) -> None:
        """Load it. Its logits are those of the first `vocab_size` rows of its head, by default all.

        Raises `UserError` for what does not load or holds values that are not finite.
        """
        self.path = path
        self.model = find_checkpoint(path).load(dtype=dtype)
        check_finite(self.model, str(path))
        self.vocab_size = vocab_size or head_rows(self.model)
        self.model.requires_grad_(False).eval().to(device)

    @torch.no_grad()
    def hidden(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """`hidden_states` [tokens, hidden_size] of [batch, sequence]."""
        with torch.autocast(input_ids.device.type, enabled=False):
            return hidden_states(self.model, input_ids, position_ids).flatten(0, 1)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [tokens, vocab_size] of some of the `hidden` states."""
        with torch.autocast(hidden.device.type, enabled=False):
            logits = self.model.get_output_embeddings()(hidden)[:, : self.vocab_size].float()
        return capped(logits, logit_cap(self.model))


class DistillationLoss(SummedLoss):
    """`SummedLoss` of the student, in training with what the teacher adds; in evaluation without."""

    def __init__(
        self,
        model: "PreTrainedModel",
        config: TrainConfig,
        teacher: Teacher | None,
        vocab_size: int | None = None,
    ) -> None:
        """`teacher`: None where its top logits come with every batch; `vocab_size` is then the number of
        rows that both heads have, by default all of the student's.

        Raises `UserError` for models that the options do not fit.
        """
        super().__init__(model, config.loss_chunk_tokens)
        self.config = config
        self._vocab_size = vocab_size or head_rows(model)
        self._student_states: States | None = None
        self._teacher_states: States | None = None
        self._teacher = [teacher]  # in a list, it is not a submodule: neither split nor trained
        head = model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise UserError(
                f"distillation takes no output head with a bias ({type(model).__name__})"
            )
        if config.relations_weight:
            if config.compile == "on" or config.activation_checkpointing:
                raise UserError(
                    "relations_weight reads a layer's states: it takes neither compile nor "
                    "activation_checkpointing"
                )
            assert teacher is not None
            self._student_states = States(model, config.relations_layer)
            self._teacher_states = States(teacher.model, config.relations_layer)
            heads = self._teacher_states.heads
            if any(width % heads for width in self._student_states.widths):
                raise UserError(
                    f"relations_weight: the student's projections, of {self._student_states.widths} "
                    f"values, are not cut into the teacher's {heads} heads"
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
        mine, theirs = self._student_states, self._teacher_states
        if mine is None or theirs is None:
            return self._logits_loss(input_ids, labels, position_ids, top)
        with mine.kept() as own, theirs.kept() as wanted:
            loss = self._logits_loss(input_ids, labels, position_ids, top)
            heads = theirs.heads
            related = torch.stack(
                [relation_loss(own[name], wanted[name], heads) for name in RELATED]
            )
        scored = (labels >= 0).sum()
        return loss + self.config.relations_weight * scored * related.sum().double()

    def _logits_loss(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None,
        top: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        config, head = self.config, self.model.get_output_embeddings()
        probabilities: Callable[[slice], Tensor]
        if top is not None:
            ids, values = (each.flatten(0, 1) for each in top)

            def probabilities(rows: slice) -> Tensor:
                share = (values[rows].float() / config.temperature).softmax(-1)
                empty = share.new_zeros((len(share), self._vocab_size))
                return empty.scatter_(-1, ids[rows].long(), share)
        else:
            (teacher,) = self._teacher
            assert teacher is not None
            states = teacher.hidden(input_ids, position_ids)

            def probabilities(rows: slice) -> Tensor:
                return (teacher.logits(states[rows]) / config.temperature).softmax(-1)

        hidden = hidden_states(self.model, input_ids, position_ids)
        soft = SoftTargets(
            probabilities=probabilities,
            temperature=config.temperature,
            weight=config.logits_weight,
            hard_weight=config.ce_weight,
        )
        return chunked_cross_entropy(
            hidden.flatten(0, 1),
            head.weight,
            labels.flatten(),
            chunk_tokens=self.chunk_tokens,
            soft=soft,
            cap=logit_cap(self.model),
        )


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


class States:
    """Outputs of one layer's query, key and value projections, while they are asked for."""

    def __init__(self, model: "PreTrainedModel", layer: int) -> None:
        """Raises `UserError` for a layer that is not there, and for attention of another form."""
        blocks = blocks_of(model)
        if not -len(blocks) <= layer < len(blocks):
            raise UserError(f"relations_layer={layer}: the model has {len(blocks)} layers")
        found = {
            name: module
            for full, module in blocks[layer].named_modules()
            for name in RELATED
            if full.rpartition(".")[2] == name
        }
        if missing := [name for name in RELATED if name not in found]:
            raise UserError(f"relations_weight: {type(model).__name__} has no {missing[0]}")
        config: Any = model.config
        self.heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._found: dict[str, Any] = found
        self.widths = sorted({int(module.weight.shape[0]) for module in found.values()})

    @contextmanager
    def kept(self) -> Iterator[dict[str, Tensor]]:
        """What the projections of the forwards inside give, by name."""
        states: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            return lambda module, inputs, output: states.update({name: output})

        hooks = [module.register_forward_hook(keep(name)) for name, module in self._found.items()]
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()


def head_rows(model: "PreTrainedModel") -> int:
    """Rows of a model's output head: its vocabulary, and what it is padded with."""
    return model.get_output_embeddings().weight.shape[0]


def check_finite(model: nn.Module, where: str) -> None:
    """Raise `UserError` where a parameter is not finite."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise UserError(f"{where}: {name} holds values that are not finite")
