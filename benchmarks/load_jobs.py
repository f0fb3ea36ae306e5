# SPDX-License-Identifier: Apache-2.0
"""Requests of the clients of load_server.py, with expected results: prompts of mixed lengths, some with a
shared prefix, continued one by one by the engine alone, without a server."""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.conversation import ChatTemplate
from sparse_bitnet.generation.grammar import Grammar
from sparse_bitnet.generation.open_model import open_model
from sparse_bitnet.generation.sampling_options import SamplingOptions
from sparse_bitnet.serve.messages import FunctionTool
from sparse_bitnet.serve.tool_calls import ToolCallReader, syntax_of, tool_grammar

KINDS = ("text", "schema", "chat", "tool")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "sizes": {"type": "array"}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


@dataclass(frozen=True)
class Job:
    """A request and its expected result."""

    path: str
    body: dict[str, Any]
    prompt: list[int]
    text: str
    """Expected text; for tool calls, their names and arguments."""
    tokens: int
    finish: str


def make_jobs(checkpoint: str, engine: EngineOptions, options: argparse.Namespace) -> list[Job]:
    """Return prompts with their serial continuations."""
    opened = open_model(checkpoint, engine)
    rng = random.Random(0)
    context = min(opened.engine.context_length, options.context)
    # The package's own sources: text with any characters, the same on every machine.
    sources = sorted(Path(__file__).parents[1].glob("src/**/*.py"))
    tokens = opened.tokenizer.encode("\n".join(path.read_text() for path in sources))
    longest = min(context - options.max_tokens, len(tokens) // 2)
    try:
        template = ChatTemplate.load(opened.folder)
    except UserError:
        template = None
    syntax = syntax_of(template.source) if template else None
    possible = {"text": True, "schema": True, "chat": template, "tool": syntax}
    kinds = [kind for kind in options.kinds if possible[kind]]
    grammars = opened.grammars()
    jobs: list[Job] = []
    # Most prompts are short and some long.
    sizes = [max(1, int(longest * rng.random() ** 3)) for _ in range(options.prompts)]
    for number, size in enumerate(track(sizes, "serial run", transient=True)):
        kind = kinds[number % len(kinds)]
        wanted = rng.randint(max(options.max_tokens // 4, 1), options.max_tokens)
        body: dict[str, Any] = {"model": "model", "max_tokens": wanted, "temperature": 0}
        start = rng.randrange(len(tokens) - size)
        prompt, grammar, reader = tokens[start : start + size], None, None
        if kind in ("chat", "tool"):
            assert template is not None
            messages = [{"role": "user", "content": opened.tokenizer.decode(prompt[:200])}]
            body |= {"messages": messages}
            if kind == "tool":
                assert syntax is not None
                body |= {"tools": [TOOL], "tool_choice": "required"}
                reader = ToolCallReader(syntax, frozenset({"look_up"}))
                function = FunctionTool.model_validate(TOOL["function"])
                grammar = tool_grammar(syntax, [function], is_forced=True)
            text = template.render(messages, tools=body.get("tools"))
            prompt = opened.tokenizer.encode(text, add_special_tokens=False)
        else:
            plain = [job.prompt for job in jobs if "prompt" in job.body]
            if plain and rng.random() < 0.3:
                # Like a chat that continues: an earlier prompt, and more.
                prompt = (rng.choice(plain) + prompt)[:longest]
            body |= {"prompt": prompt}
            if kind == "schema":
                # Both servers know this name.
                body |= {"json_schema": SCHEMA}
                grammar = Grammar.json_schema(SCHEMA)
        generation = opened.continue_tokens(
            prompt,
            wanted,
            sampling=SamplingOptions(temperature=0),
            grammar=None if grammar is None else grammars.start(grammar),
            is_start="messages" in body,
        )
        text, finish = generation.text, generation.finish_reason
        if reader is not None:
            pieces = reader.feed(text) + reader.end()
            text = "".join(
                piece if isinstance(piece, str) else (piece.name or "") + piece.arguments
                for piece in pieces
            )
            finish = "tool_calls" if finish == "stop" and reader.calls else finish
        path = "chat/completions" if "messages" in body else "completions"
        jobs.append(Job(path, body, prompt, text, len(generation.tokens), str(finish)))
    opened.engine.close()
    return jobs
