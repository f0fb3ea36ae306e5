# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the engine: random models of real shapes, the roofline of the machine, speeds."""
