# SPDX-License-Identifier: Apache-2.0
"""Functions that a format names: they rank, quantise and phase in weights. Free of torch."""

from sparse_bitnet.variants import built_in as built_in
