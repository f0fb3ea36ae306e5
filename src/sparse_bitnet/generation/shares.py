# SPDX-License-Identifier: Apache-2.0
"""How many tokens of which generation a step computes."""

from collections.abc import Sequence

from sparse_bitnet.generation.request import Generation


def scored_slice(vocab_size: int) -> int:
    """Tokens of one forward where nobody waits: their logits take at most 128 MiB."""
    return max(1, min(512, (1 << 25) // vocab_size))


def shares(
    generations: Sequence[Generation], prefill_slice: int, prefill_alone: int
) -> list[tuple[Generation, int]]:
    """Tokens of each to compute in a step: the one of those that generate, equal parts of a slice for
    those whose prompts are not through.

    Args:
        prefill_slice: prompt tokens in all if some generate, who wait for them;
        prefill_alone: if none does.
    """
    prompts = [generation for generation in generations if generation.missing > 1]
    budget = prefill_slice if len(prompts) < len(generations) else prefill_alone
    sizes: dict[Generation, int] = {}
    # Smallest first, so that what short prompts leave over goes to the long ones.
    for index, generation in enumerate(sorted(prompts, key=lambda g: g.missing)):
        part = max(budget // (len(prompts) - index), 1)
        sizes[generation] = min(part, generation.missing)
        budget -= sizes[generation]
    return [(generation, sizes.get(generation, 1)) for generation in generations]
