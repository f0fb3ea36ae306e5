# SPDX-License-Identifier: Apache-2.0
"""Every prediction is scored exactly once, with as much context as promised."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparse_bitnet.evaluation.text_windows import (
    NOT_SCORED,
    Window,
    equal_lengths,
    inputs_and_labels,
    windows,
)


@given(tokens=st.integers(0, 300), context=st.integers(1, 40), data=st.data())
def test_each_prediction_once_with_enough_context(tokens, context, data):
    stride = data.draw(st.integers(1, context))
    scored = []
    for start, end, scored_from in windows(tokens, context, stride):
        assert 0 <= start <= scored_from < end <= start + context
        scored += range(scored_from, end)
        if start:
            assert scored_from - start >= context - stride
    assert scored == list(range(max(0, tokens - 1)))


def test_default_windows_do_not_overlap():
    assert list(windows(10, 4, 4)) == [Window(0, 4, 0), Window(4, 8, 4), Window(8, 9, 8)]
    assert list(windows(9, 4, 4)) == [Window(0, 4, 0), Window(4, 8, 4)]


def test_overlapping_windows_score_their_end():
    assert list(windows(9, 4, 2)) == [
        Window(0, 4, 0),
        Window(2, 6, 4),
        Window(4, 8, 6),
    ]


@given(tokens=st.integers(2, 300), context=st.integers(1, 40), batch=st.integers(1, 5))
def test_batches_hold_equal_lengths_and_everything(tokens, context, batch):
    cut = list(windows(tokens, context, context))
    batches = list(equal_lengths(iter(cut), batch))
    assert [window for group in batches for window in group] == cut
    assert all(len(group) <= batch for group in batches)
    assert all(len({end - start for start, end, _ in group}) == 1 for group in batches)


def test_labels_follow_inputs():
    tokens = np.arange(100, 120, dtype=np.uint16)
    inputs, labels = inputs_and_labels(tokens, Window(2, 6, 4))
    assert inputs.tolist() == [102, 103, 104, 105]
    assert labels.tolist() == [NOT_SCORED, NOT_SCORED, 105, 106]
    assert str(inputs.dtype) == str(labels.dtype) == "torch.int64"
