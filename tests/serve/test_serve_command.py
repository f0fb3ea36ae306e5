# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet serve` with the real engine: the same texts as without a server, and a clean end."""

import concurrent.futures
import signal
import subprocess
import sys

import numpy as np
import openai
import pytest

from packed_models import make_packed
from serving_thread import TEMPLATE, number_tokenizer
from sparse_bitnet.cli.serve import ServeConfig
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.open_model import open_model
from sparse_bitnet.generation.sampling_options import SamplingOptions

VOCAB = 257
COMMAND = """
import sys
from sparse_bitnet.cli.main import main
main(sys.argv[1:])
print("torch" in sys.modules, "transformers" in sys.modules)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A packed model, random; the text of a token is its number."""
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 512, "initializer_range": 1.0}
    packed = make_packed(tmp_path_factory.mktemp("served"), **sizes)
    number_tokenizer(VOCAB).save(str(packed / "tokenizer.json"))
    (packed / "chat_template.jinja").write_text(TEMPLATE)
    return packed


@pytest.fixture(scope="module")
def engine_options():
    return EngineOptions(threads=1, weight_format="i2")


def test_texts_are_those_of_the_engine_and_torch_stays_away(folder, engine_options):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, 1 + 30 * number).tolist() for number in range(12)]
    opened = open_model(folder, engine_options)
    expected = []
    for prompt in prompts:
        greedy = SamplingOptions(temperature=0)
        expected.append(opened.continue_tokens(prompt, 40, sampling=greedy).text)
    opened.engine.close()
    assert len(set(expected)) > 6, "the test is to tell texts apart"
    options = ["--port", "0", "--threads", "1", "--weight-format", "i2", "--max-running", "5"]
    options += ["--prefill-slice", "7"]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", str(folder), *options, "--model-name", "numbers"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("numbers: http://127.0.0.1:"), line + process.stderr.read()
        page = line.split()[1].removesuffix("v1")
        assert line.endswith(f" (chat page: {page}, Ctrl-C to stop)\n")
        client = openai.OpenAI(base_url=line.split()[1], api_key="key", max_retries=0, timeout=120)

        def text(prompt, streamed):
            answer = client.completions.create(
                model="numbers", prompt=prompt, max_tokens=40, temperature=0, stream=streamed
            )
            parts = answer if streamed else [answer]
            return "".join(part.choices[0].text for part in parts)

        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            for streamed in (True, False):
                assert list(pool.map(text, prompts, [streamed] * 12)) == expected
        answer = client.chat.completions.create(
            model="numbers", messages=[{"role": "user", "content": "hello"}], max_tokens=5
        )
        assert answer.usage.prompt_tokens == 1
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert errors == ""
    assert output == "False False\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": -1}, "--port -1"),
        ({"max_running": 0}, "--max-running 0"),
        ({"prefill_slice": 0}, "--prefill-slice 0"),
        ({"max_tokens": 0}, "--max-tokens 0"),
        ({"grace": -1.0}, "--grace -1"),
    ],
)
def test_options_outside_their_range_are_named(options, words):
    with pytest.raises(UserError, match=words):
        ServeConfig(**options)
