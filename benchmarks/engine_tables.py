# SPDX-License-Identifier: Apache-2.0
"""Tables of the engine and the server, from benchmarks/results/."""

from recorded import Row, filled, markdown, read, threads_heads

OURS = "sparse-bitnet"
_COMPARED = {"amx_int8": ("amx_int8", "avx512vbmi", "avx2"), "avx512vbmi": ("avx512vbmi", "avx2")}
"""Instruction set -> those for which the other engines may be built that it is compared with."""


def peers(model: str = "qwen2.5-1.5b", options: str = "") -> str:
    rows = read("peers", model=model)
    speeds = [row for row in rows if "tokens_per_second" in row]
    kinds = ("type", "isa", "threads", "phase")
    best: dict[tuple[bool, str, str], float] = {}
    for row in speeds:
        key = (row["engine"] == OURS, row["isa"], row["phase"])
        best[key] = max(row["tokens_per_second"], best.get(key, 0))
    threads = sorted({row["threads"] for row in speeds})
    cells = {(row["engine"], *(row[kind] for kind in kinds)): row for row in speeds}
    head = ["engine", "weight format"]
    for phase in ("prefill", "decode"):
        length = next(row["tokens"] for row in speeds if row["phase"] == phase)
        head += threads_heads(f"prefill {length}" if phase == "prefill" else "decode", threads)
    lines = []
    for engine, type, isa in dict.fromkeys((r["engine"], r["type"], r["isa"]) for r in speeds):
        line = [f"{engine} ({isa})", type.removeprefix(f"{model}-")]
        for phase in ("prefill", "decode"):
            ours, peers = best.get((True, isa, phase)), _COMPARED.get(isa, (isa,))
            theirs = max(best.get((False, peer, phase), 0) for peer in peers)
            for count in threads:
                row = cells.get((engine, type, isa, count, phase))
                text = "-" if row is None else f"{row['tokens_per_second']:.1f}"
                if row and ours and theirs and row["tokens_per_second"] == ours:
                    text += f" ({ours / theirs:.2f}x)"
                line.append(text)
        lines.append(line)
    return markdown(head, lines, speeds[0], f"python benchmarks/peers.py{options}")


_BITS = {"i2": 2, "b3": 1.67, "lookup": 1.67, "TQ2_0": 2.06, "IQ2_BN": 2}
_WEIGHTS, _HEAD = 1_310_195_712, 151_936 * 1536
"""Weights of qwen2.5-1.5b's blocks, and of its head, which has 8 bits a weight in every engine."""


def peers_best() -> str:
    """Return each engine and instruction set at its best, with its share of the machine's limit."""
    rows = read("peers", model="qwen2.5-1.5b")
    limits = {(r["isa"], r["threads"]): r for r in (row.get("roofline") for row in rows) if r}
    speeds = sorted((r for r in rows if "phase" in r), key=lambda r: r["tokens_per_second"])
    best = {(row["engine"], row["isa"], row["phase"]): row for row in speeds}
    lines = []
    for engine, isa in sorted({key[:2] for key in best}, key=lambda key: (key[0] != OURS, key)):
        prefill, decode = (best[engine, isa, phase] for phase in ("prefill", "decode"))
        bits = next(bits for name, bits in _BITS.items() if name in decode["type"])
        line = [f"{engine} ({isa})", f"{bits:g}"]
        # Tokens/s that the machine allows: two operations a weight, or all weights read once.
        of_int8 = limits[isa, prefill["threads"]]["int8_ops_per_second"] / (2 * _WEIGHTS)
        read_rate = limits[isa, decode["threads"]]["read_bytes_per_second"]
        of_memory = read_rate / (_WEIGHTS * bits / 8 + _HEAD)
        for row, most in ((prefill, of_int8), (decode, of_memory)):
            line.append(f"{row['tokens_per_second']:.0f} ({row['tokens_per_second'] / most:.0%})")
        lines.append(line)
    head = ["engine", "bits a weight", "prefill of 512, tokens/s", "decode, tokens/s"]
    return markdown(head, lines, speeds[0], "python benchmarks/peers.py")


def peers_bitnet() -> str:
    return peers("bitnet-2b4t", " --model bitnet-2b4t --type")


def bonsai(kind: str = "bonsai") -> str:
    columns = [("model", "{model}"), ("engine", "{engine}"), ("weight format", "{type}")]
    columns += [("prefill", "{prefill:.1f}"), ("decode", "{decode:.1f}"), ("bandwidth", "{share}")]
    columns += [("resident, MB", "{memory}")]
    rows: dict[tuple, Row] = {}
    for row in (each for each in read(kind) if "phase" in each):
        alone = {"engine": f"{OURS}, alone", "type": row.get("weight_format")}
        own = rows.setdefault((row["model"], row.get("engine"), row.get("type")), alone | row)
        share, memory = row.get("memory_share"), row.get("resident_bytes")
        own |= {row["phase"]: row["tokens_per_second"], "share": f"{share:.0%}" if share else "-"}
        own["memory"] = f"{memory / 1e6:.0f}" if memory else "-"
    return filled(columns, [*rows.values()], "python benchmarks/peers.py --model M --type tq2_0")


def bonsai_avx512() -> str:
    return bonsai("bonsai-avx512")


def patterns_decode() -> str:
    rows, threads, table = _by_pattern("decode")
    head = ["pattern", "weight format", "MB read per token", *threads_heads("tokens/s", threads)]
    lines = []
    for key, own in table.items():
        most = own[max(own)]
        speeds = (f"{own[count]['tokens_per_second']:.1f}" for count in threads)
        share, resident = f"{most['memory_share']:.0%}", f"{most['resident_bytes'] / 1e6:.0f}"
        lines.append([*key, f"{most['step_bytes'] / 1e6:.0f}", *speeds, share, resident])
    return markdown([*head, "% of bandwidth", "resident, MB"], lines, rows[0], _OF_PATTERNS)


def patterns_prefill() -> str:
    rows, threads, table = _by_pattern("prefill")
    head = ["pattern", "weight format", *threads_heads("tokens/s", threads), "% of int8 rate"]
    lines = []
    for key, own in table.items():
        speeds = (f"{own[count]['tokens_per_second']:.0f}" for count in threads)
        lines.append([*key, *speeds, f"{own[max(own)]['int8_share']:.0%}"])
    return markdown(head, lines, rows[0], _OF_PATTERNS)


_OF_PATTERNS = "sparse-bitnet bench --pattern P --weight-format i2 b3 lookup --out FILE"


def _by_pattern(phase: str) -> tuple[list[Row], list[int], dict[tuple[str, str], dict[int, Row]]]:
    """Return the rows of a phase, their numbers of threads, and each pattern's and format's row by
    threads."""
    rows = read("patterns", phase=phase)
    table: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        table.setdefault((row["pattern"], row["weight_format"]), {})[row["threads"]] = row
    return rows, sorted({row["threads"] for row in rows}), table


def layouts() -> str:
    rows = read("layouts")
    threads = sorted({row["threads"] for row in rows})
    head = ["pattern", "weight format", "bits per weight", "ps per weight"]
    head += threads_heads("10⁹ weights/s", threads)
    lines = []
    for pattern, layout in dict.fromkeys((r["pattern"], r["layout"]) for r in rows):
        own = [r for r in rows if (r["pattern"], r["layout"]) == (pattern, layout)]
        line = [
            pattern.replace("exactly", "binary"),
            layout,
            f"{own[0]['bits']:.2f}",
            f"{own[0]['seconds_in_cache'] * 1e12:.1f}",
        ]
        for count in threads:
            row = next(r for r in own if r["threads"] == count)
            line.append(f"{row['weights_per_second'] / 1e9:.0f} ({row['over_i2']:.2f}x)")
        lines.append(line)
    note = f"{rows[0]['isa']}; "
    return markdown(head, lines, rows[0], "python benchmarks/layouts.py", note)


def batches() -> str:
    rows = read("bench", phase="decode")
    most = max(row["threads"] for row in rows)
    kinds = ("pattern", "weight_format", "kv_cache", "tokens")
    several = {tuple(row[kind] for kind in kinds) for row in rows if row["batch"] > 1}
    own: dict[tuple, dict[int, dict]] = {key: {} for key in sorted(several)}
    for row in rows:
        if row["threads"] == most and (key := tuple(row[kind] for kind in kinds)) in own:
            own[key].setdefault(row["batch"], row)  # of the run with several batches
    sizes = sorted({size for cells in own.values() for size in cells})
    head = ["pattern", "weights", "KV cache", "context", *(f"batch {size}" for size in sizes)]
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
    # The run with the long contexts is the last one of its kind.
    own = {
        (*(row[kind] for kind in kinds), row["phase"], row["tokens"]): row
        for row in rows
        if row["threads"] == most and tuple(row[kind] for kind in kinds) in long
    }
    prompts, lengths = (
        [
            tokens
            for tokens in sorted({tokens for *_, of, tokens in own if of == phase})
            if all((*key, phase, tokens) in own for key in long)
        ]
        for phase in ("prefill", "decode")
    )
    prompts = [prompts[0], prompts[-1]]
    head = ["weights", "KV cache", *(f"prefill of {length:,}" for length in prompts)]
    head += [*(f"decode after {n:,}" for n in lengths), f"MB read per token after {lengths[-1]:,}"]
    lines = []
    for pattern, weights, cache in sorted(long):
        key = (pattern, weights, cache)
        cells = [own[*key, "prefill", n] for n in prompts]
        cells += [own[*key, "decode", n] for n in lengths]
        speeds = (f"{cell['tokens_per_second']:.1f}" for cell in cells)
        size = f"{cells[-1]['step_bytes'] / 1e6:,.0f}"
        lines.append([f"{pattern} {weights}", cache, *speeds, size])
    command = "sparse-bitnet bench --prefill 512 8192 --contexts 0 8192 --batches 1 --kv-cache C"
    return markdown(head, lines, rows[0], f"{command} --out FILE")


def closeness() -> str:
    head = ["logits of", "positions", "median error", "largest", "above 1e-3", "perplexity"]
    other = ("reference_own_error", "reference_own_positions_above_1e-3", "reference_perplexity")
    kinds = (
        ("the CPU engine", "relative_error", "positions_above_1e-3", "perplexity"),
        ("transformers, other attention", *other),
    )
    [row] = read("precision", what="closeness")
    lines = []
    for name, error, above, perplexity in kinds:
        errors = (f"{row[f'{error}_{which}']:.1e}" for which in ("median", "largest"))
        line = [name, f"{row['tokens']:,}", *errors]
        lines.append([*line, f"{row[above]:,}", f"{row[perplexity]:.4f}"])
    note = f"{row['model']}; greedy texts of 200 tokens that are identical: "
    note += f"{row['greedy_identical']} of {row['greedy_prompts']}; "
    return markdown(head, lines, row, "python benchmarks/precision.py PACKED TEXT", note)


def costs() -> str:
    columns = [("model", "{model}"), ("head", "{head}"), ("KV cache", "{kv_cache}")]
    columns += [("perplexity", "{perplexity:.4f}"), ("change, %", "{percent:+.3f}")]
    columns += [("head, MB", "{megabytes:.2f}")]
    rows = [row | {"megabytes": row["head_bytes"] / 1e6} for row in read("precision", what="cost")]
    return filled(columns, rows, "python benchmarks/precision.py PACKED TEXT")


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
        ("concurrent streams", "{streams}"),
        ("answers", "{ended:,}"),
        ("tokens/s", "{generated_tokens_per_second:.0f}"),
        ("first token, median, s", "{seconds_to_first_token[p50]:.2f}"),
        ("next token, p99, ms", "{p99:.1f}"),
    ]
    rows = []
    for row in read("server"):
        between = row["seconds_between_tokens"]
        rows.append({"server": "sparse-bitnet"} | row | {p: 1e3 * between[p] for p in between})
    return filled(columns, rows, "python benchmarks/load_server.py PACKED")
