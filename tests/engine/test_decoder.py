# SPDX-License-Identifier: Apache-2.0
"""The decoder step against the transformers model with the same ternary layers, on every position."""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from decoder_in_memory import ODD_SIZES, DecoderInMemory, ids_of, random_model
from factories import logits_of
from packed_models import FAMILIES
from sparse_bitnet import _cpu

# Most positions agree to the last bits. Where an activation lies between two int8 codes, the last bit of
# a float decides for one, and one code of 64 inputs moves the logits by 1e-3 to 1e-2, a little at later
# positions too: the reference differs by as much from itself between processors and between PyTorch's
# attention implementations.
TOLERANCE, TYPICAL = 5e-2, 3e-6

FULL = ["full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 24},
    "bitnet": {},
    "mistral": {},
    "gemma3_text": {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + FULL},
    "hunyuan_v1_dense": {},
    "odd": ODD_SIZES,
    "deep": {"num_hidden_layers": 4, "num_attention_heads": 6, "hidden_size": 96, "head_dim": 16},
}


@cache
def isas() -> list[str]:
    """Instruction sets for which this machine has matrix kernels."""
    return _cpu.supported_isas(for_tests=True)


@cache
def model_of(name: str, format: str = "ternary-6:8") -> Any:
    changes = dict(MODELS[name])
    family = name if name in FAMILIES else "llama"
    if name == "odd":
        format = "ternary-8:8"
    return random_model(family, format=format, **changes)


@cache
def long_model() -> Any:
    """One whose sequences pass several pages, chunks of pages and chunks of tokens."""
    return random_model(num_hidden_layers=2, max_position_embeddings=1400, num_key_value_heads=1)


@cache
def windowed_model() -> Any:
    """The same, whose tokens see more than a page and fewer than a chunk of pages."""
    changes = {"max_position_embeddings": 1400, "num_key_value_heads": 1, "sliding_window": 150}
    return random_model("mistral", num_hidden_layers=2, head_dim=16, **changes)


def errors(logits: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Relative to the largest logit, of each position."""
    return np.abs(logits - reference).max(1) / np.abs(reference).max(1)


def assert_close(logits: np.ndarray, reference: np.ndarray) -> None:
    difference = errors(logits, reference)
    assert difference.max() <= TOLERANCE
    assert np.quantile(difference, 0.25) <= TYPICAL


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("name", [*MODELS, "long"])
def test_equals_transformers_on_every_position(name: str, isa: str) -> None:
    model, ids = (long_model(), ids_of(1300)) if name == "long" else (model_of(name), ids_of(64))
    decoder = DecoderInMemory(model, isa=isa, threads=1 + (name == "long"), cache_tokens=1344)
    assert_close(decoder.logits(ids), logits_of(model, ids))


def test_a_window_equals_transformers_and_changes_no_bit_of_split_prompts(isa: str) -> None:
    model, ids = windowed_model(), ids_of(1300)
    decoder = DecoderInMemory(model, isa=isa, threads=2, cache_tokens=2688)
    whole = decoder.logits(ids)
    assert_close(whole, logits_of(model, ids))
    sequence = decoder.decoder.open()
    pieces = [ids[:149], ids[149:700], *([token] for token in ids[700:720])]
    parts = [decoder.forward([(sequence, piece)])[0] for piece in pieces]
    np.testing.assert_array_equal(np.concatenate(parts), whole[:720])


@pytest.mark.parametrize(
    ("cache_type", "bound"), [("float16", 2e-2), ("int8", 6e-2), ("int4", 0.6)]
)
@pytest.mark.parametrize("name", ["qwen2", "odd", "bitnet"])
def test_rounded_caches_are_close(name: str, cache_type: str, bound: float, isa: str) -> None:
    model, ids = model_of(name), ids_of(64)
    logits = DecoderInMemory(model, cache=cache_type, isa=isa).logits(ids)
    assert errors(logits, logits_of(model, ids)).max() <= bound


def codes_of(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers of each vector and their scale: from -127 to 127, or odd ones from -15 to 15."""
    largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    if bits == 4:
        return torch.floor(x * (7.5 / largest) + 8) * 2 - 15, largest / 15
    return torch.round(x * (127 / largest)), largest / 127


def hadamard(n: int) -> torch.Tensor:
    """Return the blockwise Hadamard matrix [n, n], with blocks of the largest power of 2 in n."""
    run = torch.ones(1, 1)
    while n % (2 * len(run)) == 0:
        run = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), run) / 2**0.5
    return torch.block_diag(*[run] * (n // len(run)))


def attention_of_codes(
    bits: int,
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    scaling: float,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention as the engine computes it on pages of 64 tokens: [1, heads, tokens, dim]."""
    group, tokens, page = query.shape[1] // key.shape[1], query.shape[2], 64
    turn = hadamard(query.shape[-1]) if bits == 4 else torch.eye(query.shape[-1])
    q, q_scale = codes_of(query * scaling * np.log2(np.e) @ turn, 8)
    (k, k_scale), (v, v_scale) = (
        codes_of(x.repeat_interleave(group, 1) @ turn, bits) for x in (key, value)
    )
    behind = torch.arange(tokens)[:, None] - torch.arange(tokens)
    hidden = (behind < 0) | (behind >= (others.get("sliding_window") or tokens))
    scores = ((q @ k.mT) * (q_scale * k_scale.mT)).masked_fill(hidden, -torch.inf)
    out, sums = torch.zeros_like(query), torch.zeros_like(q_scale)
    for start in range(0, tokens, page):
        keys = slice(start, start + page)
        largest = scores[..., keys].amax(-1, keepdim=True).clamp(min=-1e30)
        probability = torch.exp2(scores[..., keys] - largest)
        part = torch.exp2(largest - scores.amax(-1, keepdim=True))
        scale = v_scale[..., keys, :].mT.expand_as(probability).masked_fill(hidden[:, keys], 0)
        top = scale.amax(-1, keepdim=True).clamp(min=1e-30)
        codes = torch.round(probability * (scale * (127 / top)))
        out += codes @ v[..., keys, :] * (part * top / 127)
        sums += probability.sum(-1, keepdim=True) * part
    return (out / sums @ turn).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["qwen2", "odd", "long", "windowed"])
def test_pages_of_codes_equal_their_reference(name: str, bits: int, isa: str) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    long = {"long": long_model, "windowed": windowed_model}
    model, ids = (long[name](), ids_of(600)) if name in long else (model_of(name), ids_of(64))
    ALL_ATTENTION_FUNCTIONS.register("pages_of_codes", partial(attention_of_codes, bits))
    before = model.config._attn_implementation
    model.config._attn_implementation = "pages_of_codes"
    try:
        expected = logits_of(model, ids)
    finally:
        model.config._attn_implementation = before
    assert_close(DecoderInMemory(model, cache=f"int{bits}", isa=isa).logits(ids), expected)


@pytest.mark.parametrize("head", ["bfloat16", "int8", "int4"])
def test_rounded_heads_equal_their_dequantised_weights(head: str, isa: str) -> None:
    """The head sees activations of 15 bits."""
    model, ids = random_model("llama", tie_word_embeddings=False), ids_of(33)
    decoder = DecoderInMemory(model, embedding="float32", head=head, isa=isa)
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(torch.from_numpy(decoder.dequantised[head]))
    difference = errors(decoder.logits(ids), logits_of(model, ids))
    assert difference.max() <= TOLERANCE
    assert np.quantile(difference, 0.25) <= 2e-4


@pytest.mark.parametrize("type", ["bfloat16", "int8", "int4"])
def test_rounded_embeddings_equal_their_dequantised_weights(type: str) -> None:
    model, ids = random_model(tie_word_embeddings=False, seed=5), ids_of(20)
    decoder = DecoderInMemory(model, embedding=type)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.from_numpy(decoder.dequantised[type]))
    assert_close(decoder.logits(ids), logits_of(model, ids))


@pytest.mark.parametrize("cache_type", ["float32", "float16", "int8", "int4"])
def test_splitting_a_prompt_changes_no_bit(cache_type: str, isa: str) -> None:
    model, ids = long_model(), ids_of(700)
    whole = DecoderInMemory(model, isa=isa, cache=cache_type).logits(ids)
    decoder = DecoderInMemory(model, isa=isa, cache=cache_type)
    sequence = decoder.decoder.open()
    parts, at = [], 0
    for count in (1, 2, 63, 64, 65, 130, 5, 300, *[1] * 70):
        parts.append(decoder.forward([(sequence, ids[at : at + count])])[0])
        at += count
    assert at == len(ids) == decoder.decoder.length(sequence)
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_threads_change_no_bit(isa: str) -> None:
    model, ids = long_model(), ids_of(650)
    results = []
    for threads in (1, 2, 3):
        decoder = DecoderInMemory(model, isa=isa, threads=threads, cache="float16", head="int8")
        sequence = decoder.decoder.open()
        first = decoder.forward([(sequence, ids[:-1])])[0]
        results.append(np.vstack([first, decoder.forward([(sequence, ids[-1:])])[0]]))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_batch_equals_each_sequence_alone(isa: str) -> None:
    """Prefill of any length and single tokens together, more tokens than one chunk holds."""
    model = long_model()
    lengths, more = (1, 70, 3, 520, 128), (1, 1, 200, 1, 7)
    texts = [ids_of(a + b, seed) for seed, (a, b) in enumerate(zip(lengths, more, strict=True))]
    together = DecoderInMemory(
        model, isa=isa, threads=2, head="int8", cache="int8", cache_tokens=1280
    )
    sequences = [together.decoder.open() for _ in texts]
    first = together.forward(
        [(s, text[:a]) for s, text, a in zip(sequences, texts, lengths, strict=True)]
    )
    then = together.forward(
        [(s, text[a:]) for s, text, a in zip(sequences, texts, lengths, strict=True)]
    )
    for text, *parts in zip(texts, first, then, strict=True):
        alone = DecoderInMemory(model, isa=isa, head="int8", cache="int8")
        np.testing.assert_array_equal(np.concatenate(parts), alone.logits(text))


@pytest.mark.parametrize("count", [1, 2, 40, 600])
def test_last_logits_are_the_last_rows_of_all(count: int) -> None:
    model = long_model()
    requests = [ids_of(count), ids_of(3, 1), ids_of(count + 1, 2)]
    decoders = [DecoderInMemory(model, cache_tokens=2048) for _ in range(2)]
    sequences = [[decoder.decoder.open() for _ in requests] for decoder in decoders]
    everything = decoders[0].forward(list(zip(sequences[0], requests, strict=True)), "all")
    last = decoders[1].forward(list(zip(sequences[1], requests, strict=True)), "last")
    for rows, row in zip(everything, last, strict=True):
        np.testing.assert_array_equal(rows[-1], row)


def test_model_builder_refuses_what_does_not_fit() -> None:
    decoder = DecoderInMemory(model_of("qwen2"))
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 96, "norm_epsilon": 1e-6}
    frequencies = decoder.address(np.ones(8, np.float32))

    def builder(**changes: float) -> _cpu.ModelBuilder:
        sizes = (
            {"hidden": 64, "intermediate": 96, "activation": _cpu.Activation.silu} | shape | changes
        )
        return _cpu.ModelBuilder(**{"inverse_frequencies": frequencies} | sizes)

    for wrong, match in (
        ({"head_dim": 15}, "head_dim is odd"),
        ({"kv_heads": 3}, "not a multiple of kv_heads"),
        ({"hidden": 0}, "hidden is outside"),
        ({"vocab": 0}, "vocab is outside"),
        ({"inverse_frequencies": 0}, "inverse_frequencies: the address is 0"),
    ):
        with pytest.raises(ValueError, match=match):
            builder(**wrong)
    weight = torch.ones(96, 64)
    decoder.table(weight, "int8")
    for change in ({"rows": 95}, {"columns": 63}):
        with pytest.raises(ValueError, match="head"):
            builder().set_head(decoder.table(weight, "int8", **change))
    for change in ({"row_stride": 32}, {"address": 0}, {"address": 65}, {"scales": 0}):
        with pytest.raises(ValueError, match=r"row_stride|address|scales"):
            decoder.table(weight, "int8", **change)
    for name in ("Activation", "CacheType", "TableType", "WeightFormat"):
        with pytest.raises(ValueError, match="not a valid"):
            getattr(_cpu, name)(9)
    with pytest.raises(ValueError, match="has no embedding"):
        _cpu.Decoder(
            builder(),
            threads=1,
            cache=_cpu.CacheType.float32,
            context_length=8,
            cache_tokens=8,
            kernels=_cpu.Kernels.choose(),
        )
    layer = next(iter(decoder.layers.values()))
    norms = {"input_norm": frequencies, "post_attention_norm": frequencies}
    kv, wide, back = {"rows": 32}, {"rows": 96}, {"rows": 64, "columns": 96}
    shapes = {"q": {}, "k": kv, "v": kv, "o": {}, "gate": wide, "up": wide, "down": back}
    strided = {name: given | {"row_stride": 64} for name, given in shapes.items()}
    block = norms | {name: decoder.matrix(layer, **given) for name, given in strided.items()}
    for change, match in (
        ({"q": decoder.matrix(layer, rows=65)}, "block 0 q is"),
        ({"q": decoder.matrix(layer, columns=63)}, "block 0 q is"),
        ({"down": None}, "block 0 down is missing"),
        ({"input_norm": None}, "has no input_norm"),
        ({"q_bias": 2}, "q_bias: not aligned"),
        ({"up_linear_norm": frequencies}, "has not five linear norms"),
        ({"q_scale": frequencies}, "has weights of other names"),
    ):
        weights = {name: value for name, value in (block | change).items() if value is not None}
        with pytest.raises(ValueError, match=match):
            builder().add_block(weights)
    builder().add_block(block)
    for change in ({"n": 0}, {"row_stride": 63}, {"row_stride": 0}, {"address": 0}, {"address": 8}):
        with pytest.raises(ValueError, match=r"pattern|row_stride|address"):
            decoder.matrix(layer, **change)


@pytest.mark.parametrize("isa", isas())
def test_group_scales_and_activations_are_close_to_transformers(isa):
    model = random_model(hidden_size=64, intermediate_size=96)
    ids = ids_of(20)
    reference = logits_of(model, ids)
    by_group = DecoderInMemory(model, isa=isa, group=32)
    assert np.quantile(errors(by_group.logits(ids), reference), 0.25) < TYPICAL
    finer = DecoderInMemory(model, isa=isa, group=32, activation_group=32)
    assert errors(finer.logits(ids), reference).max() < 0.05
    sequence = finer.decoder.open()
    one_by_one = [finer.forward([(sequence, [token])])[0] for token in ids]
    assert np.array_equal(np.concatenate(one_by_one), finer.logits(ids))
    with pytest.raises(ValueError, match="block 0 has matrices whose groups"):
        DecoderInMemory(model, isa=isa, activation_group=32)
