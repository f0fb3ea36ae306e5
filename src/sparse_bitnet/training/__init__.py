# SPDX-License-Identifier: Apache-2.0
"""Pretraining: configuration, recipes, schedule, loss, loop, checkpoints, metrics."""
