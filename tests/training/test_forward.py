# SPDX-License-Identifier: Apache-2.0
"""`--forward int8` trains as `--forward fake` does."""

import dataclasses

import pytest
from small_runs import losses

from sparse_bitnet.training.trainer import train


def trained(config, name: str, tmp_path, **changes) -> list[float]:
    config = dataclasses.replace(config, out=str(tmp_path / name), **changes)
    train(config)
    return losses(config)


def test_loss_curves_of_both_forwards_agree(small_run, tmp_path):
    config = small_run(steps=20, checkpoint_every=0, learning_rate=1e-3)
    for precision, tolerance in (("float32", 0.0), ("bf16", 2e-2)):
        fake = trained(config, f"fake-{precision}", tmp_path, precision=precision)
        integer = trained(
            config, f"int8-{precision}", tmp_path, precision=precision, forward="int8"
        )
        assert len(fake) == 20
        assert integer == pytest.approx(fake, abs=tolerance)
