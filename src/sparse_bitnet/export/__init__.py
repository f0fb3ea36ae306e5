# SPDX-License-Identifier: Apache-2.0
"""Trained models in the formats that other people's tools read, and back: see `formats.export`."""
