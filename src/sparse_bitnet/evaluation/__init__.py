# SPDX-License-Identifier: Apache-2.0
"""What a trained model is worth on text it has not seen."""
