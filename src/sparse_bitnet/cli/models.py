# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet models`: the presets and their sizes."""

from sparse_bitnet.cli.arguments import no_options


def main(arguments: list[str]) -> None:
    """Print every preset with its shape and parameter counts."""
    no_options(arguments, prog="sparse-bitnet models", description=main.__doc__)

    from rich.console import Console
    from rich.table import Table

    from sparse_bitnet.presets import PRESETS

    # Without a frame it fits 80 columns, where names would else be cut.
    table = Table(title="Model presets (Qwen2.5 family)", box=None, padding=(0, 1, 0, 0))
    for column in ("preset", "hidden", "ffn", "layers", "heads", "kv", "vocabulary"):
        table.add_column(column, justify="left" if column == "preset" else "right")
    table.add_column("block weights", justify="right")
    table.add_column("embedding", justify="right")
    for name, shape in PRESETS.items():
        table.add_row(
            name,
            str(shape.hidden_size),
            str(shape.intermediate_size),
            str(shape.num_hidden_layers),
            str(shape.num_attention_heads),
            str(shape.num_key_value_heads),
            f"{shape.vocab_size:,}",
            f"{shape.block_weights:,}",
            f"{shape.vocab_size * shape.hidden_size:,}",
        )
    Console().print(table)
