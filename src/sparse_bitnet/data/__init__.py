# SPDX-License-Identifier: Apache-2.0
"""From text to deterministic token batches in three steps, one file each.

`sources` yields documents, `preparation` tokenises them into memory-mapped `shards`, and `loader` hands
out the same shuffled batches at any number of ranks.
"""
