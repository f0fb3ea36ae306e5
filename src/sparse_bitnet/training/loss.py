# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a large vocabulary without ever holding all its logits, and its mean over held-out
tokens, which the processes of a run share.

For 16 x 2048 tokens and 151,936 words, float32 logits take 20 GB and their gradient as much again. Here
a chunk of tokens at a time goes through the head; its gradients with respect to hidden states and head
are computed at once, and the logits are dropped before the next chunk.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_bitnet.data.loader import Windows
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import evaluation_mode, sparse_layers
from sparse_bitnet.nn.ternary_tables import head_weight
from sparse_bitnet.progress import OnProgress
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import autocast, compile_options
from sparse_bitnet.training.distributed import World
from sparse_bitnet.training.logits import capped, hidden_states, logit_cap
from sparse_bitnet.training.sharded_linear import selected_shards

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Soft(NamedTuple):
    """A teacher's term of the loss: `weight` * temperature^2 * KL(teacher || student), both softened by
    the temperature, beside `hard_weight` times the cross-entropy."""

    wanted: Callable[[slice], Tensor]
    """Rows of a chunk -> the teacher's logits of the first words, -inf for those without a share."""
    hard_weight: float
    weight: float
    temperature: float


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, chunk_tokens, soft, compiled, cap):
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        head = weight.to(dtype)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        divergence = torch.zeros_like(total)
        grad_hidden = torch.empty_like(hidden if needs_grad else hidden[:0])
        grad_weight = torch.zeros_like(weight if needs_grad else weight[:0], dtype=torch.float32)
        with torch.autocast(device, enabled=False):
            for start in range(0, hidden.shape[0], chunk_tokens):
                rows = slice(start, start + chunk_tokens)
                x, y = hidden[rows].to(dtype), labels[rows]
                if soft is not None:
                    chunk = (
                        _compiled(_distillation_chunk, device) if compiled else _distillation_chunk
                    )
                    part, softer, *gradients = chunk(x, head, y, soft.wanted(rows), soft[1:], cap)
                    divergence += softer
                elif compiled and cap is None and needs_grad:
                    part, *gradients = _compiled(_chunk, device)(x, head, y)
                else:
                    part, *gradients = _eager_chunk(x, head, y, needs_grad, cap)
                total += part
                if needs_grad:
                    grad_hidden[rows] = gradients[0]
                    grad_weight += gradients[1]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(divergence)
        return total, divergence

    @staticmethod
    def backward(ctx, gradient, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = gradient.float()
        return grad_hidden * scale, (grad_weight * scale).to(ctx.weight_dtype), *(None,) * 5


# Each returns the summed loss of a chunk, float64, and its gradients with respect to hidden states and
# head, in their type.


def _eager_chunk(
    x: Tensor, head: Tensor, labels: Tensor, needs_grad: bool, cap: float | None
) -> tuple[Tensor, ...]:
    target = labels.clamp_min(0).unsqueeze(-1)
    scored = (labels >= 0).unsqueeze(-1)
    logits = capped((x @ head.t()).float(), cap)
    log_probabilities = logits.log_softmax(-1)
    picked = log_probabilities.gather(-1, target) * scored
    total = -picked.sum(dtype=torch.float64)
    if not needs_grad:
        return (total,)
    grad = log_probabilities.exp_()
    grad.scatter_add_(-1, target, -torch.ones_like(picked))
    if cap is not None:
        grad = grad.mul_(1 - (logits / cap).square_())
    grad = grad.mul_(scored).to(x.dtype)
    return total, grad @ head, grad.t() @ x


def _chunk(x: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Do `_eager_chunk` without a cap in the way that compiles to two passes; eager it makes ten."""
    scored, values = labels.unsqueeze(-1) >= 0, (x @ head.t()).float()
    total, slope = _cross_entropy(values, labels.unsqueeze(-1), scored)
    slope = (slope * scored).to(x.dtype)
    return total, slope @ head, slope.t() @ x


def _cross_entropy(values: Tensor, target: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    top = values.amax(-1, keepdim=True)
    powers = (values - top).exp()
    sums = powers.sum(-1, keepdim=True)
    picked = values.gather(-1, target.clamp_min(0)) - top - sums.log()
    hit = torch.arange(values.shape[-1], device=values.device) == target
    return -(picked * scored).sum(dtype=torch.float64), powers / sums - hit.float()


def _distillation_chunk(
    x: Tensor,
    head: Tensor,
    labels: Tensor,
    wanted: Tensor,
    weights: tuple[float, float, float],
    cap: float | None,
) -> tuple[Tensor, ...]:
    """Return a chunk's loss, its KL(teacher || student), both summed, and the gradients."""
    hard_weight, soft_weight, temperature = weights
    scored, values = labels.unsqueeze(-1) >= 0, capped((x @ head.t()).float(), cap)
    theirs = (wanted.float() / temperature).log_softmax(-1)
    own = (values[:, : wanted.shape[-1]] / temperature).log_softmax(-1)
    share = theirs.exp()
    divergence = (torch.where(share > 0, share * (theirs - own), 0.0) * scored).sum(
        dtype=torch.float64
    )
    total = divergence * (soft_weight * temperature**2)
    slope = (own.exp() - share) * (soft_weight * temperature)
    slope = F.pad(slope, (0, values.shape[-1] - slope.shape[-1]))
    if hard_weight:
        hard, steeper = _cross_entropy(values, labels.unsqueeze(-1), scored)
        total, slope = total + hard * hard_weight, slope + steeper * hard_weight
    if cap is not None:
        slope = slope * (1 - (values / cap).square())
    slope = (slope * scored).to(x.dtype)
    return total, divergence, slope @ head, slope.t() @ x


@cache
def _compiled(chunk: Callable[..., Any], device: str) -> Callable[..., tuple[Tensor, ...]]:
    return torch.compile(chunk, options=compile_options(device))


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    soft: Soft | None = None,
    *,
    chunk_tokens: int | None = None,
    compiled: bool = False,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the token losses, in nats, and that of a teacher's KL over the scored tokens.

    Args:
        hidden: last hidden states [tokens, hidden_size].
        weight: the head [vocab_size, hidden_size].
        labels: int64 [tokens], -100 for a token that is not scored.
        soft: the teacher's term, which needs gradients; None: cross-entropy alone.
        chunk_tokens: tokens whose logits exist at once; default: `default_chunk_tokens`, compiled 4x.
        compiled: whether to compile the work on the logits, if there is no `cap`.
        cap: limit of the logits, see `capped`.

    Returns two float64 scalars, the first differentiable in `hidden` and `weight` unless under `no_grad`.
    Peak memory above the gradients is 16 bytes per logit of one chunk and a float32 copy of the head's
    gradient.
    """
    if not torch.is_grad_enabled():  # a Function's forward cannot see this
        hidden, weight = hidden.detach(), weight.detach()
    times = 4 if compiled and cap is None else 1  # compiled it stores a quarter as much
    chunk_tokens = chunk_tokens or times * default_chunk_tokens(weight.shape[0])
    return _ChunkedCrossEntropy.apply(hidden, weight, labels, chunk_tokens, soft, compiled, cap)


def default_chunk_tokens(vocab_size: int) -> int:
    """Return the tokens of a chunk: about 4 M logits, which stay in a CPU's cache, but enough to be
    worth reading the head."""
    return max(512, 2**22 // vocab_size)


class SummedLoss(torch.nn.Module):
    """A transformers causal LM whose forward returns its loss; steps call it, and FSDP splits it."""

    def __init__(
        self, model: "PreTrainedModel", chunk_tokens: int | None = None, compiled: bool = False
    ) -> None:
        super().__init__()
        self.model, self.chunk_tokens, self.compiled = model, chunk_tokens, compiled
        # Sum of KL(teacher || student), float64, since the caller last set it to zero.
        self.divergence = torch.zeros((), dtype=torch.float64)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        soft: Soft | None = None,
    ) -> Tensor:
        """Return the loss of the next tokens, summed: a float64 scalar.

        `labels[b, t]` is the token that follows `input_ids[b, t]` (already shifted), both [batch,
        sequence] int64, as are `position_ids`; attention does not cross a place where these restart at
        0. `soft`: a teacher's term, for a head without a bias.
        """
        hidden = hidden_states(self.model, input_ids, position_ids)
        head, cap = self.model.get_output_embeddings(), logit_cap(self.model)
        flat = hidden.flatten(0, 1)
        if getattr(head, "bias", None) is None:
            loss, divergence = chunked_loss(
                flat,
                head_weight(head),
                labels.flatten(),
                soft,
                chunk_tokens=self.chunk_tokens,
                compiled=self.compiled,
                cap=cap,
            )
            self.divergence = self.divergence.to(divergence.device) + divergence
            return loss
        logits = capped(head(flat).float(), cap)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum").double()


def mean_of(total: float, scored: float) -> tuple[float, int]:
    """Return the mean of a sum, and the number of terms. Raises `UserError` if nothing was scored."""
    if scored == 0:
        raise UserError("no token to score: the evaluation data is empty")
    return total / scored, int(scored)


# Loss of held-out tokens.


def held_out_windows(config: TrainConfig, *, verify: bool = True) -> Windows:
    """Return the validation split in windows of `sequence_length`; `verify` as in `TokenDataset.open`.

    Raises `UserError` when it has no whole sequence, or no answer to score.
    """
    dataset = TokenDataset.open(config.data, "validation", verify=verify)
    held_out = Windows(dataset, config.sequence_length)
    if dataset.is_chat and not held_out.learnt(np.arange(_count(held_out, config))):
        raise UserError(
            f"{config.data}: no answer in its first {config.validation_tokens:,} validation tokens: "
            "raise --validation-tokens"
        )
    return held_out


def _count(held_out: Windows, config: TrainConfig) -> int:
    """Return the number of windows that a validation reads."""
    if not config.validation_tokens:
        return len(held_out)
    return min(len(held_out), max(1, config.validation_tokens // config.sequence_length))


def validation_loss(
    loss: SummedLoss,
    config: TrainConfig,
    held_out: Windows,
    *,
    device: torch.device,
    dtype: torch.dtype,
    world: World | None = None,
    on_batch: OnProgress = lambda done, total: None,
) -> tuple[float, int]:
    """Return `mean_token_loss` over the first `validation_tokens` of the validation split, in whole
    sequences that the processes of `world` share. `on_batch` is called with the tokens read so far and
    their total."""
    world, windows = world or World(), _count(held_out, config)
    own = max(1, config.batch_size // world.size)
    size = 4 * min(config.micro_batch_size or own, own)  # no gradients need memory

    def batches() -> Iterator[Sequence[Tensor]]:
        for start in range(0, windows, size * world.size):
            first = start + size * world.rank
            scored = first < windows
            first = first if scored else start
            batch = held_out.batch(np.arange(first, min(first + size, windows)))
            input_ids, labels, *positions = map(torch.from_numpy, batch)
            # All processes of a split model must compute the batch; here nothing of it is scored.
            yield input_ids, labels if scored else torch.full_like(labels, -100), *positions
            done = min(windows, start + size * world.size)
            on_batch(done * config.sequence_length, windows * config.sequence_length)

    return mean_token_loss(loss, batches(), device=device, dtype=dtype, world=world)


@torch.no_grad()
def mean_token_loss(
    loss: SummedLoss,
    batches: Iterable[Sequence[Tensor]],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    world: World | None = None,
) -> tuple[float, int]:
    """Return the exact token-weighted mean loss in nats over all processes, and the number of scored
    tokens.

    The model is in evaluation mode meanwhile; `batches` yields the arguments of `SummedLoss`. Raises
    `UserError` when there is nothing to score.
    """
    world, layers = world or World(), sparse_layers(loss.model).values()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with (
        evaluation_mode(loss.model),
        selected_shards(layers, world.sum_shards),
        autocast(device, dtype),
    ):
        for batch in batches:
            input_ids, labels, *positions = (each.to(device) for each in batch)
            sums += torch.stack([loss(input_ids, labels, *positions), (labels >= 0).sum()])
    return mean_of(*world.sum(sums).tolist())
