# SPDX-License-Identifier: Apache-2.0
"""How an op gets its implementations, and which kernels are in use and why.

An op is defined by plain PyTorch, for every device, and may have a compiled kernel for CPUs and one for
CUDA. SPARSE_BITNET_KERNEL chooses: "auto" (the default) uses a kernel if there is one, "reference" the
plain PyTorch code, "cpu" the compiled kernels or an error, "triton" the CUDA kernels or an error.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sparse_bitnet.errors import UserError
from sparse_bitnet.pattern import MAX_GROUP

if TYPE_CHECKING:
    from sparse_bitnet.ops.cpu import Kernels

Op = TypeVar("Op", bound=Callable[..., Any])

CHOICES = ("auto", "reference", "cpu", "triton")
CPU_DTYPES = (torch.float32, torch.bfloat16)

# An implementation lives as long as the library object it was registered with. Registered by hand
# rather than through @custom_op, whose call costs three times as much.
_LIBRARY = torch.library.Library("sparse_bitnet", "FRAGMENT")


class KernelStatus(NamedTuple):
    """One line of `sparse-bitnet env`."""

    name: str
    in_use: bool
    reason: str


def choice_of_kernel() -> str:
    """Return what SPARSE_BITNET_KERNEL says. Raises `UserError` for an unknown name."""
    choice = os.environ.get("SPARSE_BITNET_KERNEL") or "auto"
    if choice not in CHOICES:
        raise UserError(f"SPARSE_BITNET_KERNEL={choice}: choose one of {', '.join(CHOICES)}")
    return choice


@cache
def cpu_kernels() -> "tuple[Kernels | None, str]":
    """Return the compiled kernels that the ops use (None: the references), and the reason.

    Raises `UserError` if this installation or machine does not have what SPARSE_BITNET_KERNEL or
    SPARSE_BITNET_ISA names.
    """
    choice = choice_of_kernel()
    if choice == "reference":
        return None, "SPARSE_BITNET_KERNEL=reference"
    try:
        from sparse_bitnet.ops.cpu import Kernels
    except ImportError as error:
        reason = (
            f"the extension sparse_bitnet._cpu cannot be imported ({error}); reinstall sparse-bitnet "
            "where a C++ compiler (GCC or Clang) is available"
        )
        if choice == "cpu":
            raise UserError(f"SPARSE_BITNET_KERNEL=cpu: {reason}") from error
        return None, reason
    try:
        kernels = Kernels()
    except ValueError as error:
        raise UserError(f"{error}; unset SPARSE_BITNET_ISA to use the best of them") from error
    from sparse_bitnet import _cpu

    refusal = _cpu.amx_refusal()
    without = f"; no amx_int8: {refusal}" if refusal else ""
    return kernels, f"{kernels.isa} instructions, {kernels.threads} threads{without}"


@cache
def triton_unavailable() -> str:
    """Return why the Triton kernels cannot run on this machine; "" if they can."""
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if torch.cuda.get_device_capability()[0] < 8:
        return "the kernels are for compute capability 8.0 and later"
    return ""


@cache
def cusparselt_unavailable() -> str:
    """Return why sparse 2:4 products cannot run on this machine; "" if they can."""
    if reason := triton_unavailable():
        return reason
    there = torch.backends.cusparselt.is_available()
    return "" if there else "this PyTorch is built without cuSPARSELt"


def check_choice() -> None:
    """Raise `UserError` if SPARSE_BITNET_KERNEL is unknown or cannot be honoured on this machine."""
    cpu_kernels()
    if choice_of_kernel() == "triton" and (reason := triton_unavailable()):
        raise UserError(f"SPARSE_BITNET_KERNEL=triton: {reason}")


def status() -> list[KernelStatus]:
    """Return every kernel, whether it is in use, and the reason. Raises what `check_choice` raises."""
    check_choice()
    kernels, reason = cpu_kernels()
    plain = "plain PyTorch; also for the devices and dtypes no kernel covers"
    rows = [
        KernelStatus("reference", kernels is None, plain),
        KernelStatus("cpu", kernels is not None, reason),
    ]
    for name, unavailable, use in (
        ("triton", triton_unavailable, "selection, quantisation and products on CUDA tensors"),
        ("cusparselt", cusparselt_unavailable, "sparse tensor cores, in `bench gpu`"),
    ):
        why = reason if choice_of_kernel() == "reference" else unavailable()
        rows.append(KernelStatus(name, not why, why or use))
    return rows


def define(
    schema: str,
    reference: Op,
    *,
    fake: Callable[..., Any] | None = None,
    takes: Callable[..., bool] = lambda *arguments: True,
    cuda: Callable[..., Any] | None = None,
    cuda_unavailable: Callable[[], str] = triton_unavailable,
) -> Op:
    """Register an op `torch.ops.sparse_bitnet.NAME` with all its implementations.

    Args:
        schema: name, arguments and results, as torch writes them.
        reference: plain PyTorch for every device; it defines what kernels return.
        fake: shapes and dtypes of the results, for `torch.compile`; by default those of the reference.
        takes: whether kernels support these arguments; the reference computes the others.
        cuda: the kernel for CUDA tensors; default: the function with the op's name in `ops.triton`.
        cuda_unavailable: returns why that kernel cannot run here, "" if it can.

    If the compiled kernels have a method with the op's name, it is the kernel for CPUs. Returns the op.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"sparse_bitnet::{name}", fake, lib=_LIBRARY)
    if (on_cpu := getattr(cpu_kernels()[0], name, None)) is not None:

        def cpu_op(*arguments: Any) -> Any:
            fits = arguments[0].dtype in CPU_DTYPES and takes(*arguments)
            return (on_cpu if fits else reference)(*arguments)

        _LIBRARY.impl(name, cpu_op, "CPU")
    if torch.version.cuda is not None and choice_of_kernel() != "reference":

        def cuda_op(*arguments: Any) -> Any:
            if cuda_unavailable() or not takes(*arguments):
                return reference(*arguments)
            # The module imports ops, so it comes last.
            triton = importlib.import_module(f"{__package__}.triton")
            on_cuda: Any = cuda or getattr(triton, name, reference)
            # Kernels are launched on the current device.
            with torch.cuda.device(arguments[0].device):
                return on_cuda(*arguments)

        _LIBRARY.impl(name, cuda_op, "CUDA")
    return getattr(torch.ops.sparse_bitnet, name)


def takes_values(tensor: Tensor, size: int = 1) -> bool:
    """Whether kernels support this tensor in runs of `size` along a row; references support all."""
    fits = tensor.dtype in (*CPU_DTYPES, torch.float16) and tensor.dim() > 0 and tensor.numel() > 0
    return fits and size > 0 and tensor.shape[-1] % size == 0


def takes_groups(weight: Tensor, n: int, m: int) -> bool:
    """Whether kernels support this weight with this pattern."""
    return 1 <= n <= m <= MAX_GROUP and takes_values(weight, m)


check_choice()
