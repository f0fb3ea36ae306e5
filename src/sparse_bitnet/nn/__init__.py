# SPDX-License-Identifier: Apache-2.0
"""The layer, and what turns a model's linear layers into it."""
