# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet: its kernels against plain references, and the recurrent state of sequences."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packed_models import all_logits, assert_close, make_packed, reference_logits
from sparse_bitnet.engine.protocol import CacheFull
from sparse_bitnet.errors import UserError

pytest.importorskip("sparse_bitnet._cpu")
from sparse_bitnet import _cpu
from sparse_bitnet.engine.engine import Engine

ISAS = _cpu.supported_isas(for_tests=True)
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 96, 200)]
FAMILY = "qwen3_5_text"
LINEAR, FULL = "linear_attention", "full_attention"


def dot(a: np.ndarray, b: np.ndarray) -> np.float32:
    """Return the float32 sum in the order of the kernel: 64 partial sums, then halves."""
    products = np.zeros((-(-len(a) // 64), 64), np.float32)
    products.reshape(-1)[: len(a)] = a * b
    sums = np.zeros(64, np.float32)
    for row in products:
        sums = sums + row
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return sums[0]


def fused(a: Any, b: Any, c: Any) -> np.ndarray:
    """Return a * b + c, rounded once: float64 holds the product, and nearly every sum well enough."""
    return (np.float64(a) * b + c).astype(np.float32)


def delta_rule(q: Any, k: Any, v: Any, decays: Any, steps: Any, state: Any) -> np.ndarray:
    """Return the outputs float32 [tokens, columns]; `state` [keys, columns] changes in place."""
    out = np.empty_like(v)
    for t in range(len(q)):
        with_key = np.zeros_like(v[t])
        with_query = np.zeros_like(v[t])
        for i, row in enumerate(state):
            with_key = fused(row, k[t, i], with_key)
            with_query = fused(row, q[t, i], with_query)
        change = steps[t] * (v[t] - decays[t] * with_key)
        out[t] = decays[t] * with_query + dot(k[t], q[t]) * change
        state[:] = fused(k[t][:, None], change, decays[t] * state)
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("keys", "columns", "tokens"), [(128, 64, 3), (16, 80, 5), (48, 16, 1)])
def test_delta_rule_has_the_bits_of_its_reference(isa: str, keys: int, columns: int, tokens: int):
    rng = np.random.default_rng(keys)
    stride = 2 * keys + columns + 16
    rows = rng.standard_normal((tokens, stride), np.float32)
    rows[:, -16:] = np.nan
    q, k, v = rows[:, :keys], rows[:, keys : 2 * keys], rows[:, 2 * keys : -16]
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    decays, steps = rng.random((2, tokens), np.float32)
    state = rng.standard_normal((keys, columns), np.float32)
    # Slabs of 16 columns, between poisoned memory.
    slabs = np.full(keys * columns + 32, np.nan, np.float32)
    view = slabs[16:-16].reshape(-1, keys, 16)
    view[:] = state.reshape(keys, -1, 16).swapaxes(0, 1)
    out = np.full((tokens, stride), np.nan, np.float32)
    _cpu.Kernels.choose(isa).delta_rule(
        *(tokens, keys, columns, q.ctypes.data, k.ctypes.data, v.ctypes.data, stride),
        *(decays.ctypes.data, steps.ctypes.data, view.ctypes.data, out.ctypes.data),
    )
    before = state.copy()
    expected = delta_rule(q, k, v, decays, steps, state)
    np.testing.assert_array_equal(out[:, :columns], expected)
    np.testing.assert_array_equal(view.swapaxes(0, 1).reshape(keys, columns), state)
    assert np.isnan(out[:, columns:]).all()
    assert np.isnan(slabs[:16]).all()
    assert np.isnan(slabs[-16:]).all()
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    given = (torch.from_numpy(x.copy())[None, :, None] for x in (q * keys**0.5, k, v))
    gates = (torch.from_numpy(x)[None, :, None] for x in (np.log(decays), steps))
    theirs, after = torch_recurrent_gated_delta_rule(
        *given, *gates, torch.from_numpy(before)[None, None], output_final_state=True
    )
    np.testing.assert_allclose(expected, theirs[0, :, 0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(state, after[0, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tokens", "columns", "taps"), [(1, 16, 4), (2, 48, 4), (9, 32, 3)])
def test_convolution_equals_torch_with_the_same_bits_everywhere(
    tokens: int, columns: int, taps: int
) -> None:
    rng = np.random.default_rng(tokens)
    stride = columns + 16
    rows = np.full((tokens + 1, stride), np.nan, np.float32)
    rows[:tokens, :columns] = 4 * rng.standard_normal((tokens, columns), np.float32)
    past = rng.standard_normal((taps - 1, columns), np.float32)
    weights = rng.standard_normal((taps, stride), np.float32)
    given = np.concatenate([past, rows[:tokens, :columns]])
    expected = torch.nn.functional.silu(
        torch.conv1d(
            torch.from_numpy(given.T[None]),
            torch.from_numpy(weights[:, :columns].T[:, None].copy()),
            groups=columns,
        )
    )[0].T
    results = []
    for isa in ISAS:
        out = rows.copy()
        _cpu.Kernels.choose(isa).convolve(
            *(tokens, columns, taps, weights.ctypes.data, past.ctypes.data, out.ctypes.data, stride)
        )
        np.testing.assert_array_equal(out[:, columns:], rows[:, columns:])
        assert np.isnan(out[tokens]).all()
        results.append(out[:tokens, :columns])
    np.testing.assert_allclose(results[0], expected, rtol=1e-5, atol=1e-5)
    assert all(np.array_equal(results[0], result) for result in results)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 80, "num_hidden_layers": 4}
    return make_packed(
        tmp_path_factory.mktemp("hybrid"), FAMILY, max_position_embeddings=256, **sizes
    )


def load(folder: Path, **options: Any) -> Engine:
    return Engine.load(
        folder, **{"weight_format": "i2", "threads": 1, "cache_tokens": 2048} | options
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": [LINEAR, FULL, LINEAR], "head_dim": 32},
        {"layer_types": [FULL, LINEAR], "linear_num_key_heads": 6, "linear_conv_kernel_dim": 2},
        {"linear_key_head_dim": 32, "linear_value_head_dim": 80, "attention_bias": True},
    ],
)
def test_variants_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    layers = {"num_hidden_layers": len(changes.get("layer_types", "four"))}
    folder = make_packed(tmp_path, FAMILY, max_position_embeddings=256, **layers, **changes)
    expected = reference_logits(folder, TOKENS)
    engine = load(folder, kv_cache="float32", head="stored")
    assert_close(all_logits(engine, TOKENS), expected)
    sequence = engine.new_sequence()
    (last,) = engine.forward([(sequence, TOKENS)])
    np.testing.assert_array_equal(last, all_logits(engine, TOKENS)[-1])


@pytest.mark.parametrize("isa", ISAS)
def test_splits_and_threads_change_no_bit(hybrid: Path, isa: str) -> None:
    """A prompt in parts of many lengths, beside other sequences, gives the bits of the whole prompt."""
    whole = all_logits(load(hybrid, isa=isa), TOKENS)
    engine = load(hybrid, isa=isa, threads=2)
    one, other = engine.new_sequence(), engine.new_sequence()
    parts, others, at = [], [], 0
    for count in (1, 3, 64, 65, 9, 1, 1, 56):
        mine, beside = engine.forward(
            [(one, TOKENS[at : at + count]), (other, TOKENS[len(other) : len(other) + 7])], "all"
        )
        parts.append(mine)
        others.append(beside)
        at += count
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(np.concatenate(others), whole[: len(other)])


def test_forks_and_truncation_at_every_length_equal_a_fresh_sequence(hybrid: Path) -> None:
    engine = load(hybrid)
    expected = all_logits(engine, TOKENS[:60])
    sequence = engine.new_sequence()
    for part in (TOKENS[:21], *([token] for token in TOKENS[21:30]), TOKENS[30:33], TOKENS[33:48]):
        engine.forward([(sequence, part)], "none")
    assert [sequence.reusable(n) for n in (12, 13, 39, 40, 47, 48)] == [0, 13, 13, 40, 40, 48]
    for length in range(49):
        fork, cut = sequence.fork(length), sequence.fork()
        cut.truncate(length)
        assert cut.tokens == fork.tokens == TOKENS[:length]
        batch = [(fork, TOKENS[length : length + 5]), (cut, TOKENS[length : length + 9])]
        for (_, given), logits in zip(batch, engine.forward(batch, "all"), strict=True):
            np.testing.assert_array_equal(logits, expected[length : length + len(given)])
        fork.close()
        cut.close()
    for call in (engine._decoder.truncate, engine._decoder.fork):
        with pytest.raises(IndexError):
            call(sequence.cache, -1)
    (logits,) = engine.forward([(sequence, TOKENS[48:60])], "all")
    np.testing.assert_array_equal(logits, expected[48:])


def test_a_prompt_in_slices_keeps_one_snapshot(hybrid: Path) -> None:
    engine = load(hybrid)
    sequence = engine.new_sequence()
    for start in (0, 32, 64):
        engine.forward([(sequence, TOKENS[start : start + 32])], "none")
    engine.forward([(sequence, TOKENS[96:99])], "none")
    assert [sequence.reusable(n) for n in (87, 88, 98, 99)] == [0, 88, 88, 99]


def test_an_interrupted_step_is_undone(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(hybrid)
    expected = all_logits(engine, TOKENS[:60])
    first, second = engine.new_sequence(), engine.new_sequence()
    engine.forward([(first, TOKENS[:30]), (second, TOKENS[:2])])
    run = engine._run

    def broken_off(*given: Any) -> None:
        run(*given)
        raise KeyboardInterrupt

    for count in (1, 5):
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_run", broken_off)
            with pytest.raises(KeyboardInterrupt):
                engine.forward([(first, TOKENS[30 : 30 + count]), (second, [3])])
        assert (len(first), len(second)) == (30, 2)
    rows = engine.forward([(first, TOKENS[30:40]), (second, TOKENS[2:60])], "all")
    np.testing.assert_array_equal(rows[0], expected[30:40])
    np.testing.assert_array_equal(rows[1], expected[2:])


def test_states_are_limited_and_snapshots_make_room(hybrid: Path) -> None:
    """There are eight states where the cache is small."""
    engine = load(hybrid, cache_tokens=64 * 10, context_length=64)
    sequences = [engine.new_sequence() for _ in range(9)]
    assert engine.free_tokens == 0
    engine.forward([(sequence, TOKENS[:20]) for sequence in sequences[:8]], "none")
    with pytest.raises(CacheFull, match="all 8 recurrent states are in use: close sequences"):
        engine.forward([(sequences[8], TOKENS[:20])])
    for sequence in sequences[1:]:
        sequence.close()
    forks = [sequences[0], *(sequences[0].fork() for _ in range(7))]
    for fork in forks:  # the last one is alone with what all shared
        engine.forward([(fork, TOKENS[20:21])], "none")
    sequences[8] = engine.new_sequence()
    forks[0].close()
    assert engine.free_tokens > 0
    (logits,) = engine.forward([(sequences[8], TOKENS[:20])])
    np.testing.assert_array_equal(logits, all_logits(load(hybrid), TOKENS[:20])[-1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [LINEAR] * 4}, "not support a model without attention in any layer"),
        ({"linear_key_head_dim": 24}, "not support Gated DeltaNet with heads of 24 and"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "DeltaNet with activation 'gelu_pytorch_tanh'"),
    ],
)
def test_models_that_the_kernels_do_not_support_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = make_packed(tmp_path, FAMILY, **changes)
    with pytest.raises(UserError, match=message):
        load(folder)
