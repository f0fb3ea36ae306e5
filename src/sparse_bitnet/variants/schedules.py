# SPDX-License-Identifier: Apache-2.0
"""From the dense, full-precision model to the format, step by step."""

from sparse_bitnet.errors import UserError
from sparse_bitnet.variants.registry import register_schedule


@register_schedule("dense-to-sparse")
def dense_to_sparse(progress: float, n: int, m: int, *, rho: float = 1.0) -> tuple[int, float]:
    """Dense, then n:m for the last `rho` of the steps (the paper, section 4.4). With rho=1 the run's
    `sparse_fraction` stands for it."""
    _share("rho", rho)
    return (n if progress >= 1 - rho - 1e-12 else m), 1.0


@register_schedule("gradual")
def gradual(progress: float, n: int, m: int, *, until: float = 0.5) -> tuple[int, float]:
    """m:m, then one weight of a group fewer at a time, n:m from `until` of the steps on (Zhu and Gupta,
    "To prune, or not to prune", 2017, with equal steps)."""
    _share("until", until)
    if progress >= until:
        return n, 1.0
    return m - int(progress / until * (m - n)), 1.0


@register_schedule("lambda", blends=True)
def lambda_warmup(progress: float, n: int, m: int, *, until: float = 0.25) -> tuple[int, float]:
    """Pruned from the start; weights and activations go from full precision to quantised ones in a
    straight line up to `until` of the steps (Hugging Face, "Fine-tuning LLMs to 1.58bit", 2024)."""
    _share("until", until)
    return n, 1.0 if progress >= until else progress / until


def _share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UserError(f"schedule {name}={value}: must lie in 0..1")
