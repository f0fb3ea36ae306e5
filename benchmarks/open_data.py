# SPDX-License-Identifier: Apache-2.0
"""How long a training run takes to open large prepared data, and how much memory that needs.

    python benchmarks/open_data.py [--tokens 5e10] [--record]

The shards are sparse files: as long as real ones, all zeros, nothing of them on the disk. A process
opens the data, makes its part of a global batch from the beginning, the middle and the end of the order,
and is measured from before the opening. `--record` adds the row to benchmarks/results/.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from recorded import RESULTS

from sparse_bitnet.bench.child import resident_bytes
from sparse_bitnet.bench.record import append_records, result_file, where_measured
from sparse_bitnet.data.checksums import record_written
from sparse_bitnet.data.loader import TokenLoader
from sparse_bitnet.data.manifest import Manifest, Shard, SplitManifest
from sparse_bitnet.data.shards import TokenDataset

SHARD_TOKENS = 1 << 27


def write_sparse(folder: Path, tokens: int) -> int:
    """Prepared data of at least so many tokens that takes no space; returns the number of shards."""
    count = -(-tokens // SHARD_TOKENS)
    shards = tuple(
        Shard(file=f"train-{number:05}.bin", tokens=SHARD_TOKENS, crc32="00000000")
        for number in range(count)
    )
    for shard in shards:
        with open(folder / shard.file, "wb") as file:
            file.truncate(2 * shard.tokens)
    split = SplitManifest(documents=1, tokens=count * SHARD_TOKENS, text_bytes=1, shards=shards)
    Manifest(
        version=1,
        settings={},
        tokenizer_hash="",
        vocab_size=50_000,
        dtype="uint16",
        eos_token_id=0,
        splits={"train": split},
    ).write(folder)
    record_written(folder, shards)
    return count


def measure(folder: Path, shards: int) -> dict[str, Any]:
    """A row of the report."""
    before, began = resident_bytes() or 0, time.perf_counter()
    data = TokenDataset.open(folder)
    opened = time.perf_counter() - began
    loader = TokenLoader(data, sequence_length=2048, batch_size=512, seed=0, rank=3, world_size=64)
    steps = len(data) // (2048 * 512)
    for step in (0, steps // 2, steps - 1):
        loader.cut.batch(loader.windows_of(step))
    return {
        "tokens": len(data),
        "shards": shards,
        "bytes": 2 * len(data),
        "open_seconds": opened,
        "batches_seconds": time.perf_counter() - began - opened,
        "memory_bytes": (resident_bytes() or 0) - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=float, default=5e10)
    parser.add_argument("--record", action="store_true", help="add the row to benchmarks/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        row = measure(Path(name), write_sparse(Path(name), round(options.tokens)))
    print(json.dumps(row, indent=2))
    if options.record:
        where = where_measured()
        append_records(result_file(RESULTS, "open-data", where), [row], where)


if __name__ == "__main__":
    main()
