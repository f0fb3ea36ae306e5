# SPDX-License-Identifier: Apache-2.0
"""Export of trained models to the formats of other tools, import from them, and packing."""
