# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from sparse_bitnet.data.loader import TokenLoader, permuted
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.errors import UserError


@pytest.fixture(scope="module")
def dataset(prepared: Path) -> TokenDataset:
    return TokenDataset.open(prepared)


def loader_of(dataset: TokenDataset, **options: int) -> TokenLoader:
    return TokenLoader(dataset, **{"sequence_length": 16, "batch_size": 12, "seed": 3, **options})


@hypothesis.given(
    size=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40)
)
def test_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    images = permuted(np.arange(size), size, seed=seed, epoch=epoch)
    assert images.dtype == np.int64
    assert np.array_equal(np.sort(images), np.arange(size))


@hypothesis.given(size=st.integers(2**20, 2**60), data=st.data())
@hypothesis.settings(max_examples=30)
def test_permutation_handles_sizes_no_array_could_hold(size: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True))
    images = permuted(np.array(positions), size, seed=1, epoch=0)
    assert len(set(images.tolist())) == len(positions)
    assert images.min() >= 0
    assert images.max() < size
    one_by_one = [permuted(np.array([p]), size, seed=1, epoch=0)[0] for p in positions]
    assert images.tolist() == one_by_one


def test_tokens_beyond_the_vocabulary_are_refused(prepared: Path) -> None:
    dataset = TokenDataset.open(prepared)
    largest = int(dataset[0 : len(dataset)].max())
    dataset.vocab_size = largest
    loader = loader_of(dataset, batch_size=len(dataset) // 16)
    with pytest.raises(UserError, match=f"holds token {largest}, its vocabulary {largest} tokens"):
        loader.batch(0)


def test_permutation_is_pinned() -> None:
    """A change here would silently change every run's data order."""
    assert permuted(np.arange(10), 10, seed=0, epoch=0).tolist() == [0, 8, 9, 1, 6, 7, 5, 2, 3, 4]


def test_every_window_comes_once_per_epoch(dataset: TokenDataset) -> None:
    loader = loader_of(dataset)
    steps = range(2 * loader.windows // 12 + 1)
    windows = np.concatenate([loader.windows_of(step) for step in steps]).tolist()
    for epoch in range(2):
        part = windows[epoch * loader.windows : (epoch + 1) * loader.windows]
        assert sorted(part) == list(range(loader.windows))
    assert windows[: loader.windows] != windows[loader.windows : 2 * loader.windows]


def test_labels_are_the_next_tokens(dataset: TokenDataset) -> None:
    loader = loader_of(dataset)
    tokens = dataset[:].astype(np.int64)
    for step in (0, 5, 10_000):
        input_ids, labels = loader.batch(step)
        assert input_ids.shape == labels.shape == (12, 16)
        assert input_ids.dtype == labels.dtype == torch.int64
        for row, window in enumerate(loader.windows_of(step)):
            assert input_ids[row].tolist() == tokens[window * 16 : window * 16 + 16].tolist()
            assert labels[row].tolist() == tokens[window * 16 + 1 : window * 16 + 17].tolist()
    assert (loader.windows - 1) * 16 + 17 <= len(dataset) < loader.windows * 16 + 17


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("step", [0, 1, 17, 123_456_789])
def test_global_batch_is_the_same_at_any_number_of_ranks(
    dataset: TokenDataset, world_size: int, step: int
) -> None:
    whole = loader_of(dataset).batch(step)
    ranks = [
        loader_of(dataset, rank=r, world_size=world_size).batch(step) for r in range(world_size)
    ]
    for part in (0, 1):
        assert torch.equal(torch.cat([batch[part] for batch in ranks]), whole[part])


def test_a_batch_depends_on_the_step_alone(dataset: TokenDataset) -> None:
    used = loader_of(dataset)
    for step in (4, 0, 2):
        used.batch(step)
    assert torch.equal(used.batch(3)[0], loader_of(dataset).batch(3)[0])
    assert not torch.equal(used.batch(3)[0], used.batch(4)[0])
    assert not torch.equal(used.batch(3)[0], loader_of(dataset, seed=4).batch(3)[0])


def test_a_batch_may_be_larger_than_the_data(dataset: TokenDataset) -> None:
    loader = TokenLoader(dataset, sequence_length=len(dataset) // 3, batch_size=8, seed=0)
    assert loader.windows in (2, 3)
    assert loader.batch(0)[0].shape == (8, len(dataset) // 3)
    one = TokenLoader(dataset, sequence_length=len(dataset) - 1, batch_size=2, seed=0)
    assert one.windows_of(5).tolist() == [0, 0]


def test_bad_sizes_are_refused(dataset: TokenDataset) -> None:
    with pytest.raises(UserError, match="train tokens are fewer than a window of"):
        loader_of(dataset, sequence_length=len(dataset))
    with pytest.raises(UserError, match="a batch of 12 sequences does not divide over 5 processes"):
        loader_of(dataset, world_size=5)
