# SPDX-License-Identifier: Apache-2.0
"""An agent framework as it comes: a tool is called, its result read, the answer given by another call."""

import json

import numpy as np
import pytest

from scripted_engine import ScriptedEngine
from serving_thread import END, byte_tokenizer, server

smolagents = pytest.importorskip("smolagents")

TOKENIZER = byte_tokenizer()
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | default([]) | tojson }}"
    "{% endfor %}<assistant>"
)
MARK = TOKENIZER.encode("<assistant>")


def call(name, **arguments):
    body = json.dumps({"name": name, "arguments": arguments})
    return [*TOKENIZER.encode(f"<tool_call>\n{body}\n</tool_call>"), END]


def logits(tokens, size):
    """Asks for the weather, and answers with what it was told."""
    start = max(i for i in range(len(tokens)) if tokens[i : i + len(MARK)] == MARK) + len(MARK)
    was_told = "rain in Bern" in TOKENIZER.decode(tokens[:start])
    script = call("final_answer", answer="umbrella") if was_told else call("weather", city="Bern")
    found = np.zeros(size, np.float32)
    found[script[min(len(tokens) - start, len(script) - 1)]] = 30
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_two_steps_of_a_tool_calling_agent(stream):
    asked = []

    @smolagents.tool
    def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: where.
        """
        asked.append(city)
        return f"rain in {city}"

    engine = ScriptedEngine(
        vocab_size=300, context_length=1 << 15, cache_tokens=1 << 16, logits=logits
    )
    with server(engine, template=TEMPLATE) as running:
        model = smolagents.OpenAIModel("scripted", api_base=f"{running.url}/v1", api_key="none")
        agent = smolagents.ToolCallingAgent(
            [weather], model, stream_outputs=stream, verbosity_level=0
        )
        assert agent.run("What do I need in Bern?", max_steps=3) == "umbrella"
    assert asked == ["Bern"]
