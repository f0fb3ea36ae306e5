# SPDX-License-Identifier: Apache-2.0
"""Sequences of the decoder's cache: forks, truncation, room, and errors that change nothing."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from torch import nn

from decoder_in_memory import ODD_SIZES, DecoderInMemory, ids_of, random_model
from sparse_bitnet import _cpu


@cache
def model() -> nn.Module:
    return random_model(max_position_embeddings=512)


def decoder_of(cache_tokens: int = 1024, **options: Any) -> DecoderInMemory:
    return DecoderInMemory(model(), cache_tokens=cache_tokens, **options)


@pytest.mark.parametrize("cache_type", ["float32", "float16", "int8", "int4"])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 150])
def test_a_fork_continues_like_a_sequence_of_its_own(length: int, cache_type: str) -> None:
    text, other = ids_of(150), ids_of(90, 1)
    decoder = decoder_of(cache=cache_type)
    sequence = decoder.decoder.open()
    decoder.forward([(sequence, text)])
    forked = decoder.decoder.fork(sequence, length)
    assert decoder.decoder.length(forked) == length
    continued = ids_of(20, 2)
    rows, old_rows = decoder.forward([(forked, other), (sequence, continued)])
    alone = decoder_of(cache=cache_type)
    np.testing.assert_array_equal(rows, alone.logits(text[:length] + other)[length:])
    np.testing.assert_array_equal(old_rows, alone.logits(text + continued)[150:])


def test_forks_share_whole_pages() -> None:
    decoder = decoder_of(cache_tokens=256)
    sequence = decoder.decoder.open()
    decoder.forward([(sequence, ids_of(130))])
    assert decoder.decoder.free_tokens == 64
    first = decoder.decoder.fork(sequence, 128)
    second = decoder.decoder.fork(sequence, 100)
    assert decoder.decoder.free_tokens == 0
    with pytest.raises(ValueError, match="no free page"):
        decoder.decoder.fork(sequence, 130)
    assert decoder.decoder.fork(sequence, 64) > second
    decoder.decoder.close(sequence)
    assert decoder.decoder.free_tokens == 64
    decoder.decoder.close(second)
    assert decoder.decoder.free_tokens == 128
    decoder.decoder.close(first)
    assert decoder.decoder.free_tokens == 192


@pytest.mark.parametrize("length", [0, 10, 64, 100, 129])
def test_truncated_sequences_continue_as_if_new(length: int) -> None:
    text, other = ids_of(130), ids_of(80, 1)
    decoder = decoder_of()
    sequence = decoder.decoder.open()
    decoder.forward([(sequence, text)])
    decoder.decoder.truncate(sequence, length)
    rows = decoder.forward([(sequence, other)])[0]
    np.testing.assert_array_equal(rows, decoder_of().logits(text[:length] + other)[length:])


def test_appending_inside_a_shared_page_leaves_the_fork_unchanged() -> None:
    text, other = ids_of(128), ids_of(30, 1)
    decoder = decoder_of(cache_tokens=256)
    sequence = decoder.decoder.open()
    decoder.forward([(sequence, text)])
    forked = decoder.decoder.fork(sequence, 128)
    decoder.decoder.truncate(sequence, 100)
    rows = decoder.forward([(sequence, other[:20])])[0]
    np.testing.assert_array_equal(rows, decoder_of().logits(text[:100] + other[:20])[100:])
    rows = decoder.forward([(forked, other)])[0]
    np.testing.assert_array_equal(rows, decoder_of().logits(text + other)[128:])


def test_a_page_is_copied_only_where_there_is_room() -> None:
    decoder = decoder_of(cache_tokens=128)
    sequence = decoder.decoder.open()
    decoder.forward([(sequence, ids_of(128))])
    forked = decoder.decoder.fork(sequence, 128)
    decoder.decoder.truncate(sequence, 100)
    with pytest.raises(ValueError, match="room for 0 more tokens"):
        decoder.forward([(sequence, [1])])
    decoder.decoder.close(forked)
    decoder.forward([(sequence, [1])])


def test_a_full_cache_changes_nothing() -> None:
    decoder = decoder_of(cache_tokens=192)
    first, second = decoder.decoder.open(), decoder.decoder.open()
    decoder.forward([(first, ids_of(60))])
    with pytest.raises(ValueError, match="room for 128 more tokens"):
        decoder.forward([(first, ids_of(10)), (second, ids_of(70))])
    assert decoder.decoder.length(first) == 60
    assert decoder.decoder.length(second) == 0
    assert decoder.decoder.free_tokens == 128
    rows = decoder.forward([(first, ids_of(4, 1)), (second, ids_of(128))])
    np.testing.assert_array_equal(rows[1], decoder_of().logits(ids_of(128)))


def test_context_length_is_enforced() -> None:
    decoder = decoder_of(context_length=70)
    sequence = decoder.decoder.open()
    with pytest.raises(
        ValueError, match="71 more tokens for sequence 0, which has 0: the context length is 70"
    ):
        decoder.forward([(sequence, ids_of(71))])
    decoder.forward([(sequence, ids_of(70))])
    with pytest.raises(ValueError, match="1 more tokens for sequence 0, which has 70"):
        decoder.forward([(sequence, [1])])
    assert decoder.decoder.length(sequence) == 70


def test_unknown_sequences_are_refused() -> None:
    decoder = decoder_of()
    sequence = decoder.decoder.open()
    decoder.decoder.close(sequence)
    other = decoder.decoder.open()
    assert other != sequence
    for call in (
        lambda: decoder.decoder.close(sequence),
        lambda: decoder.decoder.length(sequence),
        lambda: decoder.decoder.fork(sequence, 0),
        lambda: decoder.decoder.truncate(-1, 0),
        lambda: decoder.forward([(sequence, [1])]),
        lambda: decoder.forward([(other, [1]), (other, [2])]),
        lambda: decoder.decoder.fork(other, 1),
        lambda: decoder.decoder.fork(other, -1),
        lambda: decoder.decoder.truncate(other, 1),
        lambda: decoder.forward([(other, [96])]),
        lambda: decoder.forward([(other, [-1])]),
    ):
        with pytest.raises(IndexError):
            call()
    assert decoder.decoder.length(other) == 0
    decoder.decoder.forward([], 1, 4)


@pytest.mark.parametrize("isa", _cpu.supported_isas(for_tests=True))
@pytest.mark.parametrize("cache_type", ["float32", "float16", "int8", "int4"])
def test_nan_stays_in_its_own_sequence(cache_type: str, isa: str) -> None:
    """NaN affects the tokens after it, but neither another sequence nor one that reuses its pages."""
    poisoned = random_model(max_position_embeddings=512, tie_word_embeddings=False)
    ids, other = np.array(ids_of(160)) % 95, np.array(ids_of(160, 1)) % 95
    ids[70] = 95
    expected = DecoderInMemory(poisoned, cache=cache_type, isa=isa).logits(other)
    for value in (np.nan, np.inf):
        poisoned.get_input_embeddings().weight.data[95, 3] = value
        decoder = DecoderInMemory(poisoned, cache=cache_type, isa=isa, cache_tokens=384)
        first, second = decoder.decoder.open(), decoder.decoder.open()
        rows, beside = decoder.forward([(first, ids), (second, other)])
        assert np.isfinite(rows[:70]).all()
        assert not np.isfinite(rows[70:]).any()
        decoder.decoder.close(first)
        decoder.decoder.close(second)
        for logits in (beside, decoder.logits(other)):
            np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("cache_type", ["int8", "int4"])
@pytest.mark.parametrize("name", "qkv")
def test_nan_in_queries_keys_or_values_reaches_the_logits(name: str, cache_type: str) -> None:
    for value in (np.nan, np.inf, -np.inf):
        poisoned = random_model(format="ternary-8:8", **ODD_SIZES)
        attention = poisoned.model.layers[-1].self_attn
        attention.get_submodule(f"{name}_proj").bias.data[3] = value
        logits = DecoderInMemory(poisoned, cache=cache_type).logits(ids_of(60))
        assert not np.isfinite(logits).any()
