# SPDX-License-Identifier: Apache-2.0
"""What a format names: how weights are ranked, quantised and phased in. Free of torch."""

from sparse_bitnet.variants import built_in as built_in
