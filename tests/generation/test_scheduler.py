# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: every generation gets exactly its own tokens, whatever happens beside it."""

import gc
import queue
import time
from contextlib import contextmanager

import numpy as np
import pytest

from scripted_engine import ScriptedEngine, greedy, logits_after
from serving_thread import number_tokenizer
from sparse_bitnet.engine.protocol import ContextFull
from sparse_bitnet.generation.request import GenerationRequest, score
from sparse_bitnet.generation.sampling_options import SamplingOptions
from sparse_bitnet.generation.scheduler import Scheduler
from sparse_bitnet.generation.text import TextTokenizer
from sparse_bitnet.serve.threaded_scheduler import QueueFull, Stopping, ThreadedScheduler

VOCAB = 300
LONG = 30.0


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer(number_tokenizer(VOCAB))


@contextmanager
def running(engine, **options):
    """A scheduler; at the end nothing is left in the engine."""
    scheduler = ThreadedScheduler(engine, **options)
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.stop()
        assert scheduler.join(LONG)
        assert engine.sequences == []


class Sink:
    """Collects the outputs of generations."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.ended: queue.Queue = queue.Queue()
        self.texts: dict = {}
        self.times: list[float] = []

    def request(self, prompt, max_tokens=8, stop=(), seed=None, **more):
        options = SamplingOptions(temperature=0) if seed is None else SamplingOptions(seed=seed)
        return GenerationRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=options,
            tokenizer=self.tokenizer,
            stop=stop,
            deliver=more.pop("deliver", self.take),
            **more,
        )

    def take(self, generation, output):
        self.texts[generation] = self.texts.get(generation, "") + output.text
        self.times.append(time.perf_counter())
        if output.finish is not None:
            self.ended.put(generation)

    def wait(self, count):
        return [self.ended.get(timeout=LONG) for _ in range(count)]


@pytest.fixture
def sink(tokenizer):
    return Sink(tokenizer)


def random_prompts(count, longest=150):
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB, rng.integers(1, longest)).tolist() for _ in range(count)]


def test_many_generations_get_their_own_tokens(sink):
    prompts = random_prompts(40)
    with running(ScriptedEngine(), max_running=7) as scheduler:
        for start in range(0, 40, 5):
            requests = [sink.request(p, 5 + i) for i, p in enumerate(prompts[start : start + 5])]
            scheduler.submit(requests)
        ended = sink.wait(40)
    assert len(set(ended)) == 40
    for generation in ended:
        request = generation.request
        assert generation.tokens == greedy(request.prompt, request.max_tokens, VOCAB)
        assert sink.texts[generation] == "".join(f"{token} " for token in generation.tokens)
        assert generation.finish_reason == "length"


def test_long_prompt_does_not_hold_up_the_others(sink):
    engine = ScriptedEngine(context_length=4096, delay=0.002)
    with running(engine, prefill_slice=32) as scheduler:
        scheduler.submit([sink.request([1], 60)])
        while not sink.times:
            time.sleep(0.001)
        [long] = scheduler.submit([sink.request([2] * 1000, 1)])
        sink.wait(2)
    mixed = [sizes for sizes in engine.batches if len(sizes) > 1]
    assert len(mixed) > 10
    assert max(max(sizes) for sizes in mixed) <= 32
    assert long.tokens == greedy(long.request.prompt, 1, VOCAB)


def test_prompts_share_a_slice(sink):
    engine = ScriptedEngine(context_length=4096, delay=0.002)
    short, long = [3] * 40, [4] * 3000
    with running(engine) as scheduler:
        scheduler.submit([sink.request(long, 1), sink.request(short, 1)])
        first, second = sink.wait(2)
    assert (first.request.prompt, second.request.prompt) == (short, long)
    assert engine.batches[0] == [472, 40]


def test_ended_sequences_serve_later_prompts(sink):
    engine = ScriptedEngine()
    prompt = random_prompts(1)[0] + [9] * 50
    with running(engine) as scheduler:
        [first] = scheduler.submit([sink.request(prompt, 10)])
        sink.wait(1)
        [again] = scheduler.submit([sink.request(prompt, 10)])
        [longer] = scheduler.submit([sink.request([*first.context, 1, 2], 10)])
        sink.wait(2)
    assert (first.cached_tokens, again.cached_tokens) == (0, len(prompt) - 1)
    # The last token drawn was never computed.
    assert longer.cached_tokens == len(first.context) - 1
    assert again.tokens == first.tokens
    assert longer.tokens == greedy([*first.context, 1, 2], 10, VOCAB)


def test_nothing_is_computed_for_zero_tokens(sink):
    prompt = list(range(40))
    with running(ScriptedEngine()) as scheduler:
        scheduler.submit([sink.request(prompt, 3)])
        sink.wait(1)
        scheduler.submit([sink.request(prompt, 0), sink.request(prompt[:2], 0)])
        ended = sink.wait(2)
    for generation in ended:
        assert (generation.tokens, generation.finish_reason) == ([], "length")


def test_choices_of_one_prompt_compute_it_once(sink):
    engine = ScriptedEngine(context_length=2048)
    prompt = list(range(200)) * 3
    with running(engine) as scheduler:
        scheduler.submit([sink.request(prompt, 4, seed=i) for i in range(4)])
        ended = sink.wait(4)
    assert sorted(generation.cached_tokens for generation in ended) == [0, 599, 599, 599]
    assert sum(map(sum, engine.batches)) == 600 + 3 + 4 * 3


def test_kept_sequences_make_room(sink):
    engine = ScriptedEngine(cache_tokens=64 * 6, context_length=300)
    prompts = [[i] * 150 for i in range(8)]
    with running(engine) as scheduler:
        for prompt in prompts:
            scheduler.submit([sink.request(prompt, 100)])
        ended = sink.wait(8)
        assert scheduler.load().kept_prefixes >= 1
    for generation in ended:
        assert generation.tokens == greedy(generation.request.prompt, 100, VOCAB)


def test_failures_stay_with_the_one_that_fails(sink):
    engine = ScriptedEngine(fails=lambda tokens: 299 in tokens)
    good = random_prompts(5)
    good = [[token for token in prompt if token < 200] + [1] for prompt in good]

    def unsound(generation, output):
        raise OSError("receiver")

    with running(engine) as scheduler:
        requests = [sink.request(prompt, 1) for prompt in good]
        requests.insert(2, sink.request([1, 299, 2], 6))
        requests.insert(4, sink.request([1, 2], 6, deliver=unsound))
        generations = scheduler.submit(requests)
        sink.wait(6)
        [later] = scheduler.submit([sink.request([1, 2, 3], 1)])
        sink.wait(1)
    assert generations[2].finish_reason == "error"
    assert isinstance(generations[2].failure, RuntimeError)
    for generation in [*generations[:2], generations[3], *generations[5:], later]:
        assert generation.finish_reason == "length"
        assert generation.tokens == greedy(generation.request.prompt, 1, VOCAB)


def test_logits_that_are_no_numbers_fail_their_own_generation(sink):
    def logits(tokens, size):
        values = logits_after(tokens, size)
        return np.full_like(values, np.nan) if tokens[0] == 7 else values

    with running(ScriptedEngine(logits=logits)) as scheduler:
        bad, scored, good = scheduler.submit(
            [
                sink.request([7], 5),
                sink.request([7, 8, 9], 0, score_from=0, top_scores=1),
                sink.request([8], 5),
            ]
        )
        sink.wait(3)
    for generation in (bad, scored):
        assert generation.finish_reason == "error"
        assert "damaged" in str(generation.failure)
    assert good.tokens == greedy([8], 5, VOCAB)


def test_requests_for_many_take_turns_with_others(sink):
    with running(ScriptedEngine(vocab_size=VOCAB, delay=0.01), max_running=2) as scheduler:
        scheduler.submit([sink.request([number], 4) for number in range(8)])
        scheduler.submit([sink.request([9], 4)])
        ended = sink.wait(9)
    assert [9] in [one.request.prompt for one in ended[:4]]


def test_waiting_and_running_generations_can_be_cancelled(sink):
    with running(ScriptedEngine(delay=0.005), max_running=1) as scheduler:
        first, second, third = scheduler.submit([sink.request([i], 900) for i in (1, 2, 3)])
        while not sink.times:
            time.sleep(0.001)
        scheduler.cancel(second)
        [ended] = sink.wait(1)
        assert ended is second
        assert second.generated == 0
        scheduler.cancel(first)
        sink.wait(1)
        assert 0 < first.generated < 900
        assert first.finish_reason == "cancelled"
        scheduler.cancel(third)
        scheduler.cancel(third)
        sink.wait(1)


def test_queue_is_bounded_all_or_nothing(sink):
    with running(ScriptedEngine(delay=0.01), max_running=2, max_queue=3) as scheduler:
        scheduler.submit([sink.request([i], 900) for i in range(2)])
        while scheduler.load().running < 2:
            time.sleep(0.001)
        scheduler.submit([sink.request([i], 900) for i in range(2)])
        with pytest.raises(QueueFull):
            scheduler.submit([sink.request([i], 1) for i in range(2)])
        assert scheduler.load().waiting == 2
        scheduler.submit([sink.request([9], 900)])


def test_too_long_for_context_or_cache_is_refused_at_once(sink):
    with running(ScriptedEngine(context_length=100)) as scheduler:
        with pytest.raises(ContextFull, match=r"95 tokens and 6 new ones are requested.*100"):
            scheduler.submit([sink.request([1] * 95, 6)])
        scheduler.submit([sink.request([1] * 95, 5)])
        [whole] = sink.wait(1)
        assert whole.generated == 5
    engine = ScriptedEngine(cache_tokens=128)
    with running(engine) as scheduler:
        assert scheduler.capacity == 128
        scheduler.submit([sink.request([1] * 100, 28), sink.request([2] * 100, 28)])
        assert {generation.generated for generation in sink.wait(2)} == {28}


@pytest.mark.parametrize("grace", [0.0, 30.0])
def test_stop_ends_waiting_and_running_generations(sink, grace):
    scheduler = ThreadedScheduler(ScriptedEngine(delay=0.002), max_running=1)
    scheduler.start()
    first, second = scheduler.submit([sink.request([1], 40), sink.request([2], 40)])
    while not sink.times:
        time.sleep(0.001)
    scheduler.stop(grace)
    with pytest.raises(Stopping):
        scheduler.submit([sink.request([3], 1)])
    assert scheduler.join(LONG)
    assert second.finish_reason == "shutdown"
    assert first.finish_reason == ("length" if grace else "shutdown")
    assert len(sink.wait(2)) == 2


def test_prompt_and_output_are_scored(sink):
    prompt = random_prompts(1, 99)[0] + [3] * 40
    with running(ScriptedEngine()) as scheduler:
        scored = [sink.request(prompt, wanted, top_scores=3, score_from=0) for wanted in (0, 4)]
        only, both = scheduler.submit(scored)
        sink.wait(2)
    assert only.generated == 0
    assert only.finish_reason == "length"
    assert only.prompt_scores == both.prompt_scores
    assert [entry.token for entry in only.prompt_scores] == prompt
    assert only.prompt_scores[0].logprob is None
    for place in (1, 31, 32, 33, len(prompt) - 1):
        logits = logits_after(prompt[:place], VOCAB).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        entry = only.prompt_scores[place]
        assert entry.logprob == pytest.approx(expected[prompt[place]], abs=1e-9)
        assert [token for token, _ in entry.top] == np.argsort(-expected)[:3].tolist()
    assert both.tokens == greedy(prompt, 4, VOCAB)


def test_run_steps_where_it_is_called(sink):
    engine = ScriptedEngine(cache_tokens=64 * 12)
    prompts = random_prompts(30, 90)
    scheduler = Scheduler(engine, max_running=5)
    requests = [sink.request(prompt, 5 + number) for number, prompt in enumerate(prompts)]
    scored = [sink.request(prompt, 0, score_from=max(len(prompt) // 2, 1)) for prompt in prompts]
    taken = []
    source = (taken.append(request) or request for request in [*requests, *scored])
    ended = []
    for generation in scheduler.run(source):
        ended.append(generation)
        assert len(taken) <= len(ended) + 3 * 5, "no more are taken than there is room for"
    assert engine.sequences == []
    by_request = {id(generation.request): generation for generation in ended}
    for request in requests:
        assert by_request[id(request)].tokens == greedy(request.prompt, request.max_tokens, VOCAB)
    for request in scored:
        scores = by_request[id(request)].prompt_scores
        assert [entry.token for entry in scores] == request.prompt[request.score_from :]
        for place, entry in enumerate(scores, request.score_from):
            logits = logits_after(request.prompt[:place], VOCAB)
            assert entry.logprob == score(logits, request.prompt[place], 0).logprob


def test_run_raises_the_error_of_a_generation(sink):
    engine = ScriptedEngine(fails=lambda tokens: 299 in tokens)
    requests = [sink.request(prompt, 900) for prompt in ([1, 2], [3, 299], [4, 5])]
    with pytest.raises(RuntimeError, match="told to fail"):
        list(Scheduler(engine).run(requests))
    assert engine.sequences == []
    for _ in Scheduler(engine).run([sink.request([1, 2], 5), sink.request([3, 4], 900)]):
        break
    gc.collect()
    assert engine.sequences == [], "whoever stops listening leaves nothing behind"


@pytest.mark.parametrize(("ahead", "paused"), [(64, True), (None, False)])
def test_no_generation_is_paused_with_room_for_all(sink, ahead, paused):
    engine = ScriptedEngine(cache_tokens=64 * 8, context_length=400)
    prompts = random_prompts(6, 60)
    scheduler = Scheduler(engine)
    scheduler._room_ahead = ahead
    pauses = 0
    for generation in scheduler.run([sink.request(prompt, 200) for prompt in prompts]):
        assert generation.tokens == greedy(generation.request.prompt, 200, VOCAB)
        pauses += generation.pauses
    assert bool(pauses) == paused


def test_scores_name_lower_tokens_of_ties_first_and_are_numbers_that_json_has():
    logits = np.zeros(10, dtype=np.float32)
    logits[7] = 1
    scored = score(logits, 0, 3)
    assert [token for token, _ in scored.top] == [7, 0, 1]
    assert scored.logprob == pytest.approx(-np.log(9 + np.e))
    scored = score(np.array([0, -np.inf, -np.inf], np.float32), 2, 2)
    assert (scored.logprob, scored.top) == (-9999.0, ((0, 0.0), (1, -9999.0)))
