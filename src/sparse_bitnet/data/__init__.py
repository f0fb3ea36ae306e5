# SPDX-License-Identifier: Apache-2.0
"""Text in, deterministic token batches out, in three steps, each one file.

`sources` yields documents, `preparation` tokenises them into memory-mapped `shards`, and `loader` hands
out the same shuffled batches at any number of ranks.
"""
