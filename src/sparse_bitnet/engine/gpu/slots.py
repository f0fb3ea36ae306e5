"""Keys and values of sequences of different lengths, each in a slot of fixed size.

A step runs over the first few slots at once, with one position a slot, so its shapes are constant and
it can be recorded; prompts of one length run together, into their slots.
"""

from typing import Any

import torch
from torch import Tensor


class SlotCache:
    """Two tensors [slots, kv_heads, context_length + 1, head_dim] a layer.

    Stands where transformers expects a `Cache`. The model is given its positions, so it asks for little
    more than `update`. The last place of a slot is never read: slots that have no part in a step write
    there.
    """

    is_compileable = True

    def __init__(
        self, config: Any, slots: int, context_length: int, dtype: torch.dtype, device: Any
    ) -> None:
        shape = (slots, *_slot_shape(config, context_length))
        layers = range(config.num_hidden_layers)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.positions = torch.zeros(slots, dtype=torch.int64, device=device)
        """Where the next step writes, of every slot."""
        self.slots, self.context_length = slots, context_length
        self._prompt: tuple[slice, int] | None = None
        self._length = context_length

    @staticmethod
    def slot_bytes(config: Any, context_length: int, dtype: torch.dtype) -> int:
        """Memory of one slot, all layers."""
        places, elements = 2 * config.num_hidden_layers, 1
        for size in _slot_shape(config, context_length):
            elements *= size
        return places * elements * dtype.itemsize

    def start_prompt(self, slots: slice, start: int) -> None:
        """The next forward appends tokens to these slots, behind their first `start`."""
        self._prompt = (slots, start)

    def start_step(self, length: int) -> None:
        """The next forwards append a token each to the first slots; `length`: keys that they look at."""
        self._prompt, self._length = None, length

    def set_positions(self, positions: list[int | None]) -> None:
        """Where a step writes, of the first slots; None for those that have no part in it."""
        places = [self.context_length if place is None else place for place in positions]
        self.positions[: len(places)].copy_(torch.tensor(places))

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

    def step_mask(self, rows: int) -> Tensor:
        """Bool [rows, 1, 1, length]: the places of each slot up to the one that a step writes."""
        index = torch.arange(self._length, device=self.positions.device)
        return (index <= self.positions[:rows, None]).view(rows, 1, 1, -1)

    def get_seq_length(self, layer: int = 0) -> int:
        """Of no use here: the model is given its positions."""
        return 0

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` places of a slot to another."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]


def _slot_shape(config: Any, context_length: int) -> tuple[int, int, int]:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return kv_heads, context_length + 1, head_dim
