# SPDX-License-Identifier: Apache-2.0
"""A SparseBitLinear whose weight is split by rows over processes, and the all-gather between them.

The all-gather extension of PyTorch's `fully_shard` (a tensor subclass with `fsdp_pre_all_gather` and
`fsdp_post_all_gather`) lets a ternary layer send packed codes, 2 bits per weight, instead of its
weights. A layer with full precision, several scales per matrix or a schedule that blends sends effective
weights in the compute type. Groups of the N:M pattern lie along rows and rows stay whole, so mask and
codes are computed where the master rows are; only the ternary scale needs all shards. `selected_shards`
computes it for all layers with one sum per step.

The gathered parameter has no values: autograd needs its shape and type alone, since the straight-through
products read the codes and return the gradient of the effective weight.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from sparse_bitnet.nn import selection as selections
from sparse_bitnet.nn.convert import selected, sparse_layers
from sparse_bitnet.nn.layer import SparseBitLinear
from sparse_bitnet.nn.selection import Selection
from sparse_bitnet.nn.straight_through import straight_through, ternary_int8_linear
from sparse_bitnet.ops.nm_mask import nm_mask
from sparse_bitnet.ops.select_ternary import abs_sum, mean_to_scale
from sparse_bitnet.packing.two_bits import pack_codes, unpack_codes
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.variants.registry import Matrix

Reduce = Callable[[Tensor], Tensor]
"""A function that sums a tensor over the processes that hold the shards of one model."""


class ShardedSparseBitLinear(SparseBitLinear):
    """A `SparseBitLinear` that selects on this process's rows and multiplies with all rows.

    `mask`, its flips and the codes are those of the own rows. Forwards are possible only inside
    `selected_shards`. Made from a whole layer by `prepare_linears_`.
    """

    compute_dtype: torch.dtype
    shared_scale: Tensor | None
    packed: Tensor | None
    gathered: Tensor | None
    """Codes or weights [out_features, width] of all processes, once gathered."""
    reduce: Reduce

    @property
    def rows(self) -> Tensor:
        """The `local_rows` of the master weight."""
        return local_rows(self.weight)

    @torch.no_grad()
    def scale_parts(self) -> Tensor:
        """Return float64 [2] of the own rows: sum and count of the magnitudes whose mean is the scale."""
        rows = self.rows
        if self.config.scale_source == "masked" and not self.dense_phase:
            n, m = self.config.pattern.n, self.config.pattern.m
            rows = rows * nm_mask(rows, NMPattern(self.kept or n, m))
        count = torch.tensor(float(rows.numel()), dtype=torch.float64, device=rows.device)
        return torch.stack([abs_sum(rows), count])

    def _source(self) -> tuple[Tensor, Tensor | None]:
        """Return the own rows, and the scale of the whole matrix."""
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

    @torch.no_grad()
    def select_(self) -> None:
        super().select_()
        codes, scale = self.selection.codes, self.selection.weight_scale
        self.packed = None
        # Without a single scale, or if the run ever blends, effective weights are always sent.
        if codes is not None and scale is not None and scale.dim() == 0:
            blends = self.config.variant("schedule").blends
            self.packed = None if blends else pack_codes(codes)

    def release_(self) -> None:
        super().release_()
        self.packed = None

    @property
    def is_selected(self) -> bool:
        # The parameter is another object while it is gathered: compare only the optimiser's steps.
        made_for = self._made_for
        return bool(self.current and made_for and made_for[2] == selections.optimizer_steps)

    @property
    def selection(self) -> Selection:
        """The step's selection of the own rows; forwards and gathers need one."""
        assert self.current is not None, "used outside selected_shards"
        return self.current

    def forward(self, input: Tensor) -> Tensor:
        gathered, scale = self.gathered, self.selection.weight_scale
        assert gathered is not None, "forward before a gather"
        x = self._transformed(input)
        if self.packed is None or scale is None or self.config.activation == "none":
            value = gathered
            if self.packed is not None and scale is not None:
                value = (unpack_codes(gathered, self.in_features) * scale).to(self.weight.dtype)
            x = self.inputs.fake_quantize(x, self.selection.blend)
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
        """Zero the reduced gradient of the own rows at positions to which the config gives none.

        The mask is the same for all processes and micro-batches, so it can be applied to their sum.
        """
        kept, gradient = self._gradient_mask(self.selection, self.rows), self._own_gradient()
        if kept is not None and gradient is not None:
            gradient.mul_(kept)


class RowShard(Tensor):
    """Rows of a layer's master weight; `fully_shard` gathers their codes instead."""

    rows: Tensor
    layer: ShardedSparseBitLinear

    @staticmethod
    def __new__(cls, rows: Tensor, layer: ShardedSparseBitLinear) -> "RowShard":
        return Tensor._make_wrapper_subclass(
            cls,
            rows.size(),
            strides=rows.stride(),
            storage_offset=rows.storage_offset(),
            dtype=rows.dtype,
            device=rows.device,
        )

    def __init__(self, rows: Tensor, layer: ShardedSparseBitLinear) -> None:
        self.rows, self.layer = rows, layer

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        layer: list[ShardedSparseBitLinear] = []

        def unwrap(shard: RowShard) -> Tensor:
            layer.append(shard.layer)
            return shard.rows

        plain_args, plain_kwargs = tree_map_only(RowShard, unwrap, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        # `fully_shard` and autograd use these to cut and hold shards; any other op returns plain tensors.
        if func in _KEEPING:
            return tree_map_only(Tensor, lambda part: cls(part, layer[0]), result)
        return result

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """Return the one tensor that `fully_shard` gathers, and no metadata.

        With its longer signature `fully_shard` requires a tensor of the padded weight's own shape if
        rows do not divide evenly; this one leaves the shape to us.
        """
        layer, shards = self.layer, mesh.size()
        part = layer.packed  # codes, or effective weights
        if part is None:
            part = layer.selection.effective(layer.rows).to(layer.compute_dtype)
        # All shards are padded to the longest; the padding is cut off after the gather.
        part = F.pad(part, (0, 0, 0, -(-layer.out_features // shards) - part.shape[0]))
        return (part.contiguous(),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Give the gathered tensor to the layer; return the parameter that stands for it."""
        layer = self.layer
        (gathered,) = all_gather_outputs
        layer.gathered = gathered[: layer.out_features]
        if out is not None:
            return None
        size = torch.Size((layer.out_features, layer.in_features))
        return GatheredWeight(size, param_dtype, gathered.device), ()


_KEEPING = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.copy_.default,
}


class GatheredWeight(Tensor):
    """Shape and type of a whole weight, for `fully_shard`. Its values are one repeated number, to which
    autograd attaches gradients and which a compiler can trace."""

    @staticmethod
    def __new__(
        cls, size: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> "GatheredWeight":
        return Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.as_strided.default:
            raise NotImplementedError(f"{func}: a gathered weight has no values to compute with")
        return torch.zeros((), dtype=args[0].dtype, device=args[0].device).expand(args[1])


def local_rows(tensor: Tensor) -> Tensor:
    """Return this process's rows of a parameter or optimiser state, a tensor that shares its memory."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.rows if isinstance(local, RowShard) else local.detach()


def prepare_linears_(module: nn.Module, compute_dtype: torch.dtype) -> None:
    """Turn every `SparseBitLinear` of `module` into one that `fully_shard`, which must follow, can split.

    Full-precision weights are sent and multiplied in `compute_dtype`, unless theirs is shorter.
    """
    for layer in sparse_layers(module).values():
        layer.__class__ = ShardedSparseBitLinear
        sharded = cast(ShardedSparseBitLinear, layer)
        sharded.compute_dtype = min(compute_dtype, layer.weight.dtype, key=lambda t: t.itemsize)
        sharded.shared_scale = sharded.packed = sharded.gathered = None
        shard = RowShard(layer.weight.detach(), sharded)
        sharded.weight = nn.Parameter(shard, requires_grad=layer.weight.requires_grad)


def sharded(layers: Iterable[SparseBitLinear]) -> list[ShardedSparseBitLinear]:
    """Return the sharded layers among a model's layers, in their order."""
    return [layer for layer in layers if isinstance(layer, ShardedSparseBitLinear)]


@contextmanager
def selected_shards(
    layers: Collection[SparseBitLinear], reduce: Reduce, reduce_inputs: Reduce | None = None
) -> Iterator[None]:
    """`selected` for a model that may be sharded: then every process selects on its rows, with one
    common scale.

    The sums and counts of all layers are reduced together, once, in float64, so that shards of any size
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
        with selected(layers, reduce_inputs):
            yield
    finally:
        for layer in scaled:
            layer.shared_scale = None
