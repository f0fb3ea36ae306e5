# SPDX-License-Identifier: Apache-2.0
"""Renders the tables of README.md and docs/*.md from the rows in benchmarks/results/.

    python benchmarks/render.py            # rewrites what stands between the markers
    python benchmarks/render.py --check    # exit code 1 where the file is not what the rows say

Each table stands between `<!-- table: NAME -->` and `<!-- end -->` and shows the newest run of its kind;
where none was recorded yet, it stays as it is.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from sparse_bitnet.experiments.cells import cells
from sparse_bitnet.experiments.result_row import read_rows
from sparse_bitnet.experiments.table import to_markdown
from sparse_bitnet.experiments.tables import comparison_table

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RESULTS = Path(__file__).parent / "results"

Row = dict


class NothingRecorded(Exception):
    """There are no rows of a kind."""


def newest(kind: str) -> Path:
    """File of the newest run of a kind. Raises `NothingRecorded` where there is none."""
    files = sorted(RESULTS.glob(f"*_{kind}.jsonl"))
    if not files:
        raise NothingRecorded(kind)
    return files[-1]


def read(kind: str) -> list[Row]:
    """Rows of the newest run of a kind."""
    return [json.loads(line) for line in newest(kind).read_text(encoding="utf-8").splitlines()]


def markdown(
    head: list[str], lines: list[list[str]], row: Row, command: str, note: str = ""
) -> str:
    """A table and where it was measured."""
    width = len(head)
    rows = [head, ["---", *["---:"] * (width - 1)], *lines]
    table = "\n".join("| " + " | ".join(line) + " |" for line in rows)
    versions = row["versions"]
    where = f"{row['hardware']}, {row['date'][:10]}, commit {row['commit']}"
    return f"{table}\n\n`{command}` ({note}{where}, sparse-bitnet {versions['sparse-bitnet']})"


def quickstart() -> str:
    rows = read_rows(newest("quickstart"))
    pattern = next(row.pattern for row in rows if row.pattern != "8:8")
    made = rows[0].provenance
    where = (
        f"{made['threads']} thread a model, torch {made['versions']['torch']}, {made['hardware']}, "
        f"{made['date'][:10]}, commit {made['commit']}, "
        f"sparse-bitnet {made['versions']['sparse-bitnet']}"
    )
    table = to_markdown(comparison_table(cells(rows, pattern))).rstrip()
    return f"{table}\n\n`sparse-bitnet quickstart` ({where})"


def peers() -> str:
    rows = read("peers")
    speeds = [row for row in rows if "tokens_per_second" in row]
    ratios = {
        (
            row["ratio"]["type"],
            row["ratio"]["isa"],
            row["ratio"]["threads"],
            row["ratio"]["phase"],
        ): row
        for row in rows
        if "ratio" in row
    }
    threads = sorted({row["threads"] for row in speeds})
    cells = {
        (row["engine"], row["type"], row["isa"], row["threads"], row["phase"]): row
        for row in speeds
    }
    head = ["engine", "weights"]
    for phase in ("prefill", "decode"):
        length = next(row["tokens"] for row in speeds if row["phase"] == phase)
        what = f"prefill {length}" if phase == "prefill" else "decode"
        head += [f"{what}, {count} thread{'s' * (count > 1)}" for count in threads]
    lines = []
    for engine, type, isa in dict.fromkeys((r["engine"], r["type"], r["isa"]) for r in speeds):
        line = [engine + (f" ({isa})" if isa else ""), type]
        for phase in ("prefill", "decode"):
            for count in threads:
                row = cells.get((engine, type, isa, count, phase))
                ratio = ratios.get((type, isa, count, phase))
                text = "-" if row is None else f"{row['tokens_per_second']:.1f}"
                if row is not None and ratio is not None and engine == "sparse-bitnet":
                    text += f" ({ratio['ratio']['over_fastest_peer']:.2f}x)"
                line.append(text)
        lines.append(line)
    return markdown(head, lines, speeds[0], "python benchmarks/peers.py")


def patterns() -> str:
    rows = [row for row in read("bench") if row["batch"] == 1 and row["kv_cache"] == "float16"]
    threads = sorted({row["threads"] for row in rows})
    head = ["pattern", "weights", "MB a token"]
    head += [f"decode, {count} thread{'s' * (count > 1)}" for count in threads]
    head += ["memory read, GB/s", "used"]
    head += [f"prefill 512, {count} thread{'s' * (count > 1)}" for count in threads]
    head += ["int8 speed used", "resident, MB"]
    lines = []
    for pattern, format in dict.fromkeys((r["pattern"], r["weight_format"]) for r in rows):
        own = [r for r in rows if (r["pattern"], r["weight_format"]) == (pattern, format)]
        decode, prefill = {}, {}
        for row in own:
            found = decode if row["phase"] == "decode" else prefill
            if row["tokens"] == (0 if row["phase"] == "decode" else 512):
                found.setdefault(row["threads"], row)
        most = max(decode)
        lines.append(
            [
                pattern,
                format,
                f"{decode[most]['step_bytes'] / 1e6:.0f}",
                *(f"{decode[count]['tokens_per_second']:.1f}" for count in threads),
                f"{decode[most]['read_bytes_per_second'] / 1e9:.1f}",
                f"{decode[most]['memory_share']:.0%}",
                *(f"{prefill[count]['tokens_per_second']:.0f}" for count in threads),
                f"{prefill[most]['int8_share']:.0%}",
                f"{decode[most]['resident_bytes'] / 1e6:.0f}",
            ]
        )
    command = "sparse-bitnet bench --pattern P --weight-format i2 nm-bitmap --out FILE"
    return markdown(head, lines, rows[0], command)


def batches() -> str:
    rows = [row for row in read("bench") if row["phase"] == "decode"]
    most = max(row["threads"] for row in rows)
    several = {(r["pattern"], r["weight_format"], r["tokens"]) for r in rows if r["batch"] > 1}
    rows = [
        row
        for row in rows
        if row["threads"] == most
        and row["kv_cache"] == "float16"
        and (row["pattern"], row["weight_format"], row["tokens"]) in several
    ]
    sizes = sorted({row["batch"] for row in rows})
    head = ["pattern", "weights", "context", *(f"batch {size}" for size in sizes)]
    lines = []
    for key in dict.fromkeys((r["pattern"], r["weight_format"], r["tokens"]) for r in rows):
        own = {
            r["batch"]: r for r in rows if (r["pattern"], r["weight_format"], r["tokens"]) == key
        }
        cells = (f"{own[s]['tokens_per_second']:.1f}" if s in own else "-" for s in sizes)
        lines.append([key[0], key[1], str(key[2]), *cells])
    return markdown(head, lines, rows[0], "sparse-bitnet bench")


def contexts() -> str:
    rows = [row for row in read("bench") if (row["phase"], row["batch"]) == ("decode", 1)]
    most = max(row["threads"] for row in rows)
    kinds = ("pattern", "weight_format", "kv_cache")
    long = {tuple(row[kind] for kind in kinds) for row in rows if row["tokens"] > 2048}
    if not long:
        raise NothingRecorded("bench with long contexts")
    lengths = sorted({row["tokens"] for row in rows if tuple(row[kind] for kind in kinds) in long})
    head = ["pattern", "weights", "cache", *(f"behind {length:,}" for length in lengths)]
    head += [f"MB a token behind {lengths[-1]:,}"]
    lines = []
    for key in sorted(long):
        # The run with the long contexts is the last one of its kind.
        own = {
            row["tokens"]: row
            for row in rows
            if row["threads"] == most and tuple(row[kind] for kind in kinds) == key
        }
        cells = (f"{own[n]['tokens_per_second']:.1f}" if n in own else "-" for n in lengths)
        largest = own[max(own)]
        lines.append([*key, *cells, f"{largest['step_bytes'] / 1e6:,.0f}"])
    command = "sparse-bitnet bench --contexts 0 8192 32000 --batches 1 --kv-cache C --out FILE"
    return markdown(head, lines, rows[0], command)


def closeness() -> str:
    rows = [row for row in read("precision") if row["what"] == "closeness"]
    head = [
        "model",
        "positions",
        "relative error, median",
        "largest",
        "above 1e-3",
        "reference against itself, median",
        "largest",
        "above 1e-3",
        "greedy texts of 200 tokens identical",
        "perplexity",
        "of the reference",
    ]
    lines = [
        [
            row["model"],
            f"{row['tokens']:,}",
            f"{row['relative_error_median']:.1e}",
            f"{row['relative_error_largest']:.1e}",
            str(row["positions_above_1e-3"]),
            f"{row['reference_own_error_median']:.1e}",
            f"{row['reference_own_error_largest']:.1e}",
            str(row["reference_own_positions_above_1e-3"]),
            f"{row['greedy_identical']} of {row['greedy_prompts']}",
            f"{row['perplexity']:.4f}",
            f"{row['reference_perplexity']:.4f}",
        ]
        for row in rows
    ]
    return markdown(head, lines, rows[0], "python benchmarks/precision.py PACKED TEXT")


def costs() -> str:
    rows = [row for row in read("precision") if row["what"] == "cost"]
    head = ["model", "head", "cache", "perplexity", "change, %", "head, MB"]
    lines = [
        [
            row["model"],
            row["head"],
            row["kv_cache"],
            f"{row['perplexity']:.4f}",
            f"{row['percent']:+.3f}",
            f"{row['head_bytes'] / 1e6:.2f}",
        ]
        for row in rows
    ]
    return markdown(head, lines, rows[0], "python benchmarks/precision.py PACKED TEXT")


def server() -> str:
    rows = read("server")
    head = ["server", "model", "streams", "seconds", "texts ended", "lost or mixed up"]
    head += ["tokens/s", "first token p50, s", "token p50, ms", "token p99, ms"]
    between = "seconds_between_tokens"
    lines = [
        [
            row.get("server", "sparse-bitnet"),
            row["model"],
            str(row["streams"]),
            f"{row['seconds']:.0f}",
            f"{row['ended']:,}",
            str(row["lost_or_mixed_up"]),
            f"{row['generated_tokens_per_second']:.0f}",
            f"{row['seconds_to_first_token']['p50']:.2f}",
            f"{1e3 * row.get(between, row['seconds_per_token'])['p50']:.1f}",
            f"{1e3 * row.get(between, row['seconds_per_token'])['p99']:.1f}",
        ]
        for row in rows
    ]
    return markdown(head, lines, rows[0], "python benchmarks/load_server.py PACKED")


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
    rows = read("planned")
    head = ["format", "processes", "sequences a forward", "memory, MB", "planned"]
    head += ["received a step, MB", "planned"]
    lines = [
        [
            row["format"],
            str(row["processes"]) + (f", split over {row['shard']}" if row["shard"] else ""),
            str(row["micro_batch_size"]),
            f"{row['memory_bytes'] / 1e6:.2f}",
            f"{row['planned_memory_bytes'] / row['memory_bytes'] - 1:+.1%}",
            f"{row['received_bytes'] / 1e6:.3f}",
            f"{row['planned_received_bytes'] / row['received_bytes'] - 1:+.1%}"
            if row["received_bytes"]
            else "-",
        ]
        for row in rows
    ]
    return markdown(head, lines, rows[0], "python benchmarks/planned.py --record")


def orders() -> str:
    rows = read("orders")
    steps = list(rows[0]["apart"])
    head = ["processes", "sequences a forward", *(f"step {step}" for step in steps), "most"]
    lines = [
        [
            str(row["processes"]),
            str(row["micro_batch_size"]),
            *(f"{row['apart'][step]:.0e}" for step in steps),
            f"{row['most']:.3f}",
        ]
        for row in rows
    ]
    return markdown(head, lines, rows[0], "python benchmarks/orders.py --record")


def distill() -> str:
    rows = read("distill")
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
    command = f"python benchmarks/distill.py OUT/model OUT/data RUNS --steps {steps}"
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
    head = ["model", f"tokens/s, {last['other_commit']}", "now, compiled", "times as fast"]
    return markdown(head, lines, last, "python benchmarks/training_speed.py DATA OTHER")


def forwards() -> str:
    rows = read("forwards")
    runs = [row for row in rows if row["what"] == "run"]
    found = next(row for row in rows if row["what"] == "comparison")
    head = ["seed", "validation loss, fake", "int8", "last training losses, fake", "int8"]
    lines = []
    for seed in dict.fromkeys(row["seed"] for row in runs):
        own = {row["forward"]: row for row in runs if row["seed"] == seed}
        pair = (own["fake"], own["int8"])
        losses = [f"{row['validation_loss']:.4f}" for row in pair]
        lines.append([str(seed), *losses, *(f"{row['curve'][-1]:.4f}" for row in pair)])
    note = (
        f"{found['model']} {found['format']}, {found['steps']} steps of {found['tokens_per_step']:,} "
        f"tokens, {found['compute']} on {found['device']}; "
    )
    table = markdown(head, lines, found, "python benchmarks/forwards.py WORK_FOLDER", note)
    return (
        f"{table}\n\nint8 minus fake over {found['seeds']} seeds: training loss "
        f"{found['training_difference']:+.4f} +- {found['training_half_width']:.4f}, validation loss "
        f"{found['validation_difference']:+.4f} +- {found['validation_half_width']:.4f} (95 %); "
        f"curves lie {found['curve_distance_of_forwards']:.4f} apart, those of two seeds "
        f"{found['curve_distance_of_seeds']:.4f}. The forwards "
        f"{'agree within' if found['agree'] else 'differ by more than'} the noise between seeds."
    )


def opened() -> str:
    row = read("open-data")[-1]
    head = ["tokens", "shards", "GB", "opened in, s", "3 batches in, s", "memory, MB"]
    line = [
        f"{row['tokens']:,}",
        str(row["shards"]),
        f"{row['bytes'] / 1e9:.0f}",
        f"{row['open_seconds']:.3f}",
        f"{row['batches_seconds']:.3f}",
        f"{row['memory_bytes'] / 1e6:.1f}",
    ]
    return markdown(head, [line], row, "python benchmarks/open_data.py --record")


def _range(values: list) -> str:
    """The first and the last of sorted values, as text; one of them where they are equal."""
    low, high = values[0], values[-1]
    return str(low) if low == high else f"{low} to {high}"


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        quickstart,
        peers,
        patterns,
        batches,
        contexts,
        closeness,
        costs,
        server,
        faults,
        planned,
        distill,
        training,
        orders,
        opened,
        forwards,
    )
}


def render(text: str) -> str:
    """The document with its tables made anew."""

    def table(match: re.Match[str]) -> str:
        try:
            made = TABLES[match[1]]()
        except NothingRecorded:
            return match[0]
        return f"<!-- table: {match[1]} -->\n\n{made}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        made = render(text)
        if check and made != text:
            sys.exit(f"{document}: not what the rows say")
        if not check:
            document.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
