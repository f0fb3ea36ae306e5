"""Which kernels compute our ops, and why.

The op definitions and their references are in sparsity.py and quantizer.py; a kernel registers with
PyTorch's dispatcher for the device it runs on. SPARSE_BITNET_KERNEL chooses: "auto" (the default)
takes what there is, "reference" the plain PyTorch code, "cpu" the compiled kernels or an error,
"triton" the CUDA kernels or an error, "cusparselt" these and sparse tensor cores for every pattern
that maps to 2:4, or an error. What is not asked for is chosen as by "auto".
"""

import functools
import importlib
import os
from typing import NamedTuple

from sparse_bitnet.errors import UserError

CHOICES = ("auto", "reference", "cpu", "triton", "cusparselt")

_REMEDY = "reinstall sparse-bitnet where a C++ compiler (GCC or Clang) is available"


class KernelStatus(NamedTuple):
    """One line of `sparse-bitnet env`."""

    name: str
    in_use: bool
    reason: str


_cpu_status: KernelStatus | None = None
_triton_status: KernelStatus | None = None


def load() -> None:
    """Register the kernels that SPARSE_BITNET_KERNEL asks for; does nothing the second time.

    The package calls it when its ops are first imported.

    Raises `UserError` when SPARSE_BITNET_KERNEL or SPARSE_BITNET_ISA asks for what this installation
    or this machine does not have.
    """
    global _cpu_status, _triton_status
    # Defines the ops; when this is their first import, it also calls this function.
    importlib.import_module("sparse_bitnet.quantizer")
    if _cpu_status is None:
        choice = choice_of_kernel()
        statuses = _load_triton(choice), _load_cpu(choice)
        _triton_status, _cpu_status = statuses


@functools.cache
def load_products() -> None:
    """Register the ops of inference (int8_linear.py, fused_inputs.py) and their CUDA kernels.

    Raises what `load` raises, and `UserError` when SPARSE_BITNET_KERNEL=cusparselt cannot be honoured.
    """
    load()
    importlib.import_module("sparse_bitnet.kernels.fused_inputs")
    assert _triton_status is not None
    if _triton_status.in_use:
        importlib.import_module("sparse_bitnet.kernels.triton").register_products()
        if _cusparselt_status().in_use:
            importlib.import_module("sparse_bitnet.kernels.cusparselt").register()


def status() -> list[KernelStatus]:
    """Every kernel, whether it is in use, and the reason. Raises what `load` raises."""
    load()
    assert _cpu_status is not None
    assert _triton_status is not None
    return [
        KernelStatus(
            "reference",
            not _cpu_status.in_use,
            "plain PyTorch; also for the devices and dtypes no kernel covers",
        ),
        _cpu_status,
        _triton_status,
        _cusparselt_status(),
    ]


def choice_of_kernel() -> str:
    """What SPARSE_BITNET_KERNEL says, "auto" by default. Raises `UserError` for an unknown name."""
    choice = os.environ.get("SPARSE_BITNET_KERNEL") or "auto"
    if choice not in CHOICES:
        raise UserError(f"SPARSE_BITNET_KERNEL={choice}: choose one of {', '.join(CHOICES)}")
    return choice


def _load_cpu(choice: str) -> KernelStatus:
    if choice == "reference":
        return KernelStatus("cpu", False, "SPARSE_BITNET_KERNEL=reference")
    try:
        cpu = importlib.import_module("sparse_bitnet.kernels.cpu")
    except ImportError as error:
        reason = f"the extension sparse_bitnet._cpu cannot be imported ({error})"
        if choice == "cpu":
            raise UserError(f"SPARSE_BITNET_KERNEL=cpu: {reason}; {_REMEDY}") from error
        return KernelStatus("cpu", False, f"{reason}; {_REMEDY}")
    try:
        kernels = cpu.register()
    except ValueError as error:
        raise UserError(f"{error}; unset SPARSE_BITNET_ISA to use the best of them") from error
    return KernelStatus("cpu", True, f"{kernels.isa} instructions, {kernels.threads} threads")


def _load_triton(choice: str) -> KernelStatus:
    if choice == "reference":
        return KernelStatus("triton", False, "SPARSE_BITNET_KERNEL=reference")
    kernels = importlib.import_module("sparse_bitnet.kernels.triton")
    if reason := kernels.unavailable():
        if choice in ("triton", "cusparselt"):
            raise UserError(f"SPARSE_BITNET_KERNEL={choice}: {reason}")
        return KernelStatus("triton", False, reason)
    sparse = _cusparselt_status()
    if choice == "cusparselt" and not sparse.in_use:
        raise UserError(f"SPARSE_BITNET_KERNEL=cusparselt: {sparse.reason}")
    kernels.register()
    importlib.import_module("sparse_bitnet.kernels.cublaslt").register()
    return KernelStatus("triton", True, "selection and quantisation on CUDA tensors")


def _cusparselt_status() -> KernelStatus:
    choice = choice_of_kernel()
    if choice == "reference":
        return KernelStatus("cusparselt", False, "SPARSE_BITNET_KERNEL=reference")
    reason = importlib.import_module("sparse_bitnet.kernels.cusparselt").unavailable()
    if reason:
        return KernelStatus("cusparselt", False, reason)
    how = "always" if choice == "cusparselt" else "where measured faster than dense"
    return KernelStatus("cusparselt", True, f"sparse tensor cores, {how}")
