# SPDX-License-Identifier: Apache-2.0
"""Ternary weights hidden in floats, and the fewest scales for them."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.rotation import Rotation
from sparse_bitnet.packing.ternary import ternary_of_floats, with_fewest_scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [0, 512, 256, 128, 64, 32])
def test_floats_come_back_exactly(random_codes: Any, dtype: torch.dtype, group: int) -> None:
    codes = random_codes(6, 512, group)
    shape = (6, 512 // group) if group else (1, 1)
    scales = (torch.rand(shape) + 0.5).to(dtype)
    weight = codes.to(dtype).view(6, scales.shape[1], -1) * scales[..., None]
    ternary = ternary_of_floats(weight.reshape(6, 512), "layer")
    assert ternary is not None
    assert torch.equal(ternary.codes, codes)
    assert torch.equal(ternary.values(), weight.reshape(6, 512).float())
    assert ternary.weight_scale.shape == (shape if group else ())
    assert ternary.weight_scale.dtype == (dtype if group else torch.float32)


def test_all_zero_runs_rows_and_matrices_are_exact(random_codes: Any) -> None:
    codes = random_codes(4, 256, 0)
    codes[1], codes[2, :128] = 0, 0
    zero = torch.zeros(4, 2)
    scales = torch.tensor([0.5, 0.5])
    ternary = with_fewest_scales(
        codes, torch.where(codes.view(4, 2, 128).any(-1), scales, zero), "layer"
    )
    assert ternary.weight_scale == 0.5
    nothing = with_fewest_scales(codes * 0, zero, "layer")
    assert nothing.weight_scale == 1
    assert not nothing.values().any()


def test_negative_scales_turn_the_codes(random_codes: Any) -> None:
    codes = random_codes(4, 256, 0)
    ternary = with_fewest_scales(codes, torch.tensor([[-0.5]]), "layer")
    assert ternary.weight_scale == 0.5
    assert torch.equal(ternary.codes, -codes)


def test_floats_that_are_not_ternary_give_none() -> None:
    torch.manual_seed(0)
    assert ternary_of_floats(torch.randn(4, 64), "layer") is None
    four = torch.tensor([[0.0, 1.0, -1.0, 2.0] * 16])
    assert ternary_of_floats(four, "layer") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, s: (c + 1, s), "layer one is not ternary: it has codes from 0 to 2"),
        (
            lambda codes, scales: (codes, scales * float("nan")),
            "layer one: its weight scale is not finite",
        ),
        (lambda codes, scales: (codes, scales * 0), "layer one: its weight scale is zero"),
        (lambda codes, scales: (codes, torch.rand(4, 16) + 1), "a scale for every 16 weights"),
    ],
)
def test_invalid_codes_and_scales_are_refused(random_codes: Any, change: Any, message: str) -> None:
    codes, scales = change(random_codes(4, 256, 0), torch.ones(4, 1))
    with pytest.raises(UserError, match=message):
        with_fewest_scales(codes, scales, "one")
    with pytest.raises(UserError, match="layer one: its weights are not finite"):
        ternary_of_floats(torch.full((2, 64), float("inf")), "one")


@pytest.mark.parametrize(("width", "block"), [(4, 4), (96, 16), (24, 1), (6144, 1024)])
def test_rotated_rows_are_those_from_before(width: int, block: int) -> None:
    signs = {width: np.random.default_rng(1).bytes(-(-width // 8)), 4: b"\x02"}
    rotation = Rotation(block=block, signs=signs, embedding=False, head=False)
    stored = torch.randint(-1, 2, (20, width)).float()
    transform = np.kron(np.eye(width // block), hadamard(block) / block**0.5)
    before = stored.double().numpy() @ transform * rotation.values(width)
    np.testing.assert_allclose(rotation.rows(stored), before, atol=1e-5)
    torch.testing.assert_close(rotation.inputs(rotation.rows(stored)), stored, rtol=0, atol=1e-5)
    if width == 4:
        assert rotation.inputs(torch.tensor([1.0, -2, 3, 4]).bfloat16()).tolist() == [5, -1, -2, 0]
