# SPDX-License-Identifier: Apache-2.0
"""Text in, deterministic token batches out, in four steps, each one file.

`sources` yields documents, `tokenizer` turns them into token ids, `prepare` writes those into
memory-mapped `shards`, and `loader` hands out the same shuffled batches at any number of ranks.
"""
