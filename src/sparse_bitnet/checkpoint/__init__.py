# SPDX-License-Identifier: Apache-2.0
"""Stored models: what a user names becomes a folder, and the folder's tensors are read one at a time."""
