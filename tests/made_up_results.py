# SPDX-License-Identifier: Apache-2.0
"""Made-up results of finished experiments, for which the right verdicts are known."""

import dataclasses
import json
import math

from sparse_bitnet_paper.paper import paper
from sparse_bitnet_paper.results import ROWS
from sparse_bitnet_paper.scales import find_scale

SCALE = find_scale("cpu")
SIZES = dict(zip((size.model for size in SCALE.sizes), ("0.5B", "1.5B", "3B"), strict=True))
NOISE = (0.0, 0.004, -0.003)

COUNTS = {"weights": 640, "near_zero": 200, "groups": 80} | {
    "histogram": [4] * 160,
    "thresholds": [1] * 80,
}
WEIGHTS = {
    "steps": [0, 8],
    "layers": ["layers.0.q_proj"],
    "near_zero_mass": [[0.31], [0.32]],
    "final": {"all": COUNTS, "mid": COUNTS, "late": COUNTS},
}


def paper_perplexity(config):
    """Return the paper's perplexity for this run."""
    weight, _, rest = config.format.partition("-")
    pattern, _, option = rest.partition(",")
    if option:
        return {"mask_source=ternary": 32.23}.get(option, 26.9)
    if config.sparse_fraction < 1:
        return paper()["schedule"][f"{100 * config.sparse_fraction:.0f}"]
    if config.model == SCALE.main:
        return paper()["sweep"][weight][pattern]
    return paper()["perplexity"][SIZES[config.model]][config.format]


def flip_curve(format):
    """Decaying; less without gradient or with a masked scale, more and noisy with ternary masks."""
    factor = {"mask_gradient=masked": 0.25, "mask_source=ternary": 2.0, "scale_source=masked": 0.5}
    of_format = factor.get(format.partition(",")[2], 1.0)
    noise = 0.25 if "mask_source=ternary" in format else 0.05
    for place in range(100):
        rate = of_format * 0.02 * 0.02 ** (place / 100)
        yield {"step": 10 * place + 10, "loss": 3, "flip_rate": rate, "flip_noise": noise * rate}


def row_of(run, perplexity, **changes):
    """A row of results.jsonl."""
    config, ternary = run.config, run.config.format.startswith("ternary")
    start = 0.31 + 0.001 * config.seed
    values = {
        "name": run.name,
        **{key: getattr(config, key) for key in ("model", "format", "seed", "steps")},
        "recipe": "",
        "tokens": config.steps * config.tokens_per_step,
        "epochs": 1.0,
        "tokens_per_weight": 1.0,
        "perplexity": perplexity,
        "loss": math.log(perplexity),
        "validation_tokens": 100,
        "other_text": {"name": "web", "tokens": 9, "perplexity": 2 * perplexity},
        "training_loss": 3.0,
        "zero_fraction": {"full-8:8": 0.0, "full-6:8": 0.25}.get(config.format, 0.4),
        "code_zero_fraction": 0.3,
        "near_zero_start": start if run.is_dense else None,
        "near_zero_mass": start + (-0.08 if ternary else 0.01),
        "flip_rate": None if run.is_dense else 0.00123,
        "seconds": 60.0,
        "tokens_per_second": 1.0,
        "product_share": 0.25,
        "device": "cpu",
        "precision": "float32",
        "checkpoint": f"runs/{run.name}/final",
        "config": dataclasses.asdict(config),
        "provenance": {
            "hardware": "a machine",
            "threads": 1,
            "commit": "c",
            "date": "2026-01-02",
            "versions": {"torch": "1"},
        },
    }
    return values | changes


def read_rows(folder):
    """The lines of a results.jsonl."""
    return [json.loads(line) for line in (folder / ROWS).read_text("utf-8").splitlines()]
