# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: OpenAI's API on top of the scheduler."""
