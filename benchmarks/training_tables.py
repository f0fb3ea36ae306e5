# SPDX-License-Identifier: Apache-2.0
"""Tables of training and experiments, from benchmarks/results/."""

from recorded import files, filled, markdown, read

from sparse_bitnet_paper.cells import cells
from sparse_bitnet_paper.perplexity_tables import comparison_table
from sparse_bitnet_paper.result_row import read_rows
from sparse_bitnet_paper.table import to_markdown


def quickstart() -> str:
    rows = read_rows(files("quickstart")[0])
    pattern = next(row.pattern for row in rows if row.pattern != "8:8")
    made = rows[0].provenance
    where = (
        f"{made['threads']} thread a model, torch {made['versions']['torch']}, {made['hardware']}, "
        f"{made['date'][:10]}, commit {made['commit']}, "
        f"sparse-bitnet {made['versions']['sparse-bitnet']}"
    )
    table = to_markdown(comparison_table(cells(rows, pattern))).rstrip()
    return f"{table}\n\n`sparse-bitnet quickstart` ({where})"


def faults() -> str:
    rows = read("faults")
    head = ["fault", "tried", "survived", "steps lost", "noticed after, s", "commands"]
    lines = []
    for fault in dict.fromkeys(row["fault"] for row in rows):
        own = [row for row in rows if row["fault"] == fault]
        noticed = sorted(row["notice_seconds"] for row in own if row["notice_seconds"] is not None)
        lines.append(
            [
                fault,
                f"{len(own)}",
                f"{sum(row['survived'] for row in own)}",
                _range(sorted(row["lost_steps"] for row in own)),
                _range([f"{seconds:.1f}" for seconds in noticed]) if noticed else "-",
                _range(sorted(row["commands"] for row in own)),
            ]
        )
    note = f"a checkpoint every {rows[0]['checkpoint_every']} of {rows[0]['steps']} steps; "
    return markdown(head, lines, rows[0], "python benchmarks/faults.py --record", note)


def planned() -> str:
    columns = [
        ("format", "{format}"),
        ("processes", "{processes}{split}"),
        ("sequences a forward", "{micro_batch_size}"),
        ("memory, MB", "{megabytes:.2f}"),
        ("planned", "{memory:+.1%}"),
        ("received a step, MB", "{received:.3f}"),
        ("planned", "{traffic}"),
    ]
    rows = []
    for row in read("planned"):
        received = row["received_bytes"]
        traffic = f"{row['planned_received_bytes'] / received - 1:+.1%}" if received else "-"
        more = {
            "split": f", split over {row['shard']}" if row["shard"] else "",
            "megabytes": row["memory_bytes"] / 1e6,
            "memory": row["planned_memory_bytes"] / row["memory_bytes"] - 1,
            "received": received / 1e6,
            "traffic": traffic,
        }
        rows.append(row | more)
    return filled(columns, rows, "python benchmarks/planned.py --record")


def orders() -> str:
    columns = [("processes", "{processes}"), ("sequences a forward", "{micro_batch_size}")]
    rows = read("orders")
    steps = [f"step {step}" for step in rows[0]["apart"]]
    columns += [(step, f"{{{step}:.0e}}") for step in steps]
    rows = [row | dict(zip(steps, row["apart"].values(), strict=True)) for row in rows]
    return filled([*columns, ("most", "{most:.3f}")], rows, "python benchmarks/orders.py --record")


def distill() -> str:
    return _distilled("distill", "OUT/model OUT/data RUNS")


def distill_own() -> str:
    return _distilled("distill-own", "RUN/final DATA RUNS --own")


def _distilled(kind: str, arguments: str) -> str:
    rows = read(kind)
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["method"], row["format"]), []).append(row["perplexity"])
    trained = next(row for row in rows if row["tokens"])
    lines = [
        [
            method,
            f"`{format}`",
            f"{sum(values) / len(values):,.2f}",
            f"{min(values):,.2f} to {max(values):,.2f}" if len(values) > 1 else "",
            str(len(values)) if method in ("fine-tuning", "distillation") else "",
        ]
        for (method, format), values in found.items()
    ]
    head = ["", "format", "perplexity", "least to most", "seeds"]
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
    head += ["times as fast, median of the turns"]
    return markdown(head, lines, last, "python benchmarks/training_speed.py DATA OTHER")


def opened() -> str:
    columns = [
        ("tokens", "{tokens:,}"),
        ("shards", "{shards}"),
        ("GB", "{gigabytes:.0f}"),
        ("opened in, s", "{open_seconds:.3f}"),
        ("3 batches in, s", "{batches_seconds:.3f}"),
        ("memory, MB", "{megabytes:.1f}"),
    ]
    row = read("open-data")[-1]
    row |= {"gigabytes": row["bytes"] / 1e9, "megabytes": row["memory_bytes"] / 1e6}
    return filled(columns, [row], "python benchmarks/open_data.py --record")


def _range(values: list) -> str:
    """The first and the last of sorted values, as text; one of them where they are equal."""
    low, high = values[0], values[-1]
    return str(low) if low == high else f"{low} to {high}"
