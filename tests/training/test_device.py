# SPDX-License-Identifier: Apache-2.0
"""Settings of torch that a run makes before it begins."""

import pytest
import torch

from sparse_bitnet.errors import UserError
from sparse_bitnet.training import device
from sparse_bitnet.training.config import TrainConfig


@pytest.mark.parametrize(
    ("vendor", "flags", "fast"),
    [
        ("GenuineIntel", "avx512f avx512_bf16 amx_bf16", True),
        ("GenuineIntel", "avx512f avx512_bf16", False),
        ("AuthenticAMD", "avx512f avx512_bf16", True),
        ("AuthenticAMD", "avx2", False),
    ],
)
def test_bfloat16_is_the_type_where_its_products_are_faster(vendor, flags, fast, monkeypatch):
    monkeypatch.setattr(device, "cpu_info", lambda: {"vendor_id": vendor, "flags": flags})
    wanted = torch.bfloat16 if fast else torch.float32
    assert device.resolve_dtype("auto", torch.device("cpu")) == wanted


def test_long_runs_on_a_cpu_are_compiled(monkeypatch):
    cpu, million = torch.device("cpu"), 1_000_000
    monkeypatch.setattr(device.shutil, "which", lambda name: name)
    assert device.compiles(TrainConfig(compile="on", steps=1), cpu, million)
    assert not device.compiles(TrainConfig(compile="off", steps=10**6), cpu, million)
    assert not device.compiles(TrainConfig(steps=100), cpu, million)
    assert device.compiles(TrainConfig(steps=10_000), cpu, million)
    assert not device.compiles(TrainConfig(steps=10_000), torch.device("cuda"), million)
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    assert not device.compiles(TrainConfig(steps=10_000), cpu, million)
    with pytest.raises(UserError, match="--compile on: no C"):
        device.compiles(TrainConfig(compile="on"), cpu, million)
