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


def real_model() -> str:
    rows = read("real-model")
    teacher = f"{rows[0]['teacher_perplexity']:.2f}"
    lines = [
        [
            row["name"],
            f"{row['perplexity_at_start']:,.0f}",
            f"{row['perplexity']:,.2f}",
            f"{row['kl_divergence'][-1]:.3f}",
        ]
        for row in rows
    ]
    head = ["row", "before training", f"after {rows[0]['tokens']:,} tokens", "KL, last step"]
    command = "python benchmarks/real_model.py TEACHER DATA RUNS"
    note = f"the teacher's perplexity: {teacher}; "
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
