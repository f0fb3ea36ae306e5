# SPDX-License-Identifier: Apache-2.0
"""Tensors that are computed when they are written: an export needs the memory of one layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.tensor_file import TensorFileWriter, TensorSpec
from sparse_bitnet.progress import OnProgress

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class DeferredTensors:
    """Tensors that come out of one computation, for example packed codes and their scale."""

    specs: tuple[TensorSpec, ...]
    make: "Callable[[], Sequence[Tensor]]"
    """Returns tensors in the order and of the types and shapes of `specs`."""


def deferred(
    name: str, dtype: "torch.dtype", shape: tuple[int, ...], read: Callable[[], Any]
) -> DeferredTensors:
    """One tensor: what `read` returns, a tensor or an array, cast to `dtype`. Making it raises
    `UserError` for values that the type cannot hold."""

    def make() -> "Sequence[Tensor]":
        import torch

        values = torch.as_tensor(read()).to(dtype)
        if not values.isfinite().all():
            raise UserError(f"{name} has values beyond {dtype}; use --embeddings bf16 or f32")
        return (values,)

    return DeferredTensors((TensorSpec(name, dtype, shape),), make)


def write_safetensors(
    path: Path, groups: Sequence[DeferredTensors], on_progress: OnProgress | None = None
) -> None:
    """Write one safetensors file, holding one group in memory at a time.

    Raises `OSError` when the disk is full; the caller's folder is temporary.
    """
    specs = [spec for group in groups for spec in group.specs]
    done, total = 0, sum(spec.nbytes for spec in specs)
    with TensorFileWriter(path, specs, {"kind": "export"}) as file:
        for group in groups:
            for spec, tensor in zip(group.specs, group.make(), strict=True):
                assert tuple(tensor.shape) == spec.shape, (spec, tensor.shape)
                file.write(spec.name, [tensor])
                done += spec.nbytes
                if on_progress is not None:
                    on_progress(done, total)
