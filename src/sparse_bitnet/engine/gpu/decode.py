# SPDX-License-Identifier: Apache-2.0
"""Prompts and steps of a transformers model over a cache of fixed size, steps as CUDA graphs.

Sequences hold slots. A step runs over the first few slots at once, one token each, so its shapes are
constant and it can be recorded: a graph for every number of slots and of keys. Which keys count is said
by a mask that depends on the position tensor alone.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_bitnet.errors import UserError

ATTENTION = "sparse_bitnet_grouped"
"""The name under which `grouped_attention` is entered in transformers' registry."""

WARM_UP = 2
_SHORTEST = 256
"""Least keys of a recorded step."""


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    slots: "SlotDecoder | None" = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention with fewer key than query heads, without copying keys.

    Args:
        module, attention_mask: not used; sequences have no padding.
        query: [batch, heads, tokens, head_dim].
        key, value: [batch, kv_heads, length, head_dim].
        scaling: of the scores; by default 1 / sqrt(head_dim).
        slots: whose positions say which keys count, by a keyword of the model's forward, because what
            models do with an attention mask differs between them.

    Returns ([batch, tokens, heads, head_dim], None).
    """
    batch, heads, tokens, head_dim = query.shape
    assert slots is not None
    if (key_mask := slots.key_mask(batch, tokens, key.shape[2])) is None:
        y = F.scaled_dot_product_attention(
            query, key, value, is_causal=tokens > 1, scale=scaling, enable_gqa=True
        )
    elif tokens == 1 and query.is_cuda:
        y = split_attention(_compiled_flex(), query, key, value, slots.positions, scaling)
    else:
        # The heads of a group are just more queries of the same keys.
        group = heads // key.shape[1]
        grouped = query.reshape(batch, -1, group * tokens, head_dim)
        mask = key_mask.repeat(1, 1, group, 1)
        y = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
        y = y.reshape(batch, heads, tokens, head_dim)
    return y.transpose(1, 2), None


def split_attention(
    flex: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    scaling: float | None,
) -> Tensor:
    """One token a sequence, keys up to its position: `flex_attention` splits them over the GPU."""

    def up_to_its_own(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(k <= positions[batch], score, -float("inf"))

    return flex(query, key, value, score_mod=up_to_its_own, scale=scaling, enable_gqa=True)


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def recorded(
    function: Callable[[], Any], device: torch.device, pool: Any = None
) -> tuple[Callable[[], object], Any]:
    """The function as a CUDA graph, and what it returns, which each replay writes anew; elsewhere the
    function itself, called once.

    Args:
        function: may be repeated without harm; it runs a few times before it is recorded, since kernels
            compile and are searched on the way.
        device: that it runs on.
        pool: of memory to share with other graphs, whose results are then overwritten.
    """
    if device.type != "cuda":
        return function, function()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = function()
    return graph.replay, result


class SlotDecoder:
    """A model, and keys and values [slots, kv_heads, context_length + 1, head_dim] of each layer.

    It stands where transformers expects a `Cache`; the model is given its positions, so it asks for
    little more than `update`. The last place of a slot is never read: slots that have no part in a step
    write there.

    Raises `UserError` for a model with sliding-window layers.
    """

    is_compileable = True

    def __init__(
        self, model: Any, slots: int, context_length: int, *, compile: bool = False
    ) -> None:
        """
        Args:
            model: a transformers causal LM in evaluation mode, on its device, in its dtype.
            slots: sequences held at once.
            context_length: most tokens of a sequence.
            compile: let torch.compile fuse the small operators of a step.
        """
        from transformers import AttentionInterface

        check_full_attention(model)
        AttentionInterface.register(ATTENTION, grouped_attention)
        model.config._attn_implementation = ATTENTION
        parameter = next(model.parameters())
        self.device, dtype = parameter.device, parameter.dtype
        shape = (slots, *_slot_shape(model.config, context_length))
        layers = range(model.config.num_hidden_layers)
        self.keys = [torch.zeros(shape, dtype=dtype, device=self.device) for _ in layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=self.device) for _ in layers]
        self.positions = torch.zeros(slots, dtype=torch.int64, device=self.device)
        """Where the next step writes, of every slot."""
        self.slots, self.context_length = slots, context_length
        self._tokens = torch.zeros(slots, 1, dtype=torch.int64, device=self.device)
        self._model = model
        self._forward = (
            torch.compile(self._run, fullgraph=True, dynamic=False) if compile else self._run
        )
        self._prompt: tuple[slice, int] | None = None
        self._length = context_length
        self._steps: dict[tuple[int, int], tuple[Callable[[], object], Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    @torch.no_grad()
    def prompt(self, slots: slice, tokens: Tensor, start: int = 0, keep: int = 1) -> Tensor:
        """Append tokens int64 [sequences, count] to these slots, behind their first `start`.

        Returns the logits of the last `keep` positions, [sequences, keep, vocabulary].
        """
        self._prompt = (slots, start)
        positions = torch.arange(start, start + tokens.shape[1], device=self.device)
        return self._run(tokens, positions.unsqueeze(0), keep)

    @torch.no_grad()
    def step(self, tokens: Sequence[int] | Tensor, places: Sequence[int | None]) -> Tensor:
        """One more token for each of the first slots.

        Args:
            tokens: one a slot.
            places: tokens that the slot holds; None for those that have no part in it.

        Returns logits [slots, vocabulary], overwritten by the next step of any number of slots.
        """
        rows, longest = len(places), 1 + max(place for place in places if place is not None)
        self._length = min(max(1 << (longest - 1).bit_length(), _SHORTEST), self.context_length)
        nowhere = self.context_length
        where = [nowhere if place is None else place for place in places]
        self.positions[:rows].copy_(torch.tensor(where))
        self._tokens[:rows, 0].copy_(torch.as_tensor(tokens))
        self._prompt = None

        def step() -> Tensor:
            return self._forward(self._tokens[:rows], self.positions[:rows, None], 1)[:, 0]

        if self._pool is None:
            return step()
        key = (rows, self._length)
        if key not in self._steps:
            self._steps[key] = recorded(step, self.device, self._pool)
        replay, logits = self._steps[key]
        replay()
        return logits

    def _run(self, tokens: Tensor, positions: Tensor, keep: int) -> Tensor:
        return self._model(
            input_ids=tokens,
            position_ids=positions,
            slots=self,
            past_key_values=self,
            use_cache=True,
            logits_to_keep=keep,
        ).logits

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [rows, kv_heads, tokens, head_dim]; returns what to attend to."""
        keys, values = self.keys[layer], self.values[layer]
        rows, heads, tokens, head_dim = key.shape
        if self._prompt is not None:
            slots, start = self._prompt
            end = start + tokens
            keys[slots, :, start:end], values[slots, :, start:end] = key, value
            return (key, value) if start == 0 else (keys[slots, :, :end], values[slots, :, :end])
        place = self.positions[:rows].view(rows, 1, 1, 1).expand(rows, heads, 1, head_dim)
        keys[:rows].scatter_(2, place, key)
        values[:rows].scatter_(2, place, value)
        return keys[:rows, :, : self._length], values[:rows, :, : self._length]

    def key_mask(self, rows: int, tokens: int, length: int) -> Tensor | None:
        """Bool [rows or 1, 1, tokens, length]: the keys of each token; None where they are causal."""
        keys = torch.arange(length, device=self.device)
        if self._prompt is None:
            return (keys <= self.positions[:rows, None]).view(rows, 1, 1, length)
        start = length - tokens
        return (keys <= keys[start:, None]).view(1, 1, tokens, length) if start else None

    def get_seq_length(self, layer: int = 0) -> int:
        """Of no use here: the model is given its positions."""
        return 0

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` places of a slot to another."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]


def check_full_attention(model: Any) -> None:
    """Raise `UserError` for a model with layers of another kind, a sliding window for example."""
    kinds = sorted(set(getattr(model.config, "layer_types", None) or ["full_attention"]))
    if kinds != ["full_attention"]:
        raise UserError(
            f"the GPU decoder supports full attention only, the model has {', '.join(kinds)}"
        )


def slot_bytes(config: Any, context_length: int, dtype: torch.dtype) -> int:
    """Memory of one slot, all layers."""
    heads, places, head_dim = _slot_shape(config, context_length)
    return 2 * config.num_hidden_layers * heads * places * head_dim * dtype.itemsize


def _slot_shape(config: Any, context_length: int) -> tuple[int, int, int]:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return kv_heads, context_length + 1, head_dim
