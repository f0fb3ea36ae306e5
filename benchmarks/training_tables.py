# SPDX-License-Identifier: Apache-2.0
"""Tables of training and experiments, from benchmarks/results/."""

import numpy as np
from recorded import Row, files, filled, read

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
    rows = read("real-model")
    base = {row["text"]: row["perplexity"] for row in rows if row["name"] == "ternary 6:8"}
    for row in rows:
        row["change"] = row["perplexity"] / base[row["text"]] - 1
    columns = [("row", "{name}"), ("text", "{text}")]
    columns += [("at the start", "{perplexity_at_start:,.0f}")]
    columns += [("after 2.0 M tokens", "{perplexity:,.2f}"), ("change", "{change:+.1%}")]
    return filled(columns, rows, "python benchmarks/real_model.py TEACHER DATA RUNS")


def real_patterns() -> str:
    rows = {row["name"]: row for row in read("real-patterns")}
    losses = np.array([row["documents"] for row in rows.values()], np.float64)
    chosen = np.random.default_rng(0).integers(0, losses.shape[1], (10_000, losses.shape[1]))
    sums = np.concatenate((losses.sum(1)[:, None], [of[chosen].sum(1) for of in losses]), axis=1)
    mean = dict(zip(rows, sums[..., 0] / sums[..., 1], strict=True))
    lines: list[Row] = []
    for name, row in rows.items():
        kind, pattern = name.split()
        cost = np.expm1(mean[name] - mean[f"{kind} 8:8"])
        lines.append(row | {"own": np.exp(mean[name][0]), "cost": _interval(cost)})
        if kind == "ternary" and pattern != "8:8":
            less = np.expm1(mean[f"full {pattern}"] - mean["full 8:8"]) - cost
            lines[-1]["less"] = _interval(less, "points")
    columns = [("format", "{name}"), ("tokens", "{tokens:,}"), ("perplexity", "{perplexity:.2f}")]
    columns += [("perplexity per document", "{own:.2f}"), ("cost of the pattern", "{cost}")]
    columns += [("advantage over full precision", "{less}")]
    command = "python benchmarks/real_model.py TEACHER DATA RUNS --tokens 10000000"
    return filled(columns, [{"less": ""} | line for line in lines], command)


def _interval(values: np.ndarray, unit: str = "%") -> str:
    """Return the first value and the 95 % interval of the others, all times 100; "" for zeros."""
    low, high = 100 * np.quantile(values[1:], (0.025, 0.975))
    return f"{100 * values[0]:+.1f} ({low:+.1f} to {high:+.1f}) {unit}" if low or high else ""


def long_run() -> str:
    columns = [("student", "{student}"), ("tokens", "{tokens:,}"), ("KL", "{kl_divergence:.3f}")]
    columns += [("perplexity", "{chat_perplexity:,.2f}"), ("Why is the sky blue?", "{sample}")]
    rows = [row for row in read("long-run") if row["sample"]]
    return filled(columns, rows, "sparse-bitnet distill TEACHER RUN --data DATA --steps 1836")


def student() -> str:
    columns = [("model", "{model}"), ("MB", "{megabytes:.0f}"), ("perplexity", "{perplexity:.1f}")]
    columns += [("HellaSwag", "{hellaswag:.1f}"), ("PIQA", "{piqa:.1f}")]
    columns += [("prefill of 512, tokens/s", "{prefill}"), ("decode, tokens/s", "{decode}")]
    rows = [{k: "-" if v is None else v for k, v in row.items()} for row in read("student")]
    return filled(columns, rows, "sparse-bitnet evaluate PACKED TEACHER --data DATA")


def training() -> str:
    columns = [("model", "{model}"), ("command", "`{method}`")]
    columns += [("tokens/s, transformers", "{transformers:,.0f}")]
    columns += [("tokens/s, ours", "{ours:,.0f}")]
    columns += [("speed-up, median of the turns", "{times_as_fast:.2f}")]
    rows = {row["method"]: row for row in read("training-peers")}
    return filled(columns, list(rows.values()), "python benchmarks/training_speed.py DATA MODEL")
