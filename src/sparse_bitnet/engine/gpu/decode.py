"""Prefill and decode steps of a transformers model over a fixed cache, steps as one CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparse_bitnet.engine.gpu.attention import use_grouped_attention_
from sparse_bitnet.engine.gpu.slots import SlotCache
from sparse_bitnet.errors import UserError


def check_full_attention(model: Any) -> None:
    """Raise `UserError` for a model with layers of another kind, a sliding window for example."""
    kinds = sorted(set(getattr(model.config, "layer_types", None) or ["full_attention"]))
    if kinds != ["full_attention"]:
        raise UserError(
            f"the GPU decoder knows full attention only, the model has {', '.join(kinds)}"
        )


def recorded_step(
    step: Callable[[], Tensor], pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A step as a CUDA graph, and the tensor into which each replay writes what the step returns.

    Args:
        step: may be repeated without harm; it runs a few times before it is recorded, since kernels
            compile and algorithms are searched on the way.
        pool: of memory to share with other graphs, whose results are then overwritten.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = step()
    return graph, result


class GraphDecoder:
    """`batch` sequences of equal length, decoded together.

    On CUDA the first step is recorded as a graph and later ones replay it: no Python and no launch
    overhead between kernels. Elsewhere steps run as they are.

    Raises `UserError` for a model with sliding-window layers.
    """

    def __init__(
        self,
        model: Any,
        batch: int,
        context_length: int,
        *,
        compile: bool = False,
        cache: SlotCache | None = None,
    ) -> None:
        """
        Args:
            model: a transformers causal LM in evaluation mode, on its device.
            batch: sequences.
            context_length: most tokens of a sequence, prompt included.
            compile: let torch.compile fuse the small operators of a step.
            cache: to write to, of these sizes; by default one of its own.
        """
        check_full_attention(model)
        use_grouped_attention_(model)
        self.model, self.batch, self.context_length = model, batch, context_length
        parameter = next(model.parameters())
        self.cache = cache or SlotCache(
            model.config, batch, context_length, parameter.dtype, parameter.device
        )
        self.length = 0
        self._tokens = torch.zeros(batch, 1, dtype=torch.int64, device=parameter.device)
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._forward = (
            torch.compile(self._step, fullgraph=True, dynamic=False) if compile else self._step
        )

    @torch.no_grad()
    def prefill(self, tokens: Tensor) -> Tensor:
        """Start over with these prompts, int64 [batch, tokens], at least two tokens each.

        Returns the logits of the last position, [batch, vocabulary].

        Raises `UserError` when the prompts do not fit.
        """
        batch, count = tokens.shape
        if batch != self.batch or not 2 <= count <= self.context_length:
            raise UserError(
                f"prompts of {batch} x {count} tokens: the decoder holds {self.batch} sequences of 2 "
                f"to {self.context_length}"
            )
        self.length = count
        self.cache.start_prompt(slice(None), 0)
        positions = torch.arange(count, device=tokens.device).unsqueeze(0)
        return self._run(tokens, positions, None)[:, -1]

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to every sequence, int64 [batch]; returns logits [batch, vocabulary].

        The result is overwritten by the next step.

        Raises `UserError` when the cache is full.
        """
        if self.length >= self.context_length:
            raise UserError(f"the cache of {self.context_length} tokens is full")
        self._tokens.copy_(tokens.view(-1, 1))
        self.cache.start_step(self.context_length)
        self.cache.positions.fill_(self.length)
        self.length += 1
        if not self._tokens.is_cuda:
            return self._forward()
        if self._graph is None:
            self._graph, self._logits = recorded_step(self._forward)
        assert self._logits is not None
        self._graph.replay()
        return self._logits

    @torch.no_grad()
    def set_length_(self, length: int) -> None:
        """Pretend that so many tokens are in the cache, whatever they are: for benchmarks."""
        assert 0 < length < self.context_length
        self.length = length

    def _step(self) -> Tensor:
        positions = self.cache.positions.view(-1, 1)
        return self._run(self._tokens, positions, self.cache.step_mask(self.batch))[:, -1]

    def _run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        return self.model(
            input_ids=tokens,
            position_ids=positions,
            key_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
