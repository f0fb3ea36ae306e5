# SPDX-License-Identifier: Apache-2.0
"""The aarch64 code on any machine: cross-compiled, and run under an emulator."""

from pathlib import Path

import pytest

from cross_compiled import emulated

pytestmark = pytest.mark.slow


def test_neon_kernels_return_the_bits_of_the_generic_ones(tmp_path_factory):
    assert (
        emulated(Path(__file__).parent / "neon_driver.cpp", tmp_path_factory) == "0 differences\n"
    )
