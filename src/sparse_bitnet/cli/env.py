# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet env`: what is installed, where it runs, which kernels are in use and why; `sparse-bitnet
models`: the presets and their sizes, and public models that are read."""

import platform
from importlib.util import find_spec

from sparse_bitnet.cli.arguments import command
from sparse_bitnet.host import available_cores
from sparse_bitnet.provenance import versions

PACKAGES = (
    *("sparse-bitnet", "torch", "transformers", "tokenizers", "safetensors", "datasets"),
    *("accelerate", "numpy", "lm_eval", "triton"),
)

_KNOWN = """\
microsoft/bitnet-b1.58-2B-4T|2.4 B|MIT|uint8 packed|exact
microsoft/bitnet-b1.58-2B-4T-bf16|2.4 B|MIT|bfloat16 masters|quantised once
microsoft/bitnet-b1.58-2B-4T-gguf|2.4 B|MIT|GGUF I2_S|exact
tiiuae/Falcon-E-1B-*, -3B-*|1.8, 3.1 B|Falcon|uint8 packed, inverse scale|exact
tiiuae/Falcon-E-*@bfloat16|1.8, 3.1 B|Falcon|floats, one scale|exact
tiiuae/Falcon-E-*-GGUF|1.8, 3.1 B|Falcon|GGUF I2_S|exact
tiiuae/Falcon3-*-1.58bit|1 to 10 B|Falcon|uint8 packed, inverse scale|exact
HF1BitLLM/Llama3-8B-1.58-*|8 B|see the hub|uint8 packed|exact
Ternary-Bonsai|1.7 to 8 B|Apache 2.0|GGUF Q2_0, MLX 2-bit, floats|exact
Ternary-Bonsai-27B|27 B|Apache 2.0|GGUF Q2_0, MLX 2-bit (Qwen3.5)|exact
Ternary-Bonsai-2|2 to 27 B|see the hub|GGUF PQ2_0, PTQ1_0, MLX 2-bit, rotated|exact, packed only
1bitLLM/bitnet_b1_58-*|0.7 to 3 B|see the hub|float masters, norms before o, down|quantised once
microsoft/BitNet-embedding-0.6B, -270M|0.6, 0.27 B|MIT|bfloat16 masters, norms in linears|quantised once
microsoft/BitNet-embedding-*-GGUF|0.6, 0.27 B|MIT|GGUF I2_S, norms in linears|exact
tencent/Hy-MT1.5-1.8B-1.25bit-GGUF|1.8 B|see the hub|GGUF STQ1_0|exact
BitCPM-CANN|0.5 to 8 B|Apache 2.0|floats, scales of groups|weights; not MiniCPM4
SpectraSuite/TriLM_*|0.1 to 3.9 B|see the hub|floats, scales of parts|exact
"""
"""Name, parameters, licence, layout, and how codes and scales are read."""


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
def models(*, known: bool = False) -> None:
    """List the model presets with their shapes and parameter counts.

    Args:
        known: List public ternary models that sparse-bitnet reads, instead of presets.
    """
    from rich.console import Console
    from rich.table import Table

    from sparse_bitnet.presets import PRESETS

    if known:
        caption = "Tested on files in each layout that our tests write, not on the released models."
        public = Table(
            title="Public ternary models", caption=caption, box=None, padding=(0, 1, 0, 0)
        )
        for column in ("model", "size", "licence", "layout", "weights read"):
            public.add_column(column, no_wrap=column == "model")
        for line in _KNOWN.splitlines():
            public.add_row(*line.split("|"))
        Console().print(public)
        return
    # Without a frame it fits 80 columns, where names would else be cut.
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
