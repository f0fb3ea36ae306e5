# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet models`: the presets and their sizes, and public models that are read."""

from sparse_bitnet.cli.arguments import command

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
1bitLLM/bitnet_b1_58-*|0.7 to 3 B|see the hub|float masters, norms before o, down|quantised once
microsoft/BitNet-embedding-0.6B, -270M|0.6, 0.27 B|MIT|bfloat16 masters, norms in linears|quantised once
microsoft/BitNet-embedding-*-GGUF|0.6, 0.27 B|MIT|GGUF I2_S, norms in linears|exact
tencent/Hy-MT1.5-1.8B-1.25bit-GGUF|1.8 B|see the hub|GGUF STQ1_0|exact
BitCPM-CANN|0.5 to 8 B|Apache 2.0|floats, scales of groups|weights; not MiniCPM4
SpectraSuite/TriLM_*|0.1 to 3.9 B|see the hub|floats, scales of parts|exact
"""
"""Name, parameters, licence, layout, and how codes and scales are read."""


@command("models")
def main(*, known: bool = False) -> None:
    """Presets with their shapes and parameter counts.

    Args:
        known: public ternary models whose layouts are read, instead.
    """
    from rich.console import Console
    from rich.table import Table

    from sparse_bitnet.presets import PRESETS

    if known:
        caption = "Checked with files that the tests make in each layout, not with the releases."
        public = Table(title="Public models", caption=caption, box=None, padding=(0, 1, 0, 0))
        for column in ("model", "weights", "licence", "layout", "read"):
            public.add_column(column, no_wrap=column == "model")
        for line in _KNOWN.splitlines():
            public.add_row(*line.split("|"))
        Console().print(public)
        return
    # Without a frame it fits 80 columns, where names would else be cut.
    table = Table(title="Model presets (Qwen2.5 family)", box=None, padding=(0, 1, 0, 0))
    for column in ("preset", "hidden", "ffn", "layers", "heads", "kv", "vocabulary"):
        table.add_column(column, justify="left" if column == "preset" else "right")
    table.add_column("block weights", justify="right")
    table.add_column("embedding", justify="right")
    for name, shape in PRESETS.items():
        heads = (shape.num_attention_heads, shape.num_key_value_heads)
        sizes = (shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers, *heads)
        embedding = shape.vocab_size * shape.hidden_size
        counts = (shape.vocab_size, shape.block_weights, embedding)
        table.add_row(name, *map(str, sizes), *(f"{count:,}" for count in counts))
    Console().print(table)
