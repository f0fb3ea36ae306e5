"""Pretraining: configuration, recipes, schedule, loss, loop, checkpoints, metrics."""
