# SPDX-License-Identifier: Apache-2.0
"""What trained weights look like, and drawing it."""
