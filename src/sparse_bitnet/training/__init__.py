# SPDX-License-Identifier: Apache-2.0
"""Training: configuration, recipes, schedules, losses, the loop, checkpoints, metrics."""
