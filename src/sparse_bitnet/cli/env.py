# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet env`: what is installed, where it runs, which kernels are in use and why; `sparse-bitnet
models`: the presets and their sizes."""

import platform
from importlib.util import find_spec

from sparse_bitnet.cli.arguments import command
from sparse_bitnet.host import available_cores
from sparse_bitnet.provenance import versions

PACKAGES = (
    *("sparse-bitnet", "torch", "transformers", "tokenizers", "safetensors", "datasets"),
    *("accelerate", "numpy", "lm_eval", "triton"),
)


@command("env")
def main() -> None:
    """Print versions, devices and the kernels in use; attach the output to a bug report."""
    rows = dict.fromkeys(PACKAGES, "not installed") | versions(PACKAGES)
    rows["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    try:
        from sparse_bitnet import _cpu

        rows["engine"] = ", ".join(_cpu.supported_isas())  # the fastest first
    except ImportError as error:
        rows["engine"] = f"not built ({error})"
    rows["cpu"] = f"{available_cores()} cores"
    has_torch = find_spec("torch") is not None
    if has_torch:
        import torch

        from sparse_bitnet.training.device import cpu_has_fast_bf16

        bf16 = f"{'fast' if cpu_has_fast_bf16() else 'no fast'} bfloat16"
        capability = torch.backends.cpu.get_cpu_capability()
        rows["cpu"] += f", {torch.get_num_threads()} torch threads, {capability}, {bf16}"
        gpus = []
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            gpus.append(f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})")
        rows["gpu"] = ", ".join(gpus) or "none visible to torch"
    for name, value in rows.items():
        print(f"{name:<14} {value}")
    if not has_torch:
        print(
            "\nwithout torch: generate, chat, serve and bench run packed models on the CPU engine"
        )
        return
    print("\nkernels")
    from sparse_bitnet.ops.backends import status

    for kernel in status():
        in_use = "in use" if kernel.in_use else "not used"
        print(f"  {kernel.name:<12} {in_use:<9} {kernel.reason}")


@command("models")
def models() -> None:
    """List the model presets with their shapes and parameter counts."""
    from rich.console import Console
    from rich.table import Table

    from sparse_bitnet.presets import PRESETS

    # Without a frame, the table fits 80 columns without cutting names.
    table = Table(title="Model presets (Qwen2.5 family)", box=None, padding=(0, 1, 0, 0))
    table.add_column("preset")
    for column in ("hidden", "ffn", "layers", "heads", "kv", "vocabulary", "block weights"):
        table.add_column(column, justify="right")
    table.add_column("embedding", justify="right")
    for name, shape in PRESETS.items():
        sizes = [shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers]
        sizes += [shape.num_attention_heads, shape.num_key_value_heads]
        counts = (shape.vocab_size, shape.block_weights, shape.vocab_size * shape.hidden_size)
        table.add_row(name, *map(str, sizes), *(f"{count:,}" for count in counts))
    Console().print(table)
