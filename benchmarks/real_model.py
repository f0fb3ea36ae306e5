# SPDX-License-Identifier: Apache-2.0
"""A pretrained model made ternary and N:M sparse: choices of the recipe, each in equal tokens.

    python benchmarks/real_model.py TEACHER DATA RUNS --workers 4
    python benchmarks/real_model.py TEACHER DATA RUNS --only "scale of a row, 1e-3" --tokens 10000000

DATA is prepared text; `--chats` names prepared conversations, whose held-out part is scored as well.
A name may end in another learning rate. Each row trains in a process of its own, in RUNS/NAME, and is
recorded when it ends; `--workers` rows train at a time, and rows that are there are skipped.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from recorded import record

GROUPS = "ternary-6:8,quantizer=per-group:size=64"
DEFAULT = f"{GROUPS},activation=int8-hadamard,schedule=lambda"
BASE: dict[str, Any] = dict(
    format=GROUPS,
    batch_size=16,
    sequence_length=512,
    learning_rate=2e-3,
    warmup_fraction=0.05,
    weight_decay=0.0,
    compile="on",
    loss_chunk_tokens=4096,
    validation_tokens=65536,
    layer_metrics_every=0,
    checkpoint_every=0,
)
FULL = {"learning_rate": 2e-4, "reconstruction_windows": 0}
TABLE: dict[str, dict[str, Any]] = {
    "ternary 6:8": {},
    "ternary 8:8": {"format": GROUPS.replace("6:8", "8:8")},
    "ternary 2:4": {"format": GROUPS.replace("6:8", "2:4")},
    "full 8:8": {"format": "full-8:8", **FULL},
    "full 6:8": {"format": "full-6:8", **FULL},
    "full 2:4": {"format": "full-2:4", **FULL},
    "start: converted": {"reconstruction_windows": 0},
    "scale of a matrix": {"format": "ternary-6:8"},
    "scale of a row": {"format": "ternary-6:8,quantizer=per-channel"},
    "groups of 32": {"format": GROUPS.replace("64", "32")},
    "groups of 192": {"format": GROUPS.replace("64", "192")},
    "loss: cross-entropy": {"ce_weight": 1.0, "logits_weight": 0.0},
    "loss: both": {"ce_weight": 1.0},
    "temperature 2": {"temperature": 2.0},
    "activations not quantised": {"format": f"{GROUPS},activation=none"},
    "schedule: lambda": {"format": f"{GROUPS},schedule=lambda:until=0.25"},
    "schedule: gradual": {"format": f"{GROUPS},schedule=gradual:until=0.5"},
    "basis rotated": {"format": f"{GROUPS},activation=int8-hadamard"},
    "rotated and lambda": {"format": DEFAULT},
    "rotated and lambda from converted": {"format": DEFAULT, "reconstruction_windows": 0},
}


def document_losses(model: Any, config: Any, device: Any, dtype: Any, count: int) -> list[Any]:
    """Return summed loss and number of tokens of held-out documents, each up to a window's length."""
    import numpy as np
    import torch

    from sparse_bitnet.data.shards import TokenDataset
    from sparse_bitnet.nn.convert import evaluation_mode, selected
    from sparse_bitnet.training.device import autocast
    from sparse_bitnet.training.loss import SummedLoss

    text, loss = TokenDataset.open(config.data, "validation"), SummedLoss(model)
    ids = np.asarray(text[: len(text)]).astype(np.int64)
    documents = np.split(ids, np.flatnonzero(ids == text.eos_token_id) + 1)[:count]
    sums = []
    with torch.no_grad(), evaluation_mode(model), selected(model), autocast(device, dtype):
        for document in documents:
            tokens = torch.from_numpy(document[: config.sequence_length + 1]).to(device)[None]
            if tokens.shape[1] > 1:
                sums.append((loss(tokens[:, :-1], tokens[:, 1:]), tokens.shape[1] - 1))
    return [(round(float(total), 3), count) for total, count in sums]


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one row; return its perplexities on held-out text, and its speed."""
    import torch

    from sparse_bitnet.checkpoint.load import from_pretrained
    from sparse_bitnet.training.config import TrainConfig
    from sparse_bitnet.training.device import resolve_device, resolve_dtype
    from sparse_bitnet.training.loss import SummedLoss, held_out_windows, validation_loss
    from sparse_bitnet.training.metrics import METRICS_FILE, TIMING_FILE, read_rows
    from sparse_bitnet.training.trainer import train

    choice, _, rate = name.partition(", ")
    values = BASE | TABLE[choice] | json.loads(options.set)
    values |= {"learning_rate": float(rate)} if rate else {}
    steps = max(1, options.tokens // (values["batch_size"] * values["sequence_length"]))
    out = options.runs / name.replace(" ", "-").replace(":", "of")
    own = dict.fromkeys(("init", "teacher"), options.teacher)
    config = TrainConfig(**values, **own, data=options.data, out=str(out), steps=steps)
    result = train(config)
    curve, timing = (read_rows(out / file) for file in (METRICS_FILE, TIMING_FILE))
    seconds = [row["seconds"] for row in timing]
    row = {
        "name": name,
        "text": f"{result.data['train']['tokens'] / 1e6:.1f} M tokens",
        "tokens": result.tokens,
        "perplexity": result.validation_perplexity,
        "perplexity_at_start": curve[0]["validation_perplexity"],
        "teacher_perplexity": curve[0]["teacher_perplexity"],
        "kl_divergence": [each["kl_divergence"] for each in curve if "kl_divergence" in each][-1:],
        "tokens_per_second": config.tokens_per_step / sorted(seconds)[len(seconds) // 2],
        "config": values,
    }
    device = resolve_device("auto")
    dtype = resolve_dtype("auto", device)
    model: Any = from_pretrained(out / "final", dtype=torch.float32).to(device)
    row["documents"] = document_losses(model, config, device, dtype, options.documents)
    if options.chats:
        chats = replace(config, data=options.chats)
        held_out, loss = held_out_windows(chats), SummedLoss(model, config.loss_chunk_tokens)
        mean, _ = validation_loss(loss, chats, held_out, device=device, dtype=dtype)
        row["chat_perplexity"] = float(torch.tensor(mean).exp())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("teacher")
    parser.add_argument("data")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--chats")
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--documents", type=int, default=500, help="documents to score one by one")
    parser.add_argument("--only", nargs="*", default=list(TABLE), help="names of rows")
    parser.add_argument("--set", default="{}", help="JSON of options that differ from the table's")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    rows = options.runs / "rows.jsonl"
    if options.child:
        from sparse_bitnet.provenance import hardware

        record("real-model", [measure(options.child, options)], rows, hardware=hardware())
        return
    done = {json.loads(line)["name"] for line in rows.open()} if rows.exists() else set()

    def run(name: str) -> None:
        with (options.runs / f"{name.replace(':', '')}.log").open("w") as log:
            command = [sys.executable, *sys.argv, "--child", name]
            print(name, subprocess.call(command, stdout=log, stderr=log), flush=True)

    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(run, [name for name in options.only if name not in done]))


if __name__ == "__main__":
    main()
