# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet env`: what is installed, where it runs, which kernels are in use and why."""

import platform
from importlib import metadata
from importlib.util import find_spec

from sparse_bitnet.cli.arguments import command
from sparse_bitnet.host import available_cores

PACKAGES = (
    *("sparse-bitnet", "torch", "transformers", "tokenizers", "safetensors", "datasets"),
    *("accelerate", "numpy", "lm_eval", "triton"),
)


@command("env")
def main() -> None:
    """Print versions, devices and kernels; attach it to a bug report."""
    for name, value in environment().items():
        print(f"{name:<14} {value}")
    if find_spec("torch") is None:
        print("\nwithout torch packed models run on the CPU engine: generate, chat, serve, bench")
        return
    print("\nkernels")
    from sparse_bitnet.ops.backends import status

    for kernel in status():
        in_use = "in use" if kernel.in_use else "not used"
        print(f"  {kernel.name:<12} {in_use:<9} {kernel.reason}")


def environment() -> dict[str, str]:
    """Versions and devices, for reports and result files."""
    rows = {name: _version(name) for name in PACKAGES}
    rows["python"] = platform.python_version()
    rows["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    rows["engine"] = _engine()
    if find_spec("torch") is None:
        rows["cpu"] = f"{available_cores()} cores"
        return rows
    import torch

    from sparse_bitnet.training.device import cpu_has_fast_bf16

    rows["cpu"] = (
        f"{available_cores()} cores, {torch.get_num_threads()} torch threads, "
        f"{torch.backends.cpu.get_cpu_capability()}, "
        f"{'fast' if cpu_has_fast_bf16() else 'no fast'} bfloat16"
    )
    if torch.cuda.is_available():
        rows["gpu"] = ", ".join(_gpu(index) for index in range(torch.cuda.device_count()))
    else:
        rows["gpu"] = "none visible to torch"
    return rows


def _engine() -> str:
    """The instruction sets of the CPU engine here, the fastest first."""
    try:
        from sparse_bitnet import _cpu
    except ImportError as error:
        return f"not built ({error})"
    return ", ".join(_cpu.supported_isas())


def _gpu(index: int) -> str:
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
