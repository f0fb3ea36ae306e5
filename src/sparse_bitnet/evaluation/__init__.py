# SPDX-License-Identifier: Apache-2.0
"""How well a trained model predicts text that it has not seen."""
