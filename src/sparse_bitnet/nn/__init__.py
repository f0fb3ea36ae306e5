# SPDX-License-Identifier: Apache-2.0
"""`SparseBitLinear`, and the conversion of a model's linear layers to it."""
