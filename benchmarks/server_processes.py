# SPDX-License-Identifier: Apache-2.0
"""Servers as child processes, for the programs that put load on them: ours and llama.cpp's."""

import asyncio
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx


@asynccontextmanager
async def started_server(checkpoint: str, arguments: list[str]) -> AsyncIterator[tuple[str, int]]:
    """Yield the server's address and process id; the server must exit by itself with code 0."""
    command = [sys.executable, "-m", "sparse_bitnet", "serve", checkpoint, "--port", "0"]
    command += ["--model-name", "model", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = re.search(r"http://\S+", process.stdout.readline())
        if address is None:
            raise SystemExit("the server did not start")
        yield address[0], process.pid
        process.send_signal(signal.SIGTERM)
        if process.wait(60) != 0:
            raise SystemExit(f"the server ended with code {process.returncode}")
    finally:
        process.kill()


@asynccontextmanager
async def llama_server(
    program: str, gguf: str, threads: int, streams: int, context: int
) -> AsyncIterator[tuple[str, int]]:
    """Yield the same for llama.cpp's server, with a slot and a context for each stream."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--model", gguf, "--port", str(port), "--threads", str(threads)]
    command += ["--parallel", str(streams), "--ctx-size", str(streams * context)]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    address = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=address) as http:
            while process.poll() is None:
                with suppress(httpx.TransportError):
                    if (await http.get("health")).status_code == 200:
                        break
                await asyncio.sleep(0.2)
            else:
                raise SystemExit(f"{program} did not start")
        yield f"{address}/v1", process.pid
    finally:
        process.kill()
        process.wait()
