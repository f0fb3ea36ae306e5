# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a trained model: held-out perplexity and lm-eval tasks."""
