# SPDX-License-Identifier: Apache-2.0
"""The kernels as PyTorch ops: which inputs they take, the dispatcher's contracts, the choice."""

import sys

import pytest
import torch

from one_process import run_python
from sparse_bitnet.errors import UserError
from sparse_bitnet.ops import backends
from sparse_bitnet.ops.nm_mask import nm_mask_reference
from sparse_bitnet.ops.quantize_int8 import quantize_int8_reference
from sparse_bitnet.ops.select_ternary import absmean_reference, select_ternary_reference

pytest.importorskip("sparse_bitnet._cpu", reason="the extension is not built")
cpu = pytest.importorskip("sparse_bitnet.ops.cpu")
ops = torch.ops.sparse_bitnet

SCALE = torch.tensor(0.7)
WEIGHT = torch.randn(6, 48, generator=torch.Generator().manual_seed(0))


def cpu_status() -> backends.KernelStatus:
    return next(row for row in backends.status() if row.name == "cpu")


pytestmark = pytest.mark.skipif(
    not cpu_status().in_use, reason="SPARSE_BITNET_KERNEL chooses the reference"
)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (ops.nm_mask.default, (WEIGHT, 6, 8)),
        (ops.nm_mask.default, (WEIGHT.t().contiguous().t(), 3, 8)),
        (ops.nm_mask.default, (WEIGHT, 8, 8)),
        (ops.absmean.default, (WEIGHT,)),
        (ops.select_ternary.default, (WEIGHT, SCALE, 6, 8)),
        (ops.select_ternary.default, (WEIGHT, SCALE, 1, 1)),
        (ops.quantize_int8.default, (WEIGHT,)),
    ],
)
def test_ops_pass_opcheck(op, arguments):
    torch.library.opcheck(op, arguments)


@pytest.mark.parametrize(
    "weight",
    [
        *(WEIGHT.double(), WEIGHT.half(), WEIGHT.bfloat16(), WEIGHT.t().contiguous().t()),
        *(WEIGHT[:, ::2], WEIGHT[1:, :24], WEIGHT.reshape(2, 3, 48), WEIGHT[0], WEIGHT[:0]),
    ],
)
def test_every_input_gives_what_the_reference_gives(weight):
    codes, mask = ops.select_ternary(weight, SCALE, 3, 8)
    expected_codes, expected_mask = select_ternary_reference(weight, SCALE, 3, 8)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(mask, expected_mask)
    assert torch.equal(ops.nm_mask(weight, 3, 8), expected_mask)
    if weight.numel():
        assert torch.equal(ops.absmean(weight), absmean_reference(weight))
        for ours, theirs in zip(
            ops.quantize_int8(weight), quantize_int8_reference(weight), strict=True
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("scale", [2.0**-126, 3 * 2.0**-149, -0.7, 0.0, float("nan"), float("inf")])
def test_unusual_scales_go_to_the_reference(scale):
    weight = torch.tensor([[1e-38, 2.0**-127, 2.0**-149, -(2.0**-148), 0.0, 1.0, -0.4, 0.35]])
    for weight_scale in (torch.tensor(scale), torch.tensor(scale, dtype=torch.float64)):
        ours, _ = ops.select_ternary(weight, weight_scale, 1, 1)
        theirs, _ = select_ternary_reference(weight, weight_scale, 1, 1)
        assert torch.equal(ours, theirs)


def test_groups_beyond_the_kernels_go_to_the_reference():
    weight = torch.randn(2, 80)
    assert torch.equal(ops.nm_mask(weight, 9, 40), nm_mask_reference(weight, 9, 40))
    for op, *sizes in ((ops.nm_mask, 3, 7), (ops.quantize_groups, 32), (ops.hadamard, 32)):
        with pytest.raises(RuntimeError):
            op(weight, *sizes)


@pytest.fixture
def unloaded(monkeypatch):
    backends.cpu_kernels.cache_clear()
    yield monkeypatch
    backends.cpu_kernels.cache_clear()


def test_the_reference_can_be_chosen(unloaded):
    unloaded.setenv("SPARSE_BITNET_KERNEL", "reference")
    assert cpu_status() == backends.KernelStatus("cpu", False, "SPARSE_BITNET_KERNEL=reference")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_choice_without_the_hardware_is_an_error_that_says_why(monkeypatch):
    monkeypatch.setenv("SPARSE_BITNET_KERNEL", "triton")
    with pytest.raises(UserError, match=r"SPARSE_BITNET_KERNEL=triton: .*CUDA"):
        backends.check_choice()


def test_a_missing_extension_is_reported_or_refused(unloaded):
    unloaded.delitem(sys.modules, "sparse_bitnet.ops.cpu")
    unloaded.setitem(sys.modules, "sparse_bitnet.ops.cpu", None)
    unloaded.setenv("SPARSE_BITNET_KERNEL", "auto")
    assert not cpu_status().in_use
    assert "compiler" in cpu_status().reason
    backends.cpu_kernels.cache_clear()
    unloaded.setenv("SPARSE_BITNET_KERNEL", "cpu")
    with pytest.raises(UserError, match=r"cpu: the extension .* reinstall"):
        backends.check_choice()


def test_an_instruction_set_this_machine_lacks_is_refused(unloaded):
    unloaded.setenv("SPARSE_BITNET_ISA", "sse9")
    unloaded.delenv("SPARSE_BITNET_KERNEL", raising=False)
    with pytest.raises(UserError, match=r"SPARSE_BITNET_ISA=sse9: this machine has .*generic"):
        backends.check_choice()


def test_without_openmp_the_calling_thread_does_the_work():
    """In a process that never loads PyTorch there is no OpenMP runtime to borrow threads from."""
    code = """
import array
from sparse_bitnet import _cpu
weight = array.array("f", range(800_000))
mask = bytearray(800_000)
view = array.array("B", mask)
_cpu.Kernels.choose().select_ternary(
    weight.buffer_info()[0], _cpu.Dtype.float32, 1.0, 100_000, 6, 8, 0, view.buffer_info()[0], 2
)
assert bytes(view) == bytes([0, 0, 1, 1, 1, 1, 1, 1]) * 100_000
"""
    run_python(code)
