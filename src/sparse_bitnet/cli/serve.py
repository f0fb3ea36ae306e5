# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet serve`: an OpenAI-compatible HTTP server for a checkpoint."""

import contextlib
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from sparse_bitnet.cli.arguments import CheckpointArgument, command
from sparse_bitnet.cli.generate import SpeculationOptions
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import UserError, check_least


@dataclass(kw_only=True)
class ServeConfig:
    """Address, access and limits of the server."""

    GROUPS: ClassVar = {"host": "server", "max_running": "limits", "grace": "server"}

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0: all interfaces; combine it with --api-key."""

    port: int = 8000
    """Port to listen on; 0 picks a free one."""

    api_key: str | None = None
    """API key that clients must send. Default: environment variable SPARSE_BITNET_API_KEY, else none."""

    allowed_host: tuple[str, ...] = ()
    """Host names to accept in requests besides --host and IP addresses, such as a proxy's; *: any."""

    cors_origin: tuple[str, ...] = ()
    """Origins whose web pages may use this server (CORS), such as https://a.example; *: any."""

    log_requests: bool = False
    """Write one line of JSON per request to standard error: id, path, status, time and token counts, but
    no text."""

    model_name: str | None = None
    """Model name in requests and responses. Default: the name of the checkpoint's folder."""

    max_running: int = 32
    """Maximum number of generations that run at the same time. Without --cache-tokens, the KV cache has
    room for 1024 tokens times this number, shared by all generations."""

    prefill_slice: int = 32
    """Number of prompt tokens computed per decode step (chunked prefill); down to a quarter of that
    while many generations decode. Larger: new requests start sooner. Smaller: streams pause less."""

    max_queue: int = 128
    """Maximum number of waiting generations; further requests get status 429."""

    max_tokens: int | None = None
    """Maximum number of tokens of one answer. Default: the context length."""

    max_body_bytes: int = 1 << 20
    """Maximum size of a request body, in bytes; larger ones get status 413."""

    grace: float = 10.0
    """Seconds to let running generations finish after SIGINT or SIGTERM."""

    def __post_init__(self) -> None:
        check_least(self, port=0, max_running=1, prefill_slice=1, max_queue=0)
        check_least(self, max_body_bytes=1, max_tokens=1)
        if not 0 <= self.grace <= 3600:
            raise UserError(f"--grace {self.grace}: must be 0 to 3600 seconds")


@command("serve")
def main(
    checkpoint: CheckpointArgument,
    config: ServeConfig,
    speculation: SpeculationOptions,
    engine: EngineOptions,
) -> None:
    """Serve a checkpoint over HTTP with OpenAI's API (/v1/completions, /v1/chat/completions,
    /v1/responses, /v1/embeddings, /v1/models), a chat page at /, /health, and /metrics for Prometheus.

    Args:
        checkpoint: Packed folder, run folder, checkpoint folder, GGUF file, or any transformers folder or
            hub id (OWNER/NAME@REVISION, OWNER/NAME/FILE.gguf).
    """
    from sparse_bitnet.generation.conversation import ChatTemplate
    from sparse_bitnet.generation.open_model import open_model
    from sparse_bitnet.generation.pooling import read_pooling
    from sparse_bitnet.serve.app import ServerMetrics, create_app
    from sparse_bitnet.serve.generations import ServedModel
    from sparse_bitnet.serve.http_server import AllowedHosts, listen, serve
    from sparse_bitnet.serve.threaded_scheduler import ThreadedScheduler
    from sparse_bitnet.serve.tool_calls import syntax_of

    if engine.cache_tokens is None:
        # The prefix cache fills it over time; the default, the context length, could take gigabytes.
        engine = replace(engine, cache_tokens=1024 * config.max_running)
    with contextlib.ExitStack() as stack:
        # Before loading the model, which takes long: the port may be taken.
        bound = stack.enter_context(listen(config.host, config.port))
        host, port = bound.getsockname()[:2]
        hosts = AllowedHosts((config.host or host, *config.allowed_host), config.cors_origin)
        opened = open_model(checkpoint, engine)
        stack.enter_context(contextlib.closing(opened.engine))
        metrics = ServerMetrics()
        scheduler = ThreadedScheduler(
            opened.engine,
            max_queue=config.max_queue,
            max_running=config.max_running,
            prefill_slice=config.prefill_slice,
            speculation=speculation.open(opened),
            observer=metrics,
        )
        name = config.model_name or Path(checkpoint).resolve().name or "model"
        name = os.fsencode(name).decode(errors="replace")
        key = config.api_key or os.environ.get("SPARSE_BITNET_API_KEY") or None
        template = pooling = None
        try:
            template = ChatTemplate.load(opened.folder)
        except UserError as error:
            print(f"chat is off: {error}", file=sys.stderr)
        try:
            pooling = read_pooling(opened.folder)
        except UserError as error:
            print(f"embeddings are off: {error}", file=sys.stderr)
        if key is None and host not in ("127.0.0.1", "::1"):
            print(
                f"anyone who can reach {host} can use this server: add --api-key", file=sys.stderr
            )
        model = ServedModel(
            name=name,
            tokenizer=opened.tokenizer,
            template=template,
            end_tokens=opened.end_tokens,
            vocab_size=opened.engine.vocab_size,
            hidden_size=opened.engine.hidden_size,
            pooling=pooling,
            tool_syntax=None if template is None else syntax_of(template.with_tools),
            grammars=opened.grammars(),
            api_key=key,
            max_tokens=config.max_tokens,
            max_body_bytes=config.max_body_bytes,
        )
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        page = f"chat page: {address}, " if template is not None else ""
        print(f"{name}: {address}v1 ({page}Ctrl-C to stop)", flush=True)
        app = create_app(model, scheduler, metrics, hosts, config.log_requests)
        serve(app, scheduler, bound, config.grace)
