# SPDX-License-Identifier: Apache-2.0
"""Tables of training and experiments, from benchmarks/results/."""

from recorded import files, filled, read

from sparse_bitnet_paper.results import read_rows
from sparse_bitnet_paper.tables import Table, comparison_table


def quickstart() -> str:
    rows = read_rows(files("quickstart")[0])
    models = {format: own.set_index("seed") for format, own in rows.groupby("variant", sort=False)}
    made = rows.provenance[0]
    where = (
        f"{made['threads']} thread a model, torch {made['versions']['torch']}, {made['hardware']}, "
        f"{made['date'][:10]}, commit {made['commit']}, "
        f"sparse-bitnet {made['versions']['sparse-bitnet']}"
    )
    frame = comparison_table(models).frame.iloc[:, [0, 1, 2, 3, 5]]
    frame.columns = ["PPL", "Δ %", "zeros", "flips", "paper, 0.5B: Δ %"]
    table = Table(frame).markdown().rstrip()
    return f"{table}\n\n`sparse-bitnet quickstart` ({where})"


def real_model() -> str:
    columns = [
        ("row", "{name}"),
        ("text", "{text}"),
        ("at the start", "{perplexity_at_start:,.0f}"),
    ]
    columns += [("after 2.0 M tokens", "{perplexity:,.2f}"), ("KL", "{kl_divergence[0]:.3f}")]
    return filled(columns, read("real-model"), "python benchmarks/real_model.py TEACHER DATA RUNS")


def long_run() -> str:
    columns = [("tokens", "{tokens:,}"), ("KL", "{kl_divergence:.3f}")]
    columns += [("perplexity", "{chat_perplexity:,.2f}"), ("Why is the sky blue?", "{sample}")]
    rows = [row for row in read("long-run") if row["sample"]]
    return filled(columns, rows, "sparse-bitnet distill TEACHER RUN --data DATA --steps 1900")


def student() -> str:
    columns = [("model", "{model}"), ("MB", "{megabytes:.0f}"), ("perplexity", "{perplexity:.1f}")]
    columns += [("HellaSwag", "{hellaswag:.1f}"), ("PIQA", "{piqa:.1f}")]
    columns += [("prefill of 512, tokens/s", "{prefill:.0f}"), ("decode, tokens/s", "{decode:.0f}")]
    return filled(columns, read("student"), "sparse-bitnet evaluate PACKED TEACHER --data DATA")


def training() -> str:
    columns = [
        ("model", "{model}"),
        ("command", "`{method}`"),
        ("tokens/s, transformers", "{transformers:,.0f}"),
        ("tokens/s, ours", "{ours:,.0f}"),
        ("speed-up, median of the turns", "{times_as_fast:.2f}"),
    ]
    rows = {row["method"]: row for row in read("training-peers")}
    return filled(columns, list(rows.values()), "python benchmarks/training_speed.py DATA MODEL")
