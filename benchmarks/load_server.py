# SPDX-License-Identifier: Apache-2.0
"""Many streams at once against a server, every one compared with serial greedy output.

    python benchmarks/load_server.py PACKED                     # 32 streams for a minute
    python benchmarks/load_server.py PACKED --seconds 10 -- --threads 1
    python benchmarks/load_server.py PACKED --kinds text --llama-server PATH --gguf FILE

benchmarks/random_model.py makes a PACKED of any shape, with a real tokenizer and its chat template.
Prompts of mixed lengths, some sharing their beginnings, are first continued one by one by the engine
alone, without a server: as plain texts, as JSON of a schema and, where the model has a chat template, as
chats and as calls of a function. Then clients ask a server that the program starts for the same texts, in
random order, some leaving halfway; each text, its count of tokens and its finish reason have to be those
of the serial run. Options after -- are the server's. Exit code 1 if any token was lost or mixed up. The
server's resident memory is that after a quarter of the time, and at the end. The time between tokens is
that between two events of a stream, divided by the tokens of the second: a token can be half a character.
llama.cpp's server, with a GGUF file of the same model, gets the same requests afterwards; its texts are
its own and not compared.
"""

import argparse
import asyncio
import dataclasses
import json
import random
import sys
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from load_jobs import KINDS, Job, make_jobs
from recorded import record
from rich.console import Console
from server_processes import llama_server, started_server

from sparse_bitnet.bench.child import resident_bytes
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.host import available_cores

LEAVING = 0.05
"""Share of the clients that leave halfway."""
PERCENTILES = (50, 90, 99)
OURS = "sparse-bitnet"


@dataclass
class Tally:
    """Measurements and errors of all clients."""

    ended: int = 0
    left: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    """Seconds from request to first event with text."""
    gaps: list[float] = field(default_factory=list)
    """Seconds from one event with text to the next."""
    resident: list[int] = field(default_factory=list)
    """Bytes of the server, twice a second."""
    errors: list[str] = field(default_factory=list)
    """Texts that were wrong, incomplete or refused."""


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of a completion or chat chunk; for tool calls, their names and arguments."""
    if "text" in choice:
        return choice["text"]
    delta = choice["delta"]
    functions = [call["function"] for call in delta.get("tool_calls", ())]
    called = "".join(f.get("name", "") + f.get("arguments", "") for f in functions)
    return (delta.get("content") or "") + called


async def stream(http: httpx.AsyncClient, job: Job, leave: bool, tally: Tally, ours: bool) -> None:
    """Request one text and compare it with the expected one."""
    more = {"continuous_usage_stats": True} if ours else {}
    body = job.body | {"stream": True, "stream_options": {"include_usage": True} | more}
    began = time.perf_counter()
    first = last = None
    text, finish, usage, tokens = "", None, None, 0
    async with http.stream("POST", job.path, json=body) as answer:
        if answer.status_code != 200:
            tally.errors.append(f"status {answer.status_code}: {await answer.aread()!r}")
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                tally.errors.append(event["error"]["message"])
                return
            usage = event.get("usage")
            for choice in event["choices"]:
                if piece := text_of(choice):
                    now, before = time.perf_counter(), tokens
                    tokens = usage["completion_tokens"] if usage else tokens + 1
                    first = first or now
                    if last is not None:
                        tally.gaps.append((now - last) / max(tokens - before, 1))
                    text, last = text + piece, now
                finish = choice["finish_reason"] or finish
            if leave and len(text) > len(job.text) // 2:
                if ours and not job.text.startswith(text):
                    tally.errors.append(f"wrong text before leaving: {text[:80]!r}")
                tally.left += 1
                return
    if usage is None and not ours and finish is not None:
        usage = {"completion_tokens": tokens, "prompt_tokens": len(job.prompt)}
    if usage is None:
        tally.errors.append("the stream ended early")
    elif ours and (text, usage["completion_tokens"], finish) != (job.text, job.tokens, job.finish):
        tally.errors.append(f"expected {job.text[:80]!r}, got {text[:80]!r}")
    else:
        tally.ended += 1
        tally.tokens += usage["completion_tokens"]
        tally.prompt_tokens += usage["prompt_tokens"]
        tally.cached_tokens += usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        if first is not None:
            tally.first.append(first - began)


async def load(
    server: AbstractAsyncContextManager[tuple[str, int]],
    jobs: list[Job],
    options: argparse.Namespace,
    ours: bool,
) -> tuple[Tally, float]:
    """Return the results and the seconds from the first request to the end of the last."""
    tally = Tally()
    async with server as (address, process):
        limits = httpx.Limits(max_connections=options.streams)
        async with httpx.AsyncClient(
            base_url=address, timeout=httpx.Timeout(600), limits=limits
        ) as http:
            began = time.perf_counter()

            async def client(number: int) -> None:
                rng = random.Random(number)
                while time.perf_counter() - began < options.seconds:
                    await stream(http, rng.choice(jobs), rng.random() < LEAVING, tally, ours)

            async def watch() -> None:
                while True:
                    tally.resident.append(resident_bytes(process) or 0)
                    await asyncio.sleep(0.5)

            watching = asyncio.create_task(watch())
            await asyncio.gather(*map(client, range(options.streams)))
            watching.cancel()
            return tally, time.perf_counter() - began


def row_of(
    server: str,
    tally: Tally,
    seconds: float,
    jobs: list[Job],
    options: argparse.Namespace,
    arguments: list[str],
) -> dict:
    def percentiles(values: list[float]) -> dict[str, float]:
        return {f"p{p}": float(np.percentile(values or [np.nan], p)) for p in PERCENTILES}

    return {
        "server": server,
        "kinds": options.kinds,
        "model": Path(options.checkpoint).resolve().name,
        "server_options": arguments,
        "streams": options.streams,
        "seconds": seconds,
        "prompts": len(jobs),
        "prompt_tokens_longest": max(len(job.prompt) for job in jobs),
        "ended": tally.ended,
        "left_halfway": tally.left,
        "lost_or_mixed_up": len(tally.errors),
        "requests_per_second": tally.ended / seconds,
        "generated_tokens": tally.tokens,
        "generated_tokens_per_second": tally.tokens / seconds,
        "prompt_tokens": tally.prompt_tokens,
        "cached_tokens": tally.cached_tokens,
        "seconds_to_first_token": percentiles(tally.first),
        "seconds_between_tokens": percentiles(tally.gaps),
        "resident_bytes_after_a_quarter": tally.resident[len(tally.resident) // 4],
        "resident_bytes_at_the_end": tally.resident[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="packed folder, or anything that `serve` takes")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--prompts", type=int, default=48, help="number of different prompts")
    parser.add_argument("--max-tokens", type=int, default=64, help="maximum per text")
    parser.add_argument("--context", type=int, default=1024, help="maximum tokens, with the prompt")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["text", *KINDS])
    parser.add_argument("--llama-server", help="llama.cpp's program, to compare with")
    parser.add_argument("--gguf", help="file of the same model for it")
    parser.add_argument("--out", type=Path, help="JSON lines; default: in benchmarks/results/")
    own, arguments = sys.argv[1:], []
    if "--" in own:
        own, arguments = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    # The serial run gets the engine's options of the server.
    known = argparse.ArgumentParser()
    for option in dataclasses.fields(EngineOptions):
        kind = int if isinstance(option.default, int | None) else str
        name = "--" + option.name.replace("_", "-")
        known.add_argument(name, type=kind, default=option.default)
    engine = EngineOptions(**vars(known.parse_known_args(arguments)[0]))
    console, failed = Console(), False
    jobs = make_jobs(options.checkpoint, engine, options)
    servers = {OURS: started_server(options.checkpoint, arguments)}
    if options.llama_server:
        threads = engine.threads or available_cores()
        servers["llama.cpp"] = llama_server(
            options.llama_server, options.gguf, threads, options.streams, options.context
        )
    for name, server in servers.items():
        tally, seconds = asyncio.run(load(server, jobs, options, name == OURS))
        row = row_of(name, tally, seconds, jobs, options, arguments)
        console.print_json(data=row)
        for error in tally.errors[:5]:
            console.print(error, markup=False)
        out = record("server", [row], options.out)
        failed = failed or bool(tally.errors)
    console.print(f"written to {out}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
