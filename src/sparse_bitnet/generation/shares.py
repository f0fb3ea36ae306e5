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
        prefill_slice: prompt tokens in all if one generates, who waits for them; of two that do, one
            fewer, down to a quarter, so that a step of many is not twice as long with prompts;
        prefill_alone: if none does.
    """
    prompts = [generation for generation in generations if generation.missing > 1]
    generating = len(generations) - len(prompts)
    fewer = max(prefill_slice - generating // 2, prefill_slice // 4, 1)
    budget = fewer if generating else prefill_alone
    sizes: dict[Generation, int] = {}
    # Smallest first, so that what short prompts leave over goes to the long ones.
    for index, generation in enumerate(sorted(prompts, key=lambda g: g.missing)):
        part = max(budget // (len(prompts) - index), 1)
        sizes[generation] = min(part, generation.missing)
        budget -= sizes[generation]
    return [(generation, sizes.get(generation, 1)) for generation in generations]
