# SPDX-License-Identifier: Apache-2.0
"""Tensors by which `fully_shard` gathers something else than the rows that it splits.

The gathered parameter has no values: autograd needs its shape and type alone, since the straight-through
products read the codes and return the gradient of the effective weight.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only


class Gatherable(Protocol):
    """A layer that says what is gathered of it."""

    in_features: int
    out_features: int
    gathered: Tensor | None
    """[out_features, width], of all processes, once it is there."""
    gathered_bytes: int

    def bytes_to_send(self) -> Tensor:
        """[rows, width] of this process."""
        ...


class RowShard(Tensor):
    """Rows of a layer's master weight, which tell `fully_shard` what to gather instead of them."""

    rows: Tensor
    layer: Gatherable

    @staticmethod
    def __new__(cls, rows: Tensor, layer: Gatherable) -> "RowShard":
        return Tensor._make_wrapper_subclass(
            cls,
            rows.size(),
            strides=rows.stride(),
            storage_offset=rows.storage_offset(),
            dtype=rows.dtype,
            device=rows.device,
        )

    def __init__(self, rows: Tensor, layer: Gatherable) -> None:
        self.rows, self.layer = rows, layer

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        layer: list[Gatherable] = []

        def unwrap(shard: RowShard) -> Tensor:
            layer.append(shard.layer)
            return shard.rows

        plain_args, plain_kwargs = tree_map_only(RowShard, unwrap, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        # By these `fully_shard` and autograd cut and hold shards; all else gives plain tensors.
        if func in _KEEPING:
            return tree_map_only(Tensor, lambda part: cls(part, layer[0]), result)
        return result

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.rows})"

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], None]:
        """What `fully_shard` is to gather, and nothing beside it."""
        return self._to_send(mesh), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Hands what was gathered to the layer; returns the parameter that stands for it."""
        layer = self.layer
        (gathered,) = all_gather_outputs
        layer.gathered = gathered[: layer.out_features]
        if out is not None:
            return None
        size = torch.Size((layer.out_features, layer.in_features))
        return GatheredWeight(size, param_dtype, gathered.device), ()

    def _to_send(self, mesh: Any) -> tuple[Tensor, ...]:
        layer, shards = self.layer, mesh.size()
        part = layer.bytes_to_send()
        # All shards are sent as long as the longest; the surplus is cut off after the gather.
        part = F.pad(part, (0, 0, 0, -(-layer.out_features // shards) - part.shape[0]))
        layer.gathered_bytes += part.nbytes * (shards - 1)
        return (part.contiguous(),)


class UnevenRowShard(RowShard):
    """Of a weight whose rows do not divide evenly.

    With the longer signature `fully_shard` insists on a tensor of the padded weight's own shape,
    which packed codes have not; the shorter one leaves the shape to us.
    """

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """As of `RowShard`."""
        return self._to_send(mesh), None


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
    """Shape and type of a whole weight, for `fully_shard`, which strides it as the parameter: that is one
    number, repeated, to which autograd attaches gradients and which a compiler can trace."""

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
    """This process's rows of a parameter or optimiser state, a plain tensor that shares its memory."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.rows if isinstance(local, RowShard) else local.detach()
