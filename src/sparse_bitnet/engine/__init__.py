# SPDX-License-Identifier: Apache-2.0
"""The CPU engine: packed weights, caches and logits behind one Python class."""
