# SPDX-License-Identifier: Apache-2.0
"""Peak memory of the training loss at the paper's size: 16 x 2048 tokens, 151,936 words.

    python benchmarks/loss_memory.py            # the full size, a minute or two on 2 cores
    python benchmarks/loss_memory.py --tokens 4096

Each way of computing the loss, forward and backward, runs in a process of its own, because a process
never gives its peak back. The naive way (all logits, in float32) is skipped where it does not fit.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from datetime import date
from pathlib import Path


def measure(way: str, tokens: int, vocab: int, hidden: int) -> dict[str, float]:
    """Seconds and bytes that one forward and backward take beyond inputs and gradients' own size."""
    import torch
    import torch.nn.functional as F

    from sparse_bitnet.training.device import autocast, resolve_dtype
    from sparse_bitnet.training.loss import chunked_cross_entropy

    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, requires_grad=True)
    head = (torch.randn(vocab, hidden) * 0.02).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.perf_counter()
    with autocast("cpu", resolve_dtype("auto", torch.device("cpu"))):
        if way == "chunked":
            loss = chunked_cross_entropy(states, head, labels)
        else:
            logits = (states @ head.t()).float()
            loss = F.cross_entropy(logits, labels, reduction="sum")
    loss.backward()
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gradients = 4 * (states.numel() + head.numel())
    return {"seconds": seconds, "peak_bytes": peak - before, "gradient_bytes": gradients}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16 * 2048)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--way", choices=("chunked", "naive"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="append the rows to this JSON-lines file")
    options = parser.parse_args()
    if options.way:
        sizes = (options.tokens, options.vocab, options.hidden)
        print(json.dumps(measure(options.way, *sizes)))
        return
    for way in ("chunked", "naive"):
        row = {"way": way, "tokens": options.tokens, "vocab": options.vocab}
        row |= {"hidden": options.hidden, "date": date.today().isoformat()}
        if way == "naive" and 12 * options.tokens * options.vocab > _available_bytes():
            row["skipped"] = f"needs {12 * options.tokens * options.vocab / 1e9:.0f} GB of logits"
        else:
            child = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            row |= json.loads(subprocess.run(child, check=True, stdout=subprocess.PIPE).stdout)
        print(_line(row))
        if options.out:
            from sparse_bitnet.experiments.provenance import provenance

            with open(options.out, "a") as file:
                file.write(json.dumps(row | provenance()) + "\n")


def _available_bytes() -> int:
    text = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").is_file() else ""
    kilobytes = text.partition("MemAvailable:")[2].split()[:1]
    return int(kilobytes[0]) * 1024 if kilobytes else 0


def _line(row: dict) -> str:
    if "skipped" in row:
        return f"{row['way']:>8}: skipped, {row['skipped']}"
    return (
        f"{row['way']:>8}: {row['peak_bytes'] / 1e9:6.2f} GB above the inputs, of which "
        f"{row['gradient_bytes'] / 1e9:.2f} GB are the gradients; {row['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
