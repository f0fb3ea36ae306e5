# SPDX-License-Identifier: Apache-2.0
"""The scheduler with a model whose recurrent state cannot be cut back: the same tokens as alone, prompts
start from states that are there, and nothing is drafted."""

import queue
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packed_models import make_packed
from serving_thread import byte_tokenizer
from sparse_bitnet.cli.generate import SpeculationOptions
from sparse_bitnet.generation.prefix_cache import PrefixCache
from sparse_bitnet.generation.request import Generation, GenerationRequest
from sparse_bitnet.generation.sampling_options import SamplingOptions
from sparse_bitnet.generation.scheduler import Scheduler
from sparse_bitnet.generation.speculation import Speculation
from sparse_bitnet.serve.threaded_scheduler import ThreadedScheduler

pytest.importorskip("sparse_bitnet._cpu")
from sparse_bitnet.engine.engine import Engine

TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, 96, 300)]
GREEDY = SamplingOptions(temperature=0)
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    return make_packed(folder, "qwen3_5_text", num_hidden_layers=4, max_position_embeddings=256)


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine.load(folder, weight_format="i2", threads=1, cache_tokens=4096)
    yield engine
    engine.close()


def request(prompt: list[int], count: int = 6, **more: Any) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt, max_tokens=count, sampling=GREEDY, tokenizer=TOKENIZER, **more
    )


def alone(engine: Engine, prompt: list[int], count: int = 6) -> list[int]:
    """Return the likeliest tokens, without a scheduler."""
    sequence = engine.new_sequence()
    (logits,) = engine.forward([(sequence, prompt)])
    for _ in range(count - 1):
        (logits,) = engine.forward([(sequence, [int(logits.argmax())])])
    tokens = [*sequence.tokens[len(prompt) :], int(logits.argmax())]
    sequence.close()
    return tokens


def run(engine: Engine, *prompts: list[int], **options: Any) -> list[Generation]:
    """Return the generations in the order of their prompts; each has the tokens that it has alone."""
    requests = [request(prompt) for prompt in prompts]
    ended = {id(g.request): g for g in Scheduler(engine, **options).run(requests)}
    generations = [ended[id(each)] for each in requests]
    for generation, prompt in zip(generations, prompts, strict=True):
        assert generation.tokens == alone(engine, prompt)
    return generations


def test_later_prompts_start_from_a_state_that_is_there(engine: Engine) -> None:
    prefixes = PrefixCache()
    for turn in range(3):  # of conversations that have more states than there are, by and by
        for other in range(60, 66):
            asked = request([other, *TOKENS[: 20 + 30 * turn]])
            (each,) = Scheduler(engine, prefixes=prefixes).run([asked])
            assert each.cached_tokens == (30 * turn - 17 if turn else 0)
    prompt = TOKENS[:60]
    [first] = run(engine, prompt, prefixes=prefixes)
    whole = prompt + first.tokens
    for later, cached in (
        (prompt, 52),  # its snapshot
        ([*whole, 1, 2, 3], len(whole) - 1),  # the last token was never computed
        (TOKENS[:52] + [5] * 9, 52),
        (TOKENS[:51] + [5] * 9, 0),
    ):
        [generation] = run(engine, later, prefixes=prefixes)
        assert generation.cached_tokens == cached
    prefixes.clear()
    assert engine.sequences == []


@pytest.mark.parametrize("slice", [512, 16])
def test_prompts_that_arrive_together_share_what_they_have_in_common(engine: Engine, slice: int):
    prompt = TOKENS[:90]
    prompts = [prompt, prompt, [*TOKENS[:85], 1, 2], [*TOKENS[:50], 3, 4, 5], prompt]
    generations = run(engine, *prompts, prefill_slice=slice)
    assert [g.cached_tokens for g in generations] == [0, 89, 85, 50, 89]


def test_more_generations_than_states_take_turns(folder: Path) -> None:
    engine = Engine.load(folder, weight_format="i2", threads=1, cache_tokens=1024)
    prompts = [[token, *TOKENS[: 3 * token]] for token in range(20)]
    expected = [alone(engine, prompt) for prompt in prompts]
    ended: queue.Queue[Generation] = queue.Queue()
    scheduler = ThreadedScheduler(engine, max_queue=64)
    scheduler.start()

    def deliver(generation: Generation, output: Any) -> None:
        if output.finish is not None:
            ended.put(generation)

    generations = scheduler.submit([request(prompt, deliver=deliver) for prompt in prompts])
    for _ in prompts:
        ended.get(timeout=60)
    scheduler.stop()
    assert scheduler.join(60)
    assert [generation.tokens for generation in generations] == expected
    assert engine.sequences == []
    engine.close()


def test_nothing_is_drafted(engine: Engine) -> None:
    prompt = TOKENS[:4] * 10
    [generation] = run(engine, prompt, speculation=Speculation(engine))
    assert generation.draft_tokens == 0
    model: Any = SimpleNamespace(engine=engine, tokenizer=TOKENIZER)
    assert SpeculationOptions().open(model) is None
