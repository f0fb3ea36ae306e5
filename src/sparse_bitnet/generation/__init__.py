# SPDX-License-Identifier: Apache-2.0
"""From logits to text: sampling, generation, chat, and the scheduler of many requests."""
