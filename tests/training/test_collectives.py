# SPDX-License-Identifier: Apache-2.0
"""What the processes of a run send each other in a step."""

from typing import Any

import pytest

from world_processes import TINY, Worlds, collectives

BLOCKS = TINY.num_hidden_layers


def of_second_step(worlds: Worlds, config: Any, **world: Any) -> dict[str, dict[str, int]]:
    outcomes = worlds.run(config, measure="collectives", **world)
    assert [code for code, _ in outcomes] == [0] * world["size"], outcomes
    sent = [collectives(output)[1] for _, output in outcomes]
    assert all(one == sent[0] for one in sent)
    return sent[0]


def times(sent: dict[str, dict[str, int]]) -> tuple[int, int, int]:
    names = ("all_gather_single", "reduce_scatter_single", "all_reduce")
    return tuple(sent[name]["times"] for name in names)  # type: ignore[return-value]


# The sums over all: scales, selection counts, loss.
SUMS = 3


@pytest.mark.parametrize("micro", [1, 6], ids=["six forwards a step", "one forward a step"])
def test_ternary_layers_are_gathered_once_a_step(worlds, run_config, micro):
    config = run_config("run", steps=2, micro_batch_size=micro, checkpoint_every=0)
    assert times(of_second_step(worlds, config, size=2)) == (BLOCKS + 1, BLOCKS + 1, SUMS)


def test_full_precision_layers_are_gathered_for_each_pass_and_gradients_sent_once(
    worlds, run_config
):
    config = run_config("run", steps=2, format="full-6:8", checkpoint_every=0)
    forwards = 12 // 2 // 2
    gathers = 2 * forwards * BLOCKS + 1
    assert times(of_second_step(worlds, config, size=2)) == (gathers, BLOCKS + 1, SUMS - 1)


def test_replicas_sum_their_gradients_once_a_step(worlds, run_config):
    config = run_config("run", steps=2, micro_batch_size=1, checkpoint_every=0)
    sent = of_second_step(worlds, config, size=4, shard=2)
    assert times(sent) == (BLOCKS + 1, BLOCKS + 1, BLOCKS + 1 + SUMS)
