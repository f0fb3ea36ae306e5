# SPDX-License-Identifier: Apache-2.0
"""How fast a machine multiplies large matrices: what the speed of training is a share of."""

import json
import time

import torch

from sparse_bitnet.provenance import hardware, versions
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import resolve_device
from sparse_bitnet_paper.results import MACHINES, Results

_SIDE, _SECONDS = 1024, 0.5


def record_machine(results: Results, recipe: TrainConfig) -> None:
    """Add this machine to machines.jsonl, or raise its rate: other work can only lower what is seen."""
    device, precision = resolve_device(recipe.device), results.setting["precision"]
    threads = recipe.threads or torch.get_num_threads()
    machine = {
        "hardware": hardware(),
        "threads": threads,
        "precision": precision,
    }
    known = {tuple(each[name] for name in machine): each for each in results.machines}
    before = known.get(tuple(machine.values()), {}).get("operations_per_second", 0.0)
    rate = product_rate(device, getattr(torch, precision), threads)
    if rate > before:
        known[tuple(machine.values())] = {
            **machine,
            "operations_per_second": rate,
            "versions": versions(),
        }
        results.write(MACHINES, "".join(json.dumps(each) + "\n" for each in known.values()))


def product_rate(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """Operations a second, a multiply-add being two, of the fastest product in half a second."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    a = torch.ones(_SIDE, _SIDE, dtype=dtype, device=device)
    # Processor time, so that whatever else runs now does not count.
    clock = (lambda: time.process_time() / threads) if device.type == "cpu" else time.perf_counter
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        began = clock()
        (a @ a)[0, 0].item()
        best = min(best, clock() - began)
    torch.set_num_threads(before)
    return 2 * _SIDE**3 / best
