# SPDX-License-Identifier: Apache-2.0
"""Generated text: transformers' own, the same in any batch, streamed, bounded, and reusing prefixes."""

import pytest
import torch

from factories import tiny_model
from sparse_bitnet.data.tokenizer import train_tokenizer
from sparse_bitnet.engine.protocol import CacheFull, ContextFull
from sparse_bitnet.engine.transformers_engine import TransformersEngine
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.open_model import OpenModel
from sparse_bitnet.generation.prefix_cache import PrefixCache
from sparse_bitnet.generation.request import GenerationRequest
from sparse_bitnet.generation.sampling_options import SamplingOptions
from sparse_bitnet.generation.scheduler import Scheduler
from sparse_bitnet.generation.text import TextTokenizer

GREEDY = SamplingOptions(temperature=0)
PROMPTS = [[5, 17, 3], [90], [41, 8, 8, 60, 22, 1, 33, 70], [5, 17, 9, 9]]


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer(train_tokenizer(["some words, some more words"], 270).backend_tokenizer)


@pytest.fixture(scope="module")
def model():
    model = tiny_model(seed=6, vocab_size=270, max_position_embeddings=512).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


@pytest.fixture
def engine(model):
    engine = Counting(model)
    yield engine
    assert not engine.sequences, "every sequence is given back"
    engine.close()


class Counting(TransformersEngine):
    """Remembers how many tokens each forward computed."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.computed = []

    def forward(self, batch, logits="last"):
        self.computed.append([len(tokens) for _, tokens in batch])
        return super().forward(batch, logits)


def run(engine, prompt, tokenizer, *, end_tokens=frozenset(), max_tokens=12, **named):
    """The text of one prompt."""
    model = OpenModel(folder="", engine=engine, tokenizer=tokenizer, end_tokens=end_tokens)
    return model.continue_tokens(prompt, max_tokens, **{"sampling": GREEDY, **named})


def run_together(engine, prompts, tokenizer, *, sampling=GREEDY, **named):
    """The tokens of several prompts."""
    requests = [
        GenerationRequest(prompt=prompt, max_tokens=12, sampling=sampling, tokenizer=tokenizer)
        for prompt in prompts
    ]
    ended = {id(one.request): one for one in Scheduler(engine, **named).run(requests)}
    return [ended[id(request)].tokens for request in requests]


def test_greedy_text_is_that_of_transformers(engine, model, tokenizer):
    for prompt in PROMPTS:
        text = run(engine, prompt, tokenizer, max_tokens=40)
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        assert text.tokens == expected[0, len(prompt) :].tolist()
        assert text.text == tokenizer.decode(text.tokens)
        assert (text.finish_reason, text.prompt_tokens) == ("length", len(prompt))
        assert text.prefill_rate > 0
        assert text.decode_rate > 0


@pytest.mark.parametrize("max_running", [1, 3, 32])
def test_a_text_does_not_depend_on_others_of_its_batch(engine, tokenizer, max_running):
    sampling = SamplingOptions(temperature=1.5, top_p=0.9, repetition_penalty=1.1, seed=3)
    alone = [run(engine, prompt, tokenizer, sampling=sampling).tokens for prompt in PROMPTS]
    options = {"sampling": sampling, "max_running": max_running}
    assert run_together(engine, PROMPTS, tokenizer, **options) == alone
    other = SamplingOptions(temperature=1.5, seed=4)
    assert run_together(engine, PROMPTS, tokenizer, sampling=other) != alone


def test_end_tokens_and_stop_strings_end_a_text(engine, tokenizer):
    whole = run(engine, PROMPTS[2], tokenizer)
    end = whole.tokens[4]
    first = whole.tokens.index(end)
    text = run(engine, PROMPTS[2], tokenizer, end_tokens=frozenset({end}))
    assert text.finish_reason == "stop"
    assert text.tokens == whole.tokens[: first + 1]
    assert text.text == tokenizer.decode(whole.tokens[:first])

    stop = whole.text[3:5]
    text = run(engine, PROMPTS[2], tokenizer, stop=(stop, "never"))
    assert text.finish_reason == "stop"
    assert text.text == whole.text[: whole.text.index(stop)]


def test_ctrl_c_leaves_the_sequences_of_earlier_calls(engine, tokenizer):
    prefixes, seen = PrefixCache(), []
    run(engine, PROMPTS[2], tokenizer, prefixes=prefixes)

    def interrupted(piece):
        seen.append(piece)
        if len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(engine, PROMPTS[0], tokenizer, prefixes=prefixes, on_text=interrupted)
    assert len(engine.sequences) == len(prefixes) == 1
    prefixes.clear()


def test_a_small_cache_serves_many_prompts_one_after_the_other(model, tokenizer):
    prompts = [[number] * 50 for number in range(1, 8)]
    expected = run_together(TransformersEngine(model), prompts, tokenizer)
    engine = Counting(model, cache_tokens=140)
    prefixes = PrefixCache()
    for _ in range(2):
        assert run_together(engine, prompts, tokenizer, prefixes=prefixes) == expected
    assert max(map(len, engine.computed)) == 2
    prefixes.clear()
    with pytest.raises(CacheFull, match="room for 140 tokens"):
        run(engine, [1] * 140, tokenizer)
    assert not engine.sequences
    engine.close()


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        ([], {}, UserError, "prompt is empty"),
        ([270], {}, UserError, "token 270 is outside the model's vocabulary of 270"),
        ([-1, 5], {}, UserError, "token -1 is outside the model's vocabulary of 270"),
        ([1] * 512, {"max_tokens": 1}, ContextFull, "the context has room for 512: request"),
        ([1] * 500, {"max_tokens": 13}, ContextFull, "request fewer, or shorten"),
        ([1], {"max_tokens": 0}, UserError, "max_tokens=0"),
        ([1], {"stop": ("",)}, UserError, "stop string is empty"),
    ],
)
def test_invalid_requests_are_refused_before_any_work(
    engine, tokenizer, prompt, options, error, words
):
    with pytest.raises(error, match=words):
        run(engine, prompt, tokenizer, **options)
    assert engine.computed == []
