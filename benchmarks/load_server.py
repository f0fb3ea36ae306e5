"""Many streams at once against a server, every one compared with serial greedy output.

    python benchmarks/load_server.py PACKED                     # 32 streams for a minute
    python benchmarks/load_server.py PACKED --seconds 10 -- --threads 1

Prompts of mixed lengths, some sharing their beginnings, are first continued one by one by the engine
alone, without a server. Then clients ask a server that the program starts for the same texts, in random
order, some leaving halfway; each text, its count of tokens and its finish reason have to be those of the
serial run. Options after -- are the server's. Exit code 1 if any token was lost or mixed up.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import tyro
from rich.console import Console
from rich.progress import track

from sparse_bitnet.bench.record import append_records, result_file, where_measured
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.generation.generate import GenerateOptions, generate
from sparse_bitnet.generation.open_model import open_model
from sparse_bitnet.generation.sampling import SamplingOptions

RESULTS = Path(__file__).parent / "results"
LEAVING = 0.05
"""Share of the clients that leave halfway."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Job:
    """A prompt and what has to come back."""

    prompt: list[int]
    max_tokens: int
    text: str
    tokens: int
    finish: str


@dataclass
class Tally:
    """What the clients saw."""

    ended: int = 0
    left: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    """Seconds from request to first event with text."""
    between: list[float] = field(default_factory=list)
    """Mean seconds a token after the first, of each stream."""
    errors: list[str] = field(default_factory=list)
    """Texts that were wrong, incomplete or refused."""


def lengths(count: int, longest: int, rng: random.Random) -> list[int]:
    """Mostly short, some long."""
    return [max(1, int(longest * rng.random() ** 3)) for _ in range(count)]


def make_jobs(checkpoint: str, engine: EngineOptions, options: argparse.Namespace) -> list[Job]:
    """Prompts and their serial continuations."""
    opened = open_model(checkpoint, engine)
    rng = random.Random(0)
    context = min(opened.engine.context_length, options.context)
    # The package's own sources: text with any characters, the same on every machine.
    sources = sorted(Path(__file__).parents[1].glob("src/**/*.py"))
    tokens = opened.tokenizer.encode("\n".join(path.read_text() for path in sources))
    longest = min(context - options.max_tokens, len(tokens) // 2)
    jobs: list[Job] = []
    for size in track(lengths(options.prompts, longest, rng), "serial run", transient=True):
        start = rng.randrange(len(tokens) - size)
        prompt = tokens[start : start + size]
        if jobs and rng.random() < 0.3:
            # As a chat goes on: what was there, and more.
            prompt = (rng.choice(jobs).prompt + prompt)[:longest]
        wanted = rng.randint(max(options.max_tokens // 4, 1), options.max_tokens)
        sampling = SamplingOptions(temperature=0)
        result = generate(
            opened.engine,
            [prompt],
            GenerateOptions(max_new_tokens=wanted, sampling=sampling),
            tokenizer=opened.tokenizer,
            end_tokens=opened.end_tokens,
        )
        [text] = result.texts
        jobs.append(Job(prompt, wanted, text.text, len(text.tokens), text.finish_reason))
    opened.engine.close()
    return jobs


@asynccontextmanager
async def started_server(checkpoint: str, arguments: list[str]) -> AsyncIterator[str]:
    """The server's address; it has to end by itself with code 0."""
    command = [sys.executable, "-m", "sparse_bitnet", "serve", checkpoint, "--port", "0"]
    command += ["--model-name", "model", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        yield found[0]
        process.send_signal(signal.SIGTERM)
        if process.wait(60) != 0:
            raise SystemExit(f"the server ended with code {process.returncode}")
    finally:
        process.kill()


async def stream(http: httpx.AsyncClient, job: Job, leave: bool, tally: Tally) -> None:
    """Ask for one text and compare it."""
    body = {
        "model": "model",
        "prompt": job.prompt,
        "max_tokens": job.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    first = last = None
    text, finish, usage = "", None, None
    async with http.stream("POST", "completions", json=body) as answer:
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
            usage = event["usage"]
            for choice in event["choices"]:
                text += choice["text"]
                finish = choice["finish_reason"]
                last = time.perf_counter()
                first = first or last
            if leave and len(text) > len(job.text) // 2:
                if not job.text.startswith(text):
                    tally.errors.append(f"wrong text before leaving: {text[:80]!r}")
                tally.left += 1
                return
    if usage is None:
        tally.errors.append("the stream ended early")
    elif (text, usage["completion_tokens"], finish) != (job.text, job.tokens, job.finish):
        tally.errors.append(f"expected {job.text[:80]!r}, got {text[:80]!r}")
    else:
        tally.ended += 1
        tally.tokens += usage["completion_tokens"]
        tally.prompt_tokens += usage["prompt_tokens"]
        tally.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        if first is not None:
            tally.first.append(first - began)
        if first is not None and last is not None and job.tokens > 1:
            tally.between.append((last - first) / (job.tokens - 1))


async def load(
    checkpoint: str, arguments: list[str], jobs: list[Job], options: argparse.Namespace
) -> tuple[Tally, float]:
    """Results and the seconds they took, from the first request to the end of the last."""
    tally = Tally()
    async with started_server(checkpoint, arguments) as address:
        limits = httpx.Limits(max_connections=options.streams)
        async with httpx.AsyncClient(
            base_url=address, timeout=httpx.Timeout(600), limits=limits
        ) as http:
            began = time.perf_counter()

            async def client(number: int) -> None:
                rng = random.Random(number)
                while time.perf_counter() - began < options.seconds:
                    await stream(http, rng.choice(jobs), rng.random() < LEAVING, tally)

            await asyncio.gather(*map(client, range(options.streams)))
            return tally, time.perf_counter() - began


def row_of(
    tally: Tally, seconds: float, jobs: list[Job], options: argparse.Namespace, arguments: list[str]
) -> dict:
    def percentiles(values: list[float]) -> dict[str, float]:
        return {f"p{p}": float(np.percentile(values or [np.nan], p)) for p in PERCENTILES}

    return {
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
        "seconds_per_token": percentiles(tally.between),
    }


def show(row: dict, console: Console) -> None:
    console.print(
        f"{row['model']}: {row['streams']} streams for {row['seconds']:.1f} s: {row['ended']} texts "
        f"equal to the serial run, {row['left_halfway']} left halfway, "
        f"[bold]{row['lost_or_mixed_up']} lost or mixed up[/]"
    )
    console.print(
        f"{row['generated_tokens_per_second']:.1f} tokens/s generated, "
        f"{row['prompt_tokens'] / row['seconds']:.1f} tokens/s of prompts "
        f"({row['cached_tokens'] / max(row['prompt_tokens'], 1):.0%} cached), "
        f"{row['requests_per_second']:.2f} requests/s"
    )
    for name in ("seconds_to_first_token", "seconds_per_token"):
        found = ", ".join(f"{key} {1e3 * value:.1f} ms" for key, value in row[name].items())
        console.print(f"{name.replace('_', ' ').replace('seconds', 'time')}: {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="packed folder, or anything that `serve` takes")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--prompts", type=int, default=48, help="different ones")
    parser.add_argument("--max-tokens", type=int, default=64, help="most tokens of a text")
    parser.add_argument("--context", type=int, default=1024, help="most tokens, prompt included")
    parser.add_argument("--out", type=Path, help="JSON lines; benchmarks/results/ by default")
    own, arguments = sys.argv[1:], []
    if "--" in own:
        own, arguments = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    # Of the server's options, those of the engine are also the serial run's.
    engine, _ = tyro.cli(EngineOptions, args=arguments, return_unknown_args=True)
    console, where = Console(), where_measured()
    jobs = make_jobs(options.checkpoint, engine, options)
    tally, seconds = asyncio.run(load(options.checkpoint, arguments, jobs, options))
    row = row_of(tally, seconds, jobs, options, arguments)
    show(row, console)
    for error in tally.errors[:5]:
        console.print(error, markup=False)
    out = options.out or result_file(RESULTS, "server", where)
    append_records(out, [row], where)
    console.print(f"written to {out}")
    sys.exit(1 if tally.errors else 0)


if __name__ == "__main__":
    main()
