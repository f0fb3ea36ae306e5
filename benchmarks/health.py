# SPDX-License-Identifier: Apache-2.0
"""How long /health takes to answer while the server is busy with one large request.

    python benchmarks/health.py PACKED                  # options after -- are the server's

Each request is sent alone, some to be refused; /health is asked every few milliseconds meanwhile, over
connections of its own. Exit code 1 if an answer took longer than --most milliseconds.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table
from server_processes import started_server

JSON = {"Content-Type": "application/json"}


def requests() -> dict[str, tuple[str, bytes]]:
    """Path and body by name; all below a megabyte."""

    def body(**fields) -> bytes:
        return json.dumps({"model": "model", "max_tokens": 1} | fields).encode()

    words = ("a sparse house in the green network " * 26_000)[:900_000]
    random = "".join(
        chr(33 + number) for number in np.random.default_rng(0).integers(0, 93, 900_000)
    )
    start = b'{"model":"model","prompt":'
    chat = b'{"model":"model","messages":['
    message = b'{"role":"user","content":"a"}'
    completions = {
        "nothing": body(prompt=" "),
        "0.9 MB of words": body(prompt=words),
        "0.9 MB of random letters": body(prompt=random),
        "0.9 MB of one letter": body(prompt="a" * 900_000),
        "0.9 MB of spaces": body(prompt=" " * 900_000),
        "128 prompts x n 128": body(prompt=["a"] * 128, n=128),
        "128 long prompts": body(prompt=[words[:7000]] * 128),
        "echo, 20 log-probabilities": body(prompt=[words[:1000]] * 32, echo=True, logprobs=20),
        "the same, streamed": body(prompt=[words[:1000]] * 32, echo=True, logprobs=20, stream=True),
        "n 128, 20 log-probabilities": body(prompt="a", n=128, logprobs=20, max_tokens=32),
        "500,000 numbers": start + b"[" + b"1," * 499_999 + b"1]}",
        "190,000 numbers": start + b"[" + b"1," * 189_999 + b"1]}",
        "200,000 lists": start + b"[" + b"[1]," * 199_999 + b"[1]]}",
        "300,000 empty lists": start + b'"x","user":[' + b"[]," * 299_999 + b"[]]}",
        "90,000 unknown names": b"{" + b",".join(b'"k%d":1' % i for i in range(90_000)) + b"}",
        "9,000 unknown names": b"{" + b",".join(b'"k%d":1' % i for i in range(9_000)) + b"}",
    }
    chats = {
        "0.9 MB of chat": chat + b'{"role":"user","content":"' + words.encode() + b'"}]}',
        "34,000 messages": chat + message + (b"," + message) * 33_999 + b"]}",
        "3,900 messages": chat + message + (b"," + message) * 3_899 + b"]}",
    }
    return {name: ("completions", raw) for name, raw in completions.items()} | {
        name: ("chat/completions", raw) for name, raw in chats.items()
    }


async def measure(address: str, path: str, raw: bytes) -> tuple[int, int, float, list[float]]:
    """Status and bytes of the answer, its seconds, and those of each /health meanwhile."""
    times: list[float] = []
    url = f"{address}/{path}"
    command = ["curl", "-s", "-o", "-", "-w", "%{stderr}%{http_code} %{size_download}", url]
    command += ["-H", "Content-Type: application/json", "--data-binary", "@-"]
    began = time.perf_counter()
    client = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    request = asyncio.create_task(client.communicate(raw))
    async with httpx.AsyncClient(timeout=600) as http:
        while not request.done():
            start = time.perf_counter()
            await http.get(address.removesuffix("/v1") + "/health")
            times.append(time.perf_counter() - start)
            await asyncio.sleep(0.002)
    status, size = (await request)[1].split()
    return int(status), int(size), time.perf_counter() - began, times


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--most", type=float, default=50.0, help="milliseconds")
    own, arguments = sys.argv[1:], []
    if "--" in own:
        own, arguments = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    table = Table("request", "status", "answer, kB", "seconds", "/health: median, ms", "most, ms")
    worst = 0.0
    async with started_server(str(options.checkpoint), arguments) as address:
        for name, (path, raw) in requests().items():
            status, size, seconds, times = await measure(address, path, raw)
            most = 1e3 * max(times)
            worst = max(worst, most)
            row = [name, str(status), f"{size / 1e3:,.1f}", f"{seconds:.2f}"]
            table.add_row(*row, f"{1e3 * float(np.median(times)):.1f}", f"{most:.1f}")
    Console().print(table)
    sys.exit(worst > options.most)


if __name__ == "__main__":
    asyncio.run(main())
