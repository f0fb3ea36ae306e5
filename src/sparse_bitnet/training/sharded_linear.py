# SPDX-License-Identifier: Apache-2.0
"""A SparseBitLinear whose weight is split by rows over processes, and what travels between them.

PyTorch's `fully_shard` gathers a block's parameters before its forward and backward and scatters the
gradients. Through its all-gather extension (a tensor subclass with `fsdp_pre_all_gather` and
`fsdp_post_all_gather`) a ternary layer sends its packed codes instead of its weights, 2 bits each,
and a full-precision one its masked weights in the compute type, as does one whose quantiser has
several scales a matrix or whose schedule blends. Groups of the N:M pattern lie along rows and rows
stay whole, so mask and codes are computed where the master rows are; only the ternary scale needs all
shards. `selected_shards` computes it for all layers with one sum per step.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparse_bitnet.nn.convert import selected_layers, sparse_layers
from sparse_bitnet.nn.layer import SparseBitLinear
from sparse_bitnet.nn.selection import Selection
from sparse_bitnet.nn.straight_through import straight_through, ternary_int8_linear
from sparse_bitnet.ops.nm_mask import nm_mask
from sparse_bitnet.ops.select_ternary import abs_sum, mean_to_scale
from sparse_bitnet.packing.two_bits import pack_codes, unpack_codes
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.training.row_shard import RowShard, UnevenRowShard, local_rows
from sparse_bitnet.variants.registry import Matrix

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the processes that hold the shards of one model."""


class ShardedSparseBitLinear(SparseBitLinear):
    """A `SparseBitLinear` that selects on this process's rows and computes with everybody's.

    `mask`, its flips and the codes are those of the own rows. Forwards are possible only inside
    `selected_shards`. Made from a whole layer by `shard_linears_`.
    """

    compute_dtype: torch.dtype
    shared_scale: Tensor | None
    packed: Tensor | None
    gathered: Tensor | None
    gathered_bytes: int
    reduce: Reduce

    @property
    def rows(self) -> Tensor:
        """The master weight's rows of this process, a plain tensor that shares its memory."""
        return local_rows(self.weight)

    @torch.no_grad()
    def scale_parts(self) -> Tensor:
        """float64 [2], own rows only: sum and count of the magnitudes whose mean is the scale."""
        rows = self.rows
        if self.config.scale_source == "masked" and not self.dense_phase:
            n, m = self.config.pattern.n, self.config.pattern.m
            rows = rows * nm_mask(rows, NMPattern(self.kept or n, m))
        count = torch.tensor(float(rows.numel()), dtype=torch.float64, device=rows.device)
        return torch.stack([abs_sum(rows), count])

    def _source(self) -> tuple[Tensor, Tensor | None]:
        """The own rows, and the scale of all."""
        plain = self.config.weight == "ternary" and self.config.is_plain
        assert not plain or self.shared_scale is not None
        return self.rows, self.shared_scale

    def _matrix(self) -> Matrix:
        matrix = super()._matrix()
        weight = self.weight
        if isinstance(weight, DTensor):
            mesh = weight.device_mesh
            shards, own = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
            matrix.first_row = own * -(-self.out_features // shards)
            matrix.reduce_sum = lambda parts: self.reduce(parts.clone())

            def maximum(parts: Tensor) -> Tensor:
                slots = parts.new_zeros((shards, *parts.shape))
                slots[own] = parts
                return self.reduce(slots).amax(0)

            matrix.reduce_max = maximum
        return matrix

    @property
    def sends_values(self) -> bool:
        """Whether effective weights travel, and not codes, all through a run."""
        scale = self.selection.weight_scale
        blends = self.config.variant("schedule").entry.blends
        return scale is None or scale.dim() > 0 or blends

    @torch.no_grad()
    def select_(self) -> None:
        super().select_()
        codes = self.selection.codes
        self.packed = None if codes is None or self.sends_values else pack_codes(codes)

    def release_(self) -> None:
        super().release_()
        self.packed = None

    @property
    def is_selected(self) -> bool:
        # The parameter is another object while it is gathered: the optimiser's steps have to do.
        return self.state.is_current(None)

    @property
    def selection(self) -> Selection:
        """The step's, of the own rows; forwards and gathers are possible only with one."""
        assert self.state.current is not None, "used outside selected_shards"
        return self.state.current

    def forward(self, input: Tensor) -> Tensor:
        gathered, scale = self.gathered, self.selection.weight_scale
        assert gathered is not None, "forward before a gather"
        x = self._taken(input)
        if self.packed is None:
            x = self.inputs.fake_quantize(x, self.selection.blend)
            return F.linear(x, straight_through(self.weight, gathered), self.bias)
        assert scale is not None
        if self.config.activation == "none":
            value = (unpack_codes(gathered, self.in_features) * scale).to(self.weight.dtype)
            return F.linear(x, straight_through(self.weight, value), self.bias)
        return ternary_int8_linear(
            x,
            self.weight,
            self.bias,
            gathered,
            scale,
            integer=self.integer_forward,
            quantized=self.inputs.codes(x),
        )

    def _own_gradient(self) -> Tensor | None:
        gradient = self.weight.grad
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    @torch.no_grad()
    def mask_gradient_(self) -> None:
        """Zero the reduced gradient of the own rows where the config gives the weight none.

        The mask is the same for all processes and micro-batches, so it can be applied to their sum.
        """
        kept = self._gradient_mask(self.selection, self.rows)
        if kept is not None and self.weight.grad is not None:
            cast(DTensor, self.weight.grad).to_local().mul_(kept)

    def bytes_to_send(self) -> Tensor:
        """What `fully_shard` gathers of this layer: [rows, width], uint8 codes or effective weights."""
        if self.packed is not None:
            return self.packed
        return self.selection.effective(self.rows).to(self.compute_dtype)


def prepare_linears_(module: nn.Module, shards: int, compute_dtype: torch.dtype) -> None:
    """Turn every `SparseBitLinear` of `module` into one that `fully_shard` can split; it must follow.

    Args:
        module: its weights are still whole, on the device where they stay.
        shards: processes over which they will be split.
        compute_dtype: in which full-precision weights are sent and multiplied, unless theirs is shorter.
    """
    for layer in sparse_layers(module).values():
        layer.__class__ = ShardedSparseBitLinear
        sharded = cast(ShardedSparseBitLinear, layer)
        sharded.compute_dtype = min(compute_dtype, layer.weight.dtype, key=lambda t: t.itemsize)
        sharded.shared_scale = sharded.packed = sharded.gathered = None
        sharded.gathered_bytes = 0
        weight = sharded.weight
        shard_class = UnevenRowShard if layer.out_features % shards else RowShard
        sharded.weight = nn.Parameter(
            shard_class(weight.detach(), sharded), requires_grad=weight.requires_grad
        )


def sharded(layers: Iterable[SparseBitLinear]) -> list[ShardedSparseBitLinear]:
    """Those of a model's layers that are, in their order."""
    return [layer for layer in layers if isinstance(layer, ShardedSparseBitLinear)]


@contextmanager
def selected_shards(
    layers: Collection[SparseBitLinear], reduce: Reduce, reduce_inputs: Reduce | None = None
) -> Iterator[None]:
    """`selected_layers` of a model that may be sharded: then every process selects on its rows, with one
    common scale.

    The sums and counts of all layers are reduced together, once; float64, so that parts of any size
    add up to the float32 scale of the whole matrix (see `absmean`). Registered quantisers reduce by
    themselves; `reduce_inputs` sums over all processes of the run.
    """
    shards = sharded(layers)
    for layer in shards:
        layer.reduce = reduce
    scaled = [each for each in shards if each.config.weight == "ternary" and each.config.is_plain]
    if scaled:
        parts = reduce(torch.stack([layer.scale_parts() for layer in scaled]))
        for layer, scale in zip(scaled, mean_to_scale(parts[:, 0], parts[:, 1]), strict=True):
            layer.shared_scale = scale
    try:
        with selected_layers(layers, reduce_inputs):
            yield
    finally:
        for layer in scaled:
            layer.shared_scale = None


def gathered_bytes(layers: Iterable[ShardedSparseBitLinear]) -> tuple[int, int]:
    """What this process received of these layers since the last call, and what it would have
    been in bfloat16. Starts the count anew."""
    received = dense = 0
    for layer in layers:
        width = (
            layer.gathered.shape[1] * layer.gathered.itemsize if layer.gathered is not None else 1
        )
        dense += layer.gathered_bytes // width * 2 * layer.in_features
        received += layer.gathered_bytes
        layer.gathered_bytes = 0
    return received, dense
