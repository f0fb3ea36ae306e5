# SPDX-License-Identifier: Apache-2.0
"""How long runs take: by runs that have ended here, or by the share of a machine's products that training
reaches."""

import time
from functools import cache

import pandas as pd

from sparse_bitnet.presets import PRESETS
from sparse_bitnet.provenance import hardware
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.footprint import UTILISATION, flops_per_token

OVERHEAD = 1.1
"""Validation, checkpoints and measuring, over the optimiser steps alone."""


def flops(config: TrainConfig, vocab_size: int | None = None) -> float:
    """Return the operations of a whole run; masks are simulated, so all formats take the same."""
    tokens = float(config.steps * config.tokens_per_step)
    return tokens * flops_per_token(PRESETS[config.model], config.sequence_length, vocab_size)


def seconds(config: TrainConfig, rows: pd.DataFrame, vocab_size: int | None = None) -> float:
    """Return what a run takes here: by the rows of runs that ended on this machine, of its model or else
    of any; before the first, by the machine's products."""
    here = rows[rows.provenance.str["hardware"] == hardware()]
    same = here[here.model == config.model]
    ended = same if len(same) else here
    if ended.empty:
        rate = UTILISATION * product_rate(config.device, config.threads, "float32")
        return OVERHEAD * flops(config, vocab_size) / rate
    work = sum(
        row.tokens * flops_per_token(PRESETS[row.model], row.config["sequence_length"], vocab_size)
        for row in ended.itertuples()
    )
    return OVERHEAD * flops(config, vocab_size) * ended.seconds.sum() / work


@cache
def product_rate(device_name: str, threads: int | None, precision: str) -> float:
    """Return operations a second, a multiply-add being two, of the fastest product in half a second.

    Args:
        device_name: as in a `TrainConfig`.
        threads: likewise.
        precision: a dtype of torch.
    """
    import torch

    from sparse_bitnet.training.device import resolve_device

    device, before = resolve_device(device_name), torch.get_num_threads()
    threads, side = threads or before, 1024
    torch.set_num_threads(threads)
    a = torch.ones(side, side, dtype=getattr(torch, precision), device=device)
    # Processor time, so that whatever else runs now does not count.
    clock = (lambda: time.process_time() / threads) if device.type == "cpu" else time.perf_counter
    best, end = float("inf"), time.perf_counter() + 0.5
    while time.perf_counter() < end:
        began = clock()
        (a @ a)[0, 0].item()
        best = min(best, clock() - began)
    torch.set_num_threads(before)
    return 2 * side**3 / best
