# SPDX-License-Identifier: Apache-2.0
"""Training speed of this checkout and of plain transformers, in steps of each in turn.

    python benchmarks/training_speed.py DATA MODEL [--distill]     # a model folder or a GGUF file

Each side trains the model in a process of its own, 4 x 512 tokens a step: ours in --format, compiled;
transformers its dense model under bfloat16 autocast, with SDPA and fused AdamW. With --distill the model
is the teacher, too, and KL the loss. DATA is prepared text. Times are wall clock, so nothing else may
run. Appends a row to benchmarks/results/.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from recorded import record

CHILD = """
import json, sys, time
from sparse_bitnet.training.config import TrainConfig
config, began = TrainConfig(**json.loads(sys.argv[1])), 0.0
def on_step(row):
    global began
    print(json.dumps([time.perf_counter() - began, row["loss"]]), file=sys.stderr, flush=True)
    if not sys.stdin.readline():
        raise SystemExit
    began = time.perf_counter()
"""
OURS = "from sparse_bitnet.training.trainer import train\ntrain(config, on_step=on_step)\n"
PLAIN = """
import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM as Auto
from sparse_bitnet.data.loader import TokenLoader
from sparse_bitnet.data.shards import TokenDataset
text, (folder, _, file) = TokenDataset.open(config.data, "train"), config.init.rpartition("/")
folder, file = (folder, file) if file.endswith(".gguf") else (config.init, None)
loader = TokenLoader(text, sequence_length=config.sequence_length, batch_size=config.batch_size, seed=0)
model = Auto.from_pretrained(folder, gguf_file=file, dtype=torch.float32).train()
teacher = Auto.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16).eval()
optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)
for step in range(config.steps):
    input_ids, labels = loader.batch(step)[:2]
    with torch.autocast("cpu", torch.bfloat16):
        own = model(input_ids=input_ids, use_cache=False).logits.float().flatten(0, 1)
        if config.teacher:
            with torch.no_grad():
                wanted = teacher(input_ids=input_ids, use_cache=False).logits.float().flatten(0, 1)
            terms = own.log_softmax(-1), wanted.log_softmax(-1)
            loss = kl_div(*terms, reduction="batchmean", log_target=True)
        else:
            loss = cross_entropy(own, labels.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    on_step({"loss": loss.item()})
"""


def report(side: subprocess.Popen) -> tuple[float, float]:
    """Return seconds and loss of the next step of a side."""
    said = []
    for line in side.stderr:
        if line[:1] == "[" and line[1:2].isdigit():
            return tuple(json.loads(line))
        said.append(line)
    raise SystemExit("".join(said))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("model")
    parser.add_argument("--format", default="ternary-6:8,quantizer=per-group:size=64")
    parser.add_argument("--distill", action="store_true")
    parser.add_argument("--turns", type=int, default=16)
    options = parser.parse_args()
    config = dict(data=str(options.data), init=options.model, format=options.format, steps=10**4)
    config |= dict(batch_size=4, sequence_length=512, learning_rate=5e-4, threads=os.cpu_count())
    config |= dict(layer_metrics_every=0, checkpoint_every=0, validation_tokens=1, compile="on")
    if options.distill:
        config |= dict(teacher=options.model, reconstruction_windows=0)
    sides, turns = [], []
    with tempfile.TemporaryDirectory() as folder:
        for code in (OURS, PLAIN):
            text = json.dumps({**config, "out": f"{folder}/run"})
            pipes = {name: subprocess.PIPE for name in ("stdin", "stderr")}
            command = [sys.executable, "-c", CHILD + code, text]
            sides.append(subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL, **pipes))
            report(sides[-1])
        for _ in range(options.turns):
            turns.append([])
            for side in sides:
                side.stdin.write("\n")
                side.stdin.flush()
                turns[-1].append(report(side)[0])
        for side in sides:
            side.kill()
    row = {
        "model": Path(options.model).stem,
        "method": "distill" if options.distill else "train",
        "format": options.format,
        "ours": 2048 / statistics.median(ours for ours, _ in turns),
        "transformers": 2048 / statistics.median(plain for _, plain in turns),
        "times_as_fast": statistics.median(plain / ours for ours, plain in turns),
    }
    record("training-peers", [row], threads=os.cpu_count())
    print(row)


if __name__ == "__main__":
    main()
