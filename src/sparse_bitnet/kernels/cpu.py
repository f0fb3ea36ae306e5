"""The compiled CPU kernels (`sparse_bitnet._cpu`, source in csrc/) as implementations of our ops.

Each returns what its reference returns, bit for bit, whatever the instruction set and the number of
threads. Only `absmean` may differ from its reference, in the last bit, since it adds in another order;
it is the same on every machine.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparse_bitnet import _cpu
from sparse_bitnet.sparsity import MAX_GROUP

_DTYPES = {torch.float32: _cpu.FLOAT32, torch.bfloat16: _cpu.BFLOAT16}

# Below, weight_scale / 2 need not be a float32 and the kernel's comparison would not be exact.
_SMALLEST_SCALE = 2.0**-125


class Kernels:
    """The ops on the kernels of one instruction set, for inputs that `supports_*` below accepts.

    Args:
        isa: "generic", "avx2" or "avx512"; by default what SPARSE_BITNET_ISA names, or the best.
        threads: how many threads to use; by default as many as PyTorch does.

    Raises `ValueError`, listing what this machine has, for an instruction set it lacks.
    """

    def __init__(self, isa: str = "", threads: int | None = None) -> None:
        self._kernels = _cpu.Kernels.choose(isa)
        self._threads = threads

    @property
    def isa(self) -> str:
        return self._kernels.isa

    @property
    def threads(self) -> int:
        return self._threads or torch.get_num_threads()

    def nm_mask(self, weight: Tensor, n: int, m: int) -> Tensor:
        """See `sparsity.nm_mask`."""
        weight = weight.contiguous()
        mask = torch.empty(weight.shape, dtype=torch.bool)
        self._kernels.nm_mask(
            weight.data_ptr(),
            _DTYPES[weight.dtype],
            weight.numel() // m,
            n,
            m,
            mask.data_ptr(),
            self.threads,
        )
        return mask

    def absmean(self, weight: Tensor) -> Tensor:
        """See `quantizer.absmean`."""
        weight = weight.contiguous()
        mean = self._kernels.absmean(
            weight.data_ptr(), _DTYPES[weight.dtype], weight.numel(), self.threads
        )
        return torch.tensor(mean, dtype=torch.float32)

    def select_ternary(
        self, weight: Tensor, weight_scale: Tensor, n: int, m: int
    ) -> tuple[Tensor, Tensor]:
        """Masked int8 codes and the bool mask, in one pass over the weights."""
        weight = weight.contiguous()
        codes = torch.empty(weight.shape, dtype=torch.int8)
        mask = torch.empty(weight.shape, dtype=torch.bool)
        self._kernels.select_ternary(
            weight.data_ptr(),
            _DTYPES[weight.dtype],
            weight_scale.item(),
            weight.numel() // m,
            n,
            m,
            codes.data_ptr(),
            mask.data_ptr(),
            self.threads,
        )
        return codes, mask

    def quantize_int8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `quantizer.quantize_int8`."""
        x = x.contiguous()
        codes = torch.empty(x.shape, dtype=torch.int8)
        activation_scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
        self._kernels.quantize_int8(
            x.data_ptr(),
            _DTYPES[x.dtype],
            activation_scale.numel(),
            x.shape[-1],
            codes.data_ptr(),
            activation_scale.data_ptr(),
            self.threads,
        )
        return codes, activation_scale


def supports(tensor: Tensor) -> bool:
    """Whether the kernels take this tensor; the references take all."""
    return tensor.dtype in _DTYPES and tensor.dim() > 0 and tensor.numel() > 0


def supports_groups(weight: Tensor, n: int, m: int) -> bool:
    """The same for a weight and a pattern."""
    return supports(weight) and 1 <= n <= m <= MAX_GROUP and weight.shape[-1] % m == 0


def supports_select(weight: Tensor, weight_scale: Tensor, n: int, m: int) -> bool:
    """The same for a weight, its scale and a pattern."""
    if weight_scale.device.type != "cpu" or weight_scale.dtype != torch.float32:
        return False
    if weight_scale.dim() > 0 or not weight_scale.item() >= _SMALLEST_SCALE:
        return False
    return supports_groups(weight, n, m)


def register() -> Kernels:
    """Make the kernels the CPU implementation of our ops, for the rest of the process.

    Raises `ValueError` when SPARSE_BITNET_ISA names an instruction set this machine lacks.
    """
    # Imported here, because importing quantizer is what loads the kernels.
    from sparse_bitnet import quantizer, sparsity

    kernels = Kernels()
    table: tuple[tuple[str, Callable[..., bool], Callable[..., Any]], ...] = (
        ("nm_mask", supports_groups, sparsity.nm_mask_reference),
        ("absmean", supports, quantizer.absmean_reference),
        ("select_ternary", supports_select, quantizer.select_ternary_reference),
        ("quantize_int8", supports, quantizer.quantize_int8_reference),
    )
    for op, supported, reference in table:
        _LIBRARY.impl(op, _or_reference(getattr(kernels, op), supported, reference), "CPU")
    return kernels


# An implementation lives as long as the library object it was registered with.
_LIBRARY = torch.library.Library("sparse_bitnet", "IMPL")


def _or_reference(
    kernel: Callable[..., Any], supported: Callable[..., bool], reference: Callable[..., Any]
) -> Callable[..., Any]:
    def op(*arguments: Any) -> Any:
        return (kernel if supported(*arguments) else reference)(*arguments)

    return op
