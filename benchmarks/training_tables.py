# SPDX-License-Identifier: Apache-2.0
"""Tables of training and experiments, from benchmarks/results/."""

from recorded import files, markdown, read

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


def distill() -> str:
    return _distilled("distill", "OUT/model OUT/data RUNS")


def distill_own() -> str:
    return _distilled("distill-own", "RUN/final DATA RUNS --own")


def _distilled(kind: str, arguments: str) -> str:
    rows = read(kind)
    perplexities: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        perplexities.setdefault((row["method"], row["format"]), []).append(row["perplexity"])
    trained = next(row for row in rows if row["tokens"])
    lines = [
        [
            method,
            f"`{format}`",
            f"{sum(values) / len(values):,.2f}",
            f"{min(values):,.2f} to {max(values):,.2f}" if len(values) > 1 else "",
            str(len(values)) if method in ("fine-tuning", "distillation") else "",
        ]
        for (method, format), values in perplexities.items()
    ]
    head = ["method", "format", "perplexity", "lowest to highest", "seeds"]
    note = f"{trained['tokens']:,} tokens a training; "
    steps = trained["tokens"] // 1024
    command = f"python benchmarks/distill.py {arguments} --steps {steps}"
    return markdown(head, lines, rows[0], command, note)


def training() -> str:
    rows = {row["model"]: row for row in read("training-speed")}
    lines = [
        [
            model,
            *(f"{row['tokens_per_second'][name]:,.0f}" for name in ("other", "here")),
            f"{row['times_as_fast']:.2f}",
        ]
        for model, row in rows.items()
    ]
    last = list(rows.values())[-1]
    head = ["model", f"tokens/s, {last['other_commit']}", "now, compiled"]
    head += ["speed-up, median of the turns"]
    return markdown(head, lines, last, "python benchmarks/training_speed.py DATA OTHER")
