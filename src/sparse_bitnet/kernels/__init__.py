"""Which kernels compute our ops, and why.

The op definitions and their references are in sparsity.py and quantizer.py; a kernel registers with
PyTorch's dispatcher for the device it runs on. SPARSE_BITNET_KERNEL chooses: "auto" (the default)
takes what there is, "reference" the plain PyTorch code, "cpu" the compiled kernels or an error.
"""

import importlib
import os
from typing import NamedTuple

from sparse_bitnet.errors import UserError

CHOICES = ("auto", "reference", "cpu")

_REMEDY = "reinstall sparse-bitnet where a C++ compiler (GCC or Clang) is available"


class KernelStatus(NamedTuple):
    """One line of `sparse-bitnet env`."""

    name: str
    in_use: bool
    reason: str


_cpu_status: KernelStatus | None = None


def load() -> None:
    """Register the kernels that SPARSE_BITNET_KERNEL asks for; does nothing the second time.

    The package calls it when its ops are first imported.

    Raises `UserError` when SPARSE_BITNET_KERNEL or SPARSE_BITNET_ISA asks for what this installation
    or this machine does not have.
    """
    global _cpu_status
    # Defines the ops; when this is their first import, it also calls this function.
    importlib.import_module("sparse_bitnet.quantizer")
    if _cpu_status is None:
        _cpu_status = _load_cpu(_choice())


def status() -> list[KernelStatus]:
    """Every kernel, whether it is in use, and the reason. Raises what `load` raises."""
    load()
    assert _cpu_status is not None
    return [
        KernelStatus(
            "reference",
            not _cpu_status.in_use,
            "plain PyTorch; also for the devices and dtypes no kernel covers",
        ),
        _cpu_status,
        KernelStatus("triton", False, "not part of this release"),
        KernelStatus("cusparselt", False, "not part of this release"),
    ]


def _choice() -> str:
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
