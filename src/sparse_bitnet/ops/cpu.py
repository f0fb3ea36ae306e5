# SPDX-License-Identifier: Apache-2.0
"""The compiled CPU kernels (`sparse_bitnet._cpu`, source in csrc/) as implementations of our ops.

Each returns what its reference returns, bit for bit, with any instruction set and number of threads.
Only `absmean` may differ from its reference, in the last bit, since it adds in another order; its result
is the same on every machine.
"""

import torch
from torch import Tensor

from sparse_bitnet import _cpu

_DTYPES = {torch.float32: _cpu.Dtype.float32, torch.bfloat16: _cpu.Dtype.bfloat16}


class Kernels:
    """Compiled kernels of one instruction set; the ops check the inputs first.

    Args:
        isa: a name that `env` lists, such as "avx2"; default: SPARSE_BITNET_ISA, else the best one.
        threads: number of threads; by default as many as PyTorch uses.

    Raises `ValueError`, listing what this machine has, for an instruction set it lacks.
    """

    def __init__(self, isa: str = "", threads: int | None = None) -> None:
        self._kernels = _cpu.Kernels.choose(isa)
        self.isa: str = self._kernels.isa
        self._threads = threads

    @property
    def threads(self) -> int:
        """Number of threads in use."""
        return self._threads or torch.get_num_threads()

    def nm_mask(self, weight: Tensor, n: int, m: int) -> Tensor:
        """See `ops.nm_mask`."""
        weight = weight.contiguous()
        mask, groups = torch.empty(weight.shape, dtype=torch.bool), weight.numel() // m
        where = (0, mask.data_ptr())  # no codes
        self._kernels.select_ternary(*_at(weight), 1.0, groups, n, m, *where, self.threads)
        return mask

    def absmean(self, weight: Tensor) -> Tensor:
        """See `ops.absmean`."""
        weight = weight.contiguous()
        mean = self._kernels.absmean(*_at(weight), weight.numel(), self.threads)
        return torch.tensor(mean, dtype=torch.float32)

    def select_ternary(
        self, weight: Tensor, weight_scale: Tensor, n: int, m: int
    ) -> tuple[Tensor, Tensor]:
        """Masked int8 codes and the bool mask, in one pass over the weights."""
        weight = weight.contiguous()
        codes = torch.empty(weight.shape, dtype=torch.int8)
        mask = torch.empty(weight.shape, dtype=torch.bool)
        where, groups = (codes.data_ptr(), mask.data_ptr()), weight.numel() // m
        scale = weight_scale.item()
        self._kernels.select_ternary(*_at(weight), scale, groups, n, m, *where, self.threads)
        return codes, mask

    def quantize_groups(self, weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """See `ops.quantize_groups`."""
        weight = weight.contiguous()
        codes = torch.empty(weight.shape, dtype=torch.int8)
        scale = torch.empty((*weight.shape[:-1], weight.shape[-1] // size), dtype=torch.float32)
        sizes, where = (scale.numel(), size), (codes.data_ptr(), scale.data_ptr())
        self._kernels.quantize_groups(*_at(weight), *sizes, *where, self.threads)
        return codes, scale

    def hadamard(self, x: Tensor, block: int) -> Tensor:
        """See `variants.built_in.hadamard`."""
        x = x.clone(memory_format=torch.contiguous_format)
        self._kernels.hadamard(x.data_ptr(), 0, 0, x.numel(), block)
        return x

    def quantize_int8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `ops.quantize_int8`."""
        x = x.contiguous()
        codes = torch.empty(x.shape, dtype=torch.int8)
        scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
        sizes, where = (scale.numel(), x.shape[-1]), (codes.data_ptr(), scale.data_ptr())
        self._kernels.quantize_int8(*_at(x), *sizes, *where, self.threads)
        return codes, scale


def _at(values: Tensor) -> tuple[int, _cpu.Dtype]:
    """Return address and type of contiguous values."""
    return values.data_ptr(), _DTYPES[values.dtype]
