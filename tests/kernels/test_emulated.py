# SPDX-License-Identifier: Apache-2.0
"""Instructions that this machine lacks, emulated: those of aarch64 as a whole, and AMX's tiles, which
are also run by the processor where it has them."""

import platform
from pathlib import Path

import pytest

from cross_compiled import emulated, native
from sparse_bitnet import _cpu

pytestmark = pytest.mark.slow
DRIVER = Path(__file__).parent / "isa_driver.cpp"


def summary(printed, record_property):
    """Return the driver's last line; the lines before it list the instruction sets that it ran."""
    *covered, differences = printed.splitlines()
    for isa in covered:
        record_property("isa", isa)
    return differences


def test_aarch64_kernels_return_the_bits_of_the_generic_ones(tmp_path_factory, record_property):
    printed = emulated(DRIVER, tmp_path_factory)
    assert summary(printed, record_property) == "0 differences"


@pytest.mark.skipif(
    platform.system() != "Linux" or "avx512vbmi" not in _cpu.supported_isas(),
    reason="what is around AMX's instructions is AVX-512 with VBMI",
)
def test_the_machine_code_for_amx_returns_the_bits_of_the_generic_kernels(
    tmp_path_factory, record_property
):
    printed = native(DRIVER, tmp_path_factory)
    assert summary(printed, record_property) == "0 differences"
    assert ("amx_int8" in printed.split("\n")) == ("amx_int8" in _cpu.supported_isas())
