# SPDX-License-Identifier: Apache-2.0
"""Packed checkpoints: ternary codes at 1 to 2 bits a weight, exact, in a safetensors file."""
