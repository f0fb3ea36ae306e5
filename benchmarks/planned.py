# SPDX-License-Identifier: Apache-2.0
"""What `sparse-bitnet plan` says of small runs, beside what their processes hold and send.

    python benchmarks/planned.py [--record]

Runs of several processes on the CPU (gloo), three steps each. Memory: most bytes that torch's allocator
had given out at a time. Received: bytes that the collectives of a step bring to a process. What the plan
counts for a GPU's runtime is left out. `--record` writes the rows to benchmarks/results/.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from recorded import RESULTS
from world_processes import MEASURED, Worlds, collectives, memory

from sparse_bitnet.bench.record import append_records, result_file, where_measured
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.presets import PRESETS
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.job import Job
from sparse_bitnet.training.run_estimate import plan

RUNS: list[tuple[str, int, int | None, int]] = [
    (format, processes, shard, micro_batch_size)
    for format in ("ternary-6:8", "full-6:8")
    for processes, shard, micro_batch_size in ((1, None, 4), (2, None, 4), (2, None, 2), (4, 2, 2))
]
"""Format, processes, those over which the model is split, sequences a forward."""


def measure(
    worlds: Worlds, folder: Path, format: str, size: int, shard: int | None, micro: int
) -> dict[str, Any]:
    """A row of the report."""
    job = Job(
        model="qwen2.5-memory",
        format=format,
        gpus=size,
        shard=shard,
        batch_size=4 * size,
        micro_batch_size=micro,
        sequence_length=128,
    )

    def outputs(what: str) -> list[str]:
        config = TrainConfig(
            model=job.model,
            format=format,
            data=str(folder / "data"),
            out=str(folder / f"{format}-{size}-{micro}-{what}"),
            steps=3,
            batch_size=job.batch_size,
            micro_batch_size=micro,
            sequence_length=job.sequence_length,
            vocab_size=MEASURED.vocab_size,
            loss_chunk_tokens=512,
            precision="bf16",
            checkpoint_every=0,
            layer_metrics_every=0,
            validation_tokens=256,
            threads=1,
        )
        outcomes = worlds.run(config, size=size, shard=shard, measure=what)
        if any(code for code, _ in outcomes):
            raise RuntimeError(outcomes)
        return [output for _, output in outcomes]

    held = max(memory(output) for output in outputs("memory"))
    sent = collectives(outputs("collectives")[0])[-1]
    found = plan(job)
    return {
        "format": format,
        "processes": size,
        "shard": shard,
        "micro_batch_size": micro,
        "memory_bytes": held,
        "planned_memory_bytes": round(found.memory_bytes - found.memory["runtime"]),
        "received_bytes": sum(one["bytes"] for one in sent.values()),
        "planned_received_bytes": round(sum(found.traffic.values())),
        "planned_memory": {name: round(size) for name, size in found.memory.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="write rows to benchmarks/results")
    options = parser.parse_args()
    PRESETS["qwen2.5-memory"] = MEASURED
    rows = []
    with tempfile.TemporaryDirectory() as name, Worlds() as worlds:
        folder = Path(name)
        source = parse_source("python-stdlib", limit_bytes=600_000)
        prepare(source, folder / "data", vocab_size=512)
        for run in RUNS:
            row = measure(worlds, folder, *run)
            rows.append(row)
            print(
                f"{row['format']:12} {row['processes']} processes, {row['micro_batch_size']} a forward: "
                f"{row['memory_bytes'] / 1e6:.2f} MB, planned {row['planned_memory_bytes'] / 1e6:.2f}; "
                f"received {row['received_bytes'] / 1e6:.3f} MB, "
                f"planned {row['planned_received_bytes'] / 1e6:.3f}",
                flush=True,
            )
    if options.record:
        where = where_measured()
        append_records(result_file(RESULTS, "planned", where), rows, where)


if __name__ == "__main__":
    main()
