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
    rows = {}
    for name in PACKAGES:
        try:
            rows[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            rows[name] = "not installed"
    rows["python"] = platform.python_version()
    rows["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    try:
        from sparse_bitnet import _cpu

        rows["engine"] = ", ".join(_cpu.supported_isas())  # the fastest first
    except ImportError as error:
        rows["engine"] = f"not built ({error})"
    rows["cpu"] = f"{available_cores()} cores"
    has_torch = find_spec("torch") is not None
    if has_torch:
        rows |= _torch_devices()
    for name, value in rows.items():
        print(f"{name:<14} {value}")
    if not has_torch:
        print("\nwithout torch packed models run on the CPU engine: generate, chat, serve, bench")
        return
    print("\nkernels")
    from sparse_bitnet.ops.backends import status

    for kernel in status():
        in_use = "in use" if kernel.in_use else "not used"
        print(f"  {kernel.name:<12} {in_use:<9} {kernel.reason}")


def _torch_devices() -> dict[str, str]:
    import torch

    from sparse_bitnet.training.device import cpu_has_fast_bf16

    gpus = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        gpus.append(f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})")
    return {
        "cpu": f"{available_cores()} cores, {torch.get_num_threads()} torch threads, "
        f"{torch.backends.cpu.get_cpu_capability()}, "
        f"{'fast' if cpu_has_fast_bf16() else 'no fast'} bfloat16",
        "gpu": ", ".join(gpus) or "none visible to torch",
    }
