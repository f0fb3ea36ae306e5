# SPDX-License-Identifier: Apache-2.0
"""The GPU engine in plain PyTorch: the protocol over slots gives the logits of the whole forward."""

import numpy as np
import pytest
import torch

from factories import tiny_model
from small_models import write_models
from sparse_bitnet.cli.generate import main
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.engine.gpu.gpu_engine import GpuEngine, UnsuitedModel
from sparse_bitnet.engine.gpu.linear import RoutePolicy, TernaryLinear
from sparse_bitnet.engine.protocol import CacheFull, ContextFull
from sparse_bitnet.engine.transformers_engine import TransformersEngine
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.open_model import open_engine, open_model
from sparse_bitnet.generation.prefix_cache import PrefixCache
from sparse_bitnet.generation.text_batches import GenerateOptions, generate
from sparse_bitnet.nn.convert import convert_, selected
from sparse_bitnet.nn.layer import SparseBitConfig

TOKENS = [5, 17, 3, 90, 41, 8, 8, 60, 22, 1, 33, 70]


def model_of(family: str = "qwen2"):
    model = convert_(tiny_model(family, seed=2), SparseBitConfig.parse("ternary-6:8")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.1, 0.1)
    return model


def engine_of(family: str = "qwen2", **options) -> GpuEngine:
    return GpuEngine(model_of(family), **{"context_length": 64, "cache_tokens": 256, **options})


def whole(tokens, family: str = "qwen2") -> np.ndarray:
    """float32 [tokens, vocab_size] of one forward of the unprepared model."""
    model = model_of(family)
    with torch.no_grad(), selected(model):
        return model(torch.tensor([tokens])).logits[0].numpy()


def close(a, b) -> None:
    # An activation next to a rounding boundary may fall on its other side.
    np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("route", ["dense", "sparse", "packed"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_prompts_pieces_and_steps_give_the_logits_of_one_forward(family, route):
    engine = engine_of(family, policy=RoutePolicy(always=route))
    expected = whole(TOKENS, family)
    one, two = engine.new_sequence(), engine.new_sequence()
    (every,) = engine.forward([(one, TOKENS[:5])], "all")
    close(every, expected[:5])
    assert engine.forward([(two, TOKENS[:1])], "none") == []
    # A step, a prompt behind what is there, and a prompt's piece in one call.
    three = engine.new_sequence()
    found = engine.forward([(one, [TOKENS[5]]), (three, TOKENS[:4]), (two, TOKENS[1:7])])
    for logits, position in zip(found, (5, 3, 6), strict=True):
        close(logits, expected[position])
    found = engine.forward([(three, [TOKENS[4]]), (two, [TOKENS[7]]), (one, [TOKENS[6]])], "all")
    for logits, position in zip(found, (4, 7, 6), strict=True):
        close(logits, expected[[position]])
    assert one.tokens == TOKENS[:7]
    engine.close()
    engine.close()


def test_forks_and_truncated_sequences_are_independent():
    engine = engine_of()
    first = engine.new_sequence()
    engine.forward([(first, TOKENS[:8])], "none")
    second, third = first.fork(), first.fork(5)
    batch = [(first, [7]), (second, [9]), (third, [9, 10])]
    tokens = [[*TOKENS[:8], 7], [*TOKENS[:8], 9], [*TOKENS[:5], 9, 10]]
    for logits, expected in zip(engine.forward(batch), tokens, strict=True):
        close(logits, whole(expected)[-1])
    first.truncate(3)
    second.close()
    # The freed slot lies before the others; what it held is of no consequence.
    fourth = engine.new_sequence()
    batch = [(third, [11]), (first, [12]), (fourth, [13])]
    tokens = [[*TOKENS[:5], 9, 10, 11], [*TOKENS[:3], 12], [13]]
    for logits, expected in zip(engine.forward(batch), tokens, strict=True):
        close(logits, whole(expected)[-1])


def test_a_full_slot_is_left_alone_by_the_steps_of_others():
    engine = engine_of(context_length=12)
    full, other = engine.new_sequence(), engine.new_sequence()
    expected = whole(TOKENS)
    engine.forward([(full, TOKENS)], "none")
    for token in TOKENS:
        engine.forward([(other, [token])], "none")
    full.truncate(11)
    close(engine.forward([(full, TOKENS[11:])])[0], expected[-1])
    with pytest.raises(ContextFull, match="12 tokens and 1 more pass the context length of 12"):
        engine.forward([(full, [1])])


def test_slots_are_counted():
    engine = engine_of(context_length=50, cache_tokens=100)
    assert engine.free_tokens == 100
    one, two, three = (engine.new_sequence() for _ in range(3))
    assert engine.free_tokens == 0, "three wait for two slots"
    engine.forward([(one, [1, 2])])
    with pytest.raises(CacheFull, match="all 2 slots"):
        engine.forward([(two, [1]), (three, [1])])
    assert (two.cache, three.cache, len(one)) == (None, None, 2)
    three.close()
    assert engine.free_tokens == 50
    engine.forward([(two, [1])])
    with pytest.raises(CacheFull):
        one.fork()
    two.close()
    two.close()
    assert engine.free_tokens == 50


@pytest.mark.parametrize("tokens", [[], [96], [-1]])
def test_misuse_is_refused(tokens):
    engine = engine_of()
    sequence = engine.new_sequence()
    with pytest.raises(ValueError, match=r"at least one|outside the vocabulary"):
        engine.forward([(sequence, tokens)])
    with pytest.raises(ValueError, match="twice"):
        engine.forward([(sequence, [1]), (sequence, [2])])
    with pytest.raises(ValueError, match="of another engine"):
        engine.forward([(engine_of().new_sequence(), [1])])
    sequence.close()
    for use in (sequence.fork, lambda: engine.forward([(sequence, [1])])):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_codes_are_taken_from_the_masters_whatever_is_computed_in():
    engine, exact = engine_of(dtype=torch.bfloat16), engine_of()
    assert engine.decoder.keys[0].dtype == torch.bfloat16
    for ours, theirs in zip(
        *(each.decoder._model.modules() for each in (engine, exact)), strict=True
    ):
        if isinstance(ours, TernaryLinear):
            assert torch.equal(ours.codes, theirs.codes)
            assert torch.equal(ours.weight_scale, theirs.weight_scale)
    (logits,) = engine.forward([(engine.new_sequence(), TOKENS)], "all")
    expected = whole(TOKENS)
    assert np.abs(logits - expected).max() < 0.1 * np.abs(expected).max()


def test_models_of_another_kind_are_named():
    with pytest.raises(UnsuitedModel, match="no ternary layer"):
        GpuEngine(tiny_model())
    with pytest.raises(UserError, match="--context-length 999: the model was made for"):
        GpuEngine(model_of(), context_length=999)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", ["packed", "trained"])
def test_texts_are_those_of_the_other_engines(folder, name):
    opened = open_model(folder / "packed", EngineOptions(context_length=128))
    prompts = [opened.tokenizer.encode(text) for text in ("some words", "more words to", "some w")]
    options = GenerateOptions(max_new_tokens=12)

    def texts(engine):
        prefixes = PrefixCache(2)
        found = generate(
            engine, prompts, options, tokenizer=opened.tokenizer, prefixes=prefixes, max_batch=2
        )
        return [text.tokens for text in found.texts]

    engine = GpuEngine.load(folder / name, device="cpu", context_length=128, cache_tokens=384)
    assert texts(engine) == texts(TransformersEngine.load(folder / name, context_length=128))
    opened.engine.close()


def test_cuda_is_asked_for_and_refused_in_one_line(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda: PyTorch sees no CUDA device"):
        main([str(folder / "packed"), "--prompt", "x", "--device", "cuda"])
    with pytest.raises(UserError, match="--head int8 is not used here"):
        open_engine(folder / "packed", EngineOptions(device="cuda", head="int8"))
    with pytest.raises(UserError, match="leave out --engine cpu"):
        EngineOptions(device="cuda", engine="cpu")


def test_a_model_that_the_kernels_do_not_take_runs_through_transformers(folder, monkeypatch):
    """Without a GPU: both loaders are replaced by ones that compute on the CPU."""
    from sparse_bitnet.engine.gpu import gpu_engine as module

    loads = {"gpu": GpuEngine.load, "slow": TransformersEngine.load}
    asked = []

    def gpu(checkpoint, **options):
        asked.append("gpu")
        if "plain" in str(checkpoint):
            raise UnsuitedModel("it has no ternary layer")
        return loads["gpu"](checkpoint, device="cpu", **options)

    def slow(checkpoint, *, device, **options):
        asked.append(device)
        return loads["slow"](checkpoint, **options)

    monkeypatch.setattr(module, "check_device", lambda device: None)
    monkeypatch.setattr(GpuEngine, "load", gpu)
    monkeypatch.setattr(TransformersEngine, "load", slow)
    plain = folder / "plain"
    tiny_model(max_position_embeddings=128).save_pretrained(plain)
    options = EngineOptions(device="cuda", context_length=64)
    first, second = open_engine(folder / "packed", options), open_engine(plain, options)
    assert (first.engine_name, first.note) == ("gpu", None)
    assert (second.engine_name, second.note) == ("transformers", "it has no ternary layer")
    assert asked == ["gpu", "gpu", "cuda"]
    third = open_engine(
        folder / "packed",
        EngineOptions(device="cuda", engine="transformers", context_length=64),
    )
    assert (third.engine_name, asked[-1]) == ("transformers", "cuda")
    # Left to us: packed models stay with the CPU engine, others go where there is a GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = [
        open_engine(path, EngineOptions(context_length=64)) for path in (folder / "packed", plain)
    ]
    assert [opened.engine_name for opened in found] == ["cpu", "transformers"]
    assert asked[-2:] == ["gpu", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert open_engine(plain, EngineOptions(context_length=64)).note is None
    assert asked[-1] == "cpu"
