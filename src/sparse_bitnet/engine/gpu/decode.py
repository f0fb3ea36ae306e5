# SPDX-License-Identifier: Apache-2.0
"""Prompts and steps of a prepared model over a cache of fixed size, steps as CUDA graphs.

Sequences hold slots. A step runs over the first few slots at once, one token each, so its shapes are
constant and it can be recorded: a graph for every number of slots and of keys. Which keys count follows
from the position tensor alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WARM_UP = 2
_SHORTEST = 256
"""Least keys of a recorded step."""


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
    """A model of `blocks.prepare_`, and keys and values [slots, kv_heads, context_length + 1, head_dim]
    of each layer. The last place of a slot is never read: slots that have no part in a step write there.
    """

    def __init__(
        self, model: Any, slots: int, context_length: int, like: "SlotDecoder | None" = None
    ) -> None:
        """
        Args:
            model: in evaluation mode, on its device, in its dtype.
            slots: sequences held at once.
            context_length: most tokens of a sequence.
            like: a decoder of the same sizes, whose keys and values to share.
        """
        parameter = next(model.parameters())
        self.device, dtype = parameter.device, parameter.dtype
        shape = (slots, *_slot_shape(model.config, context_length))
        layers = range(model.config.num_hidden_layers)

        def zeros() -> list[Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=self.device) for _ in layers]

        self.keys: list[Tensor] = like.keys if like else zeros()
        self.values: list[Tensor] = like.values if like else zeros()
        self.positions = torch.zeros(slots, 1, dtype=torch.int64, device=self.device)
        """Where the next step writes, of every slot."""
        self.slots, self.context_length = slots, context_length
        self._tokens = torch.zeros_like(self.positions)
        self._model = model
        self._steps: dict[tuple[int, int], tuple[Callable[[], object], Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    @torch.no_grad()
    def prompt(self, slots: slice, tokens: Tensor, start: int = 0, keep: int = 1) -> Tensor:
        """Append tokens int64 [sequences, count] to these slots, behind their first `start`.

        Returns the logits of the last `keep` positions, [sequences, keep, vocabulary].
        """
        end = start + tokens.shape[1]
        places = torch.arange(start, end, device=self.device).expand(tokens.shape)
        return self._run(slots, tokens, places, end, keep)

    @torch.no_grad()
    def step(self, tokens: Sequence[int] | Tensor, places: Sequence[int | None]) -> Tensor:
        """One more token for each of the first slots.

        Args:
            tokens: one a slot.
            places: tokens that the slot holds; None for those that have no part in it.

        Returns logits [slots, vocabulary], overwritten by the next step of any number of slots.
        """
        rows, longest = len(places), 1 + max(place for place in places if place is not None)
        length = min(max(1 << (longest - 1).bit_length(), _SHORTEST), self.context_length)
        where = [self.context_length if place is None else place for place in places]
        self.positions[:rows, 0].copy_(torch.tensor(where))
        self._tokens[:rows, 0].copy_(torch.as_tensor(tokens))

        def step() -> Tensor:
            given = self._tokens[:rows], self.positions[:rows]
            return self._run(slice(rows), *given, length, 1)[:, 0]

        if self._pool is None:
            return step()
        key = (rows, length)
        if key not in self._steps:
            self._steps[key] = recorded(step, self.device, self._pool)
        replay, logits = self._steps[key]
        replay()
        return logits

    def _run(self, slots: slice, tokens: Tensor, places: Tensor, length: int, keep: int) -> Tensor:
        decoder = self._model.get_decoder()
        x = decoder.embed_tokens(tokens)
        rotary = decoder.rotary_emb(x, places)
        for block, keys, values in zip(decoder.layers, self.keys, self.values, strict=True):
            x = block(x, rotary, places, keys[slots], values[slots], length)
        return self._model.lm_head(decoder.norm(x[:, -keep:]))

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` places of a slot to another."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]


def slot_bytes(config: Any, context_length: int, dtype: torch.dtype) -> int:
    """Memory of one slot, all layers."""
    heads, places, head_dim = _slot_shape(config, context_length)
    return 2 * config.num_hidden_layers * heads * places * head_dim * dtype.itemsize


def _slot_shape(config: Any, context_length: int) -> tuple[int, int, int]:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_key_value_heads, context_length + 1, head_dim
