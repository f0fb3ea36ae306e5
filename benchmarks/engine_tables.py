# SPDX-License-Identifier: Apache-2.0
"""Tables of the engine and the server, from benchmarks/results/."""

from recorded import NothingRecorded, filled, markdown, read, threads_heads


def peers(model: str = "qwen2.5-1.5b", options: str = "") -> str:
    rows = read("peers", model=model)
    speeds = [row for row in rows if "tokens_per_second" in row]
    kinds = ("type", "isa", "threads", "phase")
    best: dict[tuple[str, str], float] = {}
    for row in speeds:
        key = (row["isa"] if row["engine"] == "sparse-bitnet" else "others", row["phase"])
        best[key] = max(row["tokens_per_second"], best.get(key, 0))
    threads = sorted({row["threads"] for row in speeds})
    cells = {(row["engine"], *(row[kind] for kind in kinds)): row for row in speeds}
    head = ["engine", "weights"]
    for phase in ("prefill", "decode"):
        length = next(row["tokens"] for row in speeds if row["phase"] == phase)
        head += threads_heads(f"prefill {length}" if phase == "prefill" else "decode", threads)
    lines = []
    for engine, type, isa in dict.fromkeys((r["engine"], r["type"], r["isa"]) for r in speeds):
        line = [engine + (f" ({isa})" if isa else ""), type.removeprefix(f"{model}-")]
        for phase in ("prefill", "decode"):
            for count in threads:
                row = cells.get((engine, type, isa, count, phase))
                text = "-" if row is None else f"{row['tokens_per_second']:.1f}"
                if row is not None and row["tokens_per_second"] == best.get((isa, phase)):
                    text += f" ({best[isa, phase] / best['others', phase]:.2f}x)"
                line.append(text)
        lines.append(line)
    return markdown(head, lines, speeds[0], f"python benchmarks/peers.py{options}")


def peers_best() -> str:
    """One row an engine, at its best number of threads; AVX2 is no match for peers with AVX-512."""
    rows = [row for row in read("peers", model="qwen2.5-1.5b") if row.get("isa") != "avx2"]
    best: dict[str, dict[str, float]] = {}
    for row in rows:
        if speed := row.get("tokens_per_second"):
            own = best.setdefault(row["engine"], {"prefill": 0, "decode": 0})
            own[row["phase"]] = max(speed, own[row["phase"]])
    lines = [[name, f"{own['prefill']:.1f}", f"{own['decode']:.1f}"] for name, own in best.items()]
    head = ["engine", "prefill of 512, tokens/s", "decode, tokens/s"]
    return markdown(head, lines, rows[0], "python benchmarks/peers.py")


def peers_bitnet() -> str:
    return peers("bitnet-2b4t", " --model bitnet-2b4t --type --litespark")


def peers_groups() -> str:
    return peers(
        "qwen3-8b", " --model qwen3-8b --scale-group 128 --type q2_0 --prompt 32 --steps 4"
    )


def patterns() -> str:
    rows = read("bench", batch=1, kv_cache="float16")
    threads = sorted({row["threads"] for row in rows})
    head = ["pattern", "weights", "MB a token"]
    head += threads_heads("decode", threads)
    head += ["memory read, GB/s", "used"]
    head += threads_heads("prefill 512", threads)
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
    command = "sparse-bitnet bench --pattern P --weight-format i2 lookup --out FILE"
    return markdown(head, lines, rows[0], command)


def layouts() -> str:
    rows = read("layouts")
    threads = sorted({row["threads"] for row in rows})
    head = ["pattern", "weights", "bits a weight", "cycles a weight, in cache"]
    head += threads_heads("G weights/s from memory", threads)
    lines = []
    for pattern, layout in dict.fromkeys((r["pattern"], r["layout"]) for r in rows):
        own = [r for r in rows if (r["pattern"], r["layout"]) == (pattern, layout)]
        line = [pattern, layout, f"{own[0]['bits']:.2f}", f"{own[0]['cycles']:.4f}"]
        for count in threads:
            row = next(r for r in own if r["threads"] == count)
            line.append(f"{row['weights_per_second'] / 1e9:.0f} ({row['over_i2']:.2f}x)")
        lines.append(line)
    note = f"{rows[0]['isa']}, {rows[0]['clock_rate'] / 1e9:.2f} GHz, one thread in cache; "
    return markdown(head, lines, rows[0], "python benchmarks/layouts.py", note)


def batches() -> str:
    rows = read("bench", phase="decode")
    most = max(row["threads"] for row in rows)
    kinds = ("pattern", "weight_format", "kv_cache", "tokens")
    several = {tuple(row[kind] for kind in kinds) for row in rows if row["batch"] > 1}
    own: dict[tuple, dict[int, dict]] = {key: {} for key in sorted(several)}
    for row in rows:
        if row["threads"] == most and (key := tuple(row[kind] for kind in kinds)) in own:
            own[key][row["batch"]] = row
    sizes = sorted({size for cells in own.values() for size in cells})
    head = ["pattern", "weights", "cache", "context", *(f"batch {size}" for size in sizes)]
    lines = []
    for key, cells in own.items():
        speeds = (f"{cells[s]['tokens_per_second']:.1f}" if s in cells else "-" for s in sizes)
        lines.append([*map(str, key), *speeds])
    command = "sparse-bitnet bench --weight-format i2 lookup --kv-cache int8"
    return markdown(head, lines, rows[0], command)


def contexts() -> str:
    rows = read("bench", batch=1)
    most = max(row["threads"] for row in rows)
    kinds = ("pattern", "weight_format", "kv_cache")
    long = {
        tuple(r[k] for k in kinds) for r in rows if r["phase"] == "decode" and r["tokens"] > 2048
    }
    if not long:
        raise NothingRecorded("bench with long contexts")
    # The run with the long contexts is the last one of its kind.
    own = {
        (*(row[kind] for kind in kinds), row["phase"], row["tokens"]): row
        for row in rows
        if row["threads"] == most and tuple(row[kind] for kind in kinds) in long
    }
    prompts, lengths = (
        sorted({tokens for *_, phase, tokens in own if phase == wanted and tokens != 128})
        for wanted in ("prefill", "decode")
    )
    head = ["pattern", "weights", "cache", *(f"prompt of {length:,}" for length in prompts)]
    head += [*(f"behind {length:,}" for length in lengths), f"MB a token behind {lengths[-1]:,}"]
    lines = []
    for key in sorted(long):
        cells = [own.get((*key, "prefill", n)) for n in prompts]
        cells += [own.get((*key, "decode", n)) for n in lengths]
        speeds = (f"{cell['tokens_per_second']:.1f}" if cell else "-" for cell in cells)
        lines.append(
            [*key, *speeds, f"{own[*key, 'decode', lengths[-1]]['step_bytes'] / 1e6:,.0f}"]
        )
    command = "sparse-bitnet bench --prefill 512 8192 --contexts 0 8192 --batches 1 --kv-cache C"
    return markdown(head, lines, rows[0], f"{command} --out FILE")


def closeness() -> str:
    columns = [
        ("model", "{model}"),
        ("positions", "{tokens:,}"),
        ("relative error, median", "{relative_error_median:.1e}"),
        ("largest", "{relative_error_largest:.1e}"),
        ("above 1e-3", "{positions_above_1e-3}"),
        ("reference against itself, median", "{reference_own_error_median:.1e}"),
        ("largest", "{reference_own_error_largest:.1e}"),
        ("above 1e-3", "{reference_own_positions_above_1e-3}"),
        ("greedy texts of 200 tokens identical", "{greedy_identical} of {greedy_prompts}"),
        ("perplexity", "{perplexity:.4f}"),
        ("of the reference", "{reference_perplexity:.4f}"),
    ]
    rows = read("precision", what="closeness")
    return filled(columns, rows, "python benchmarks/precision.py PACKED TEXT")


def costs() -> str:
    columns = [
        ("model", "{model}"),
        ("head", "{head}"),
        ("cache", "{kv_cache}"),
        ("perplexity", "{perplexity:.4f}"),
        ("change, %", "{percent:+.3f}"),
        ("head, MB", "{megabytes:.2f}"),
    ]
    rows = [row | {"megabytes": row["head_bytes"] / 1e6} for row in read("precision", what="cost")]
    return filled(columns, rows, "python benchmarks/precision.py PACKED TEXT")


def installed() -> str:
    rows = [row for row in read("installed") if "package" in row]
    total = {name: sum(row[name] for row in rows) for name in ("code", "bytecode")}
    lines = []
    for row in [*rows, {"package": "all", **total}]:
        sizes = (row["code"], row["bytecode"], row["code"] + row["bytecode"])
        lines.append([row["package"], *(f"{size / 1e6:.1f}" for size in sizes)])
    return _of_wheel(["package", "MB", "bytecode, MB", "both"], lines, rows[0])


def first_word() -> str:
    rows = [row for row in read("installed") if "command" in row]
    times = ("processor_seconds", "seconds")
    lines = [[row["command"], *(f"{row[time]:.2f}" for time in times)] for row in rows]
    return _of_wheel(["command", "processor time, s", "time, s"], lines, rows[0])


def _of_wheel(head: list[str], lines: list[list[str]], row: dict) -> str:
    note = f"Python {row['versions']['python']}, "
    return markdown(head, lines, row, "python benchmarks/installed.py WHEEL --model PACKED", note)


def speculation() -> str:
    columns = [
        ("text", "{text}"),
        ("threads", "{threads}"),
        ("draft tokens", "{guessed}"),
        ("accepted", "{accepted}"),
        ("tokens/s without", "{before:.1f}"),
        ("tokens/s with", "{after:.1f}"),
        ("speed-up", "{ratio:.2f}x"),
    ]
    rows = []
    for row in read("speculation"):
        before, after = (row[way]["tokens_per_second"] for way in ("without", "with"))
        rows.append(row | row["with"] | {"before": before, "after": after, "ratio": after / before})
    return filled(columns, rows, "python benchmarks/speculation.py PACKED TOKENIZER --text ...")


def server() -> str:
    columns = [
        ("server", "{server}"),
        ("model", "{model}"),
        ("streams", "{streams}"),
        ("texts", "{ended:,}"),
        ("tokens/s", "{generated_tokens_per_second:.0f}"),
        ("first token, median, s", "{seconds_to_first_token[p50]:.2f}"),
        ("next token, p99, ms", "{p99:.1f}"),
    ]
    rows = []
    for row in read("server"):
        between = row.get("seconds_between_tokens", row["seconds_per_token"])
        rows.append({"server": "sparse-bitnet"} | row | {p: 1e3 * between[p] for p in between})
    return filled(columns, rows, "python benchmarks/load_server.py PACKED")
