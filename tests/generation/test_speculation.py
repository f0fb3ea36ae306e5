# SPDX-License-Identifier: Apache-2.0
"""Draft tokens change no text, whatever the draft, and are computed only where that pays."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from packed_models import make_packed
from scripted_engine import ScriptedEngine, logits_after
from serving_thread import END, byte_tokenizer, number_tokenizer
from sparse_bitnet.cli import generate
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.grammar import Grammar, TokenGrammars
from sparse_bitnet.generation.request import GenerationRequest
from sparse_bitnet.generation.sampling_options import SamplingOptions
from sparse_bitnet.generation.scheduler import Scheduler
from sparse_bitnet.generation.speculation import ForwardCosts, Speculation
from sparse_bitnet.generation.text import TextTokenizer

VOCAB = 40
BYTES = byte_tokenizer()
GREEDY = SamplingOptions(temperature=0)


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer(number_tokenizer(VOCAB))


def repeating(tokens, size):
    """Return logits that mostly repeat one successor of each token, so that texts repeat themselves."""
    return logits_after(tokens[-1:], size)


class FixedCosts(ForwardCosts):
    """Costs that no measured time changes: a fixed share of the first token for each further one."""

    def __init__(self, share=0.1):
        super().__init__()
        self.share = share

    def add(self, tokens, seconds):
        pass

    def seconds(self, tokens):
        return 1 + self.share * (tokens - 1)


def speculation(engine, share=0.1, **options):
    made = Speculation(engine, **options)
    made.costs = FixedCosts(share)
    return made


def engine_of(logits=repeating, **options):
    return ScriptedEngine(vocab_size=VOCAB, logits=logits, **options)


def texts_of(engine, requests, speculation=None, **options):
    """Return the complete output of each request."""
    outputs = {}

    def deliver(generation, output):
        outputs.setdefault(id(generation.request), []).append(output)

    requests = [replace(request, deliver=deliver) for request in requests]
    scheduler = Scheduler(engine, speculation=speculation, **options)
    ended = list(scheduler.run(requests))
    assert len(ended) == len(requests)
    assert engine.sequences == []
    counts = SimpleNamespace(
        draft_tokens=sum(generation.draft_tokens for generation in ended),
        accepted_tokens=sum(generation.accepted_tokens for generation in ended),
    )
    return [outputs[id(request)] for request in requests], counts


@pytest.fixture
def request_of(tokenizer):
    def make(prompt, max_tokens=120, **options):
        options = {"sampling": GREEDY} | options
        return GenerationRequest(
            prompt=prompt, max_tokens=max_tokens, tokenizer=tokenizer, **options
        )

    return make


def test_speculation_changes_no_text(request_of):
    drawn = SamplingOptions(seed=5, temperature=0.4)
    penalties = replace(drawn, frequency_penalty=0.3, repetition_penalty=1.2, top_p=0.9)
    requests = [
        request_of([1, 2, 3]),
        request_of([7], sampling=drawn, top_scores=2),
        request_of([7, 8], sampling=penalties),
        request_of([3, 4], stop=("9 ",), sampling=drawn),
        request_of([3, 4], stop_tokens=frozenset(range(12)), sampling=drawn),
        *(request_of([5, 6], max_tokens=size) for size in (1, 2, 3, 9)),
    ]
    expected = [texts_of(engine_of(), [request])[0][0] for request in requests]
    for most in (1, 7, 30):
        for company in (1, 3):
            engine = engine_of()
            drafts = speculation(engine, most=most)
            texts, done = texts_of(engine, requests, drafts, max_running=company)
            assert texts == expected
            assert 0 < done.accepted_tokens <= done.draft_tokens


def test_drafts_never_break_a_grammar():
    """Drafts include tokens that the grammar forbids; only the text's own tokens advance its state."""
    pytest.importorskip("llguidance")
    grammar = Grammar.regex(r"(\{\"(id|name)\": [0-9]{1,4}\}, ?)*end")
    matcher = TokenGrammars(BYTES, 300, frozenset({END})).start(grammar)
    for seed in range(4):
        request = GenerationRequest(
            prompt=BYTES.encode('{"id": 12}, {"id": 12}, '),
            max_tokens=150,
            tokenizer=BYTES,
            sampling=SamplingOptions(seed=seed, temperature=0.2 * seed),
            stop_tokens=frozenset({END}),
            grammar=matcher,
        )
        texts = []
        for drafts in (False, True):
            engine = ScriptedEngine(vocab_size=300, logits=repeating)
            ahead = speculation(engine) if drafts else None
            [outputs], done = texts_of(engine, [request], ahead)
            texts.append([(output.text, output.generated) for output in outputs])
        assert texts[0] == texts[1]
        assert 0 < done.accepted_tokens < done.draft_tokens


def test_a_text_that_repeats_itself_takes_fewer_forwards(request_of):
    engine = engine_of()
    _, done = texts_of(engine, [request_of([1, 2, 3], 400)], speculation(engine))
    assert len(engine.batches) < 120
    assert done.accepted_tokens > 0.8 * done.draft_tokens


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_no_drafts_where_they_do_not_pay(request_of, share):
    """A text without repetitions, and an engine for which two tokens are twice the work of one."""
    logits = logits_after if share < 1 else repeating
    engine = ScriptedEngine(vocab_size=5000 if share < 1 else VOCAB, logits=logits)
    drafts = speculation(engine, share)
    _, done = texts_of(engine, [request_of([1, 2, 3], 300, sampling=GREEDY)], drafts)
    assert done.draft_tokens <= 6


def test_many_streams_get_no_drafts(request_of):
    engine = engine_of()
    requests = [request_of([place, 2, 3], 60) for place in range(9)]
    _, done = texts_of(engine, requests, speculation(engine), max_running=9)
    assert done.draft_tokens == 0


def test_speculation_survives_a_full_cache_and_pauses(request_of, monkeypatch):
    requests = [request_of([place, 2, 3], 100) for place in range(4)]
    expected = [texts_of(engine_of(), [request])[0][0] for request in requests]
    engine = engine_of(cache_tokens=5 * 64)
    monkeypatch.setattr(Scheduler, "_room_ahead", 1)
    texts, done = texts_of(engine, requests, speculation(engine))
    assert texts == expected
    assert done.accepted_tokens > 0


def test_command_speculates(tmp_path, capsys):
    folder = make_packed(tmp_path, vocab_size=257, max_position_embeddings=256)
    number_tokenizer(257).save(str(folder / "tokenizer.json"))
    run = [str(folder), "--prompt", "1 2", "--threads", "1", "--weight-format", "i2"]
    run += ["--max-tokens", "60", "--temperature", "0"]
    texts = []
    for more in (["0"], ["7", "--stats"]):
        generate.main([*run, "--speculative-tokens", *more])
        texts.append(capsys.readouterr())
    assert texts[0].out == texts[1].out
    assert "accepted" in texts[1].err
    with pytest.raises(UserError, match="0 to 63"):
        generate.main([*run, "--speculative-tokens", "64"])
