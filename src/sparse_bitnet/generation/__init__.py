# SPDX-License-Identifier: Apache-2.0
"""From logits to text: sampling, generation, chat, and a scheduler for many requests."""
