# SPDX-License-Identifier: Apache-2.0
"""A real server on a free port, in a thread, over an engine of the test's choice."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from scripted_engine import logits_after
from sparse_bitnet.generation.conversation import ChatTemplate
from sparse_bitnet.generation.grammar import TokenGrammars
from sparse_bitnet.generation.text import TextTokenizer
from sparse_bitnet.serve.app import ServerMetrics, create_app
from sparse_bitnet.serve.generations import ServedModel
from sparse_bitnet.serve.http_server import AllowedHosts, HttpServer, listen
from sparse_bitnet.serve.threaded_scheduler import ThreadedScheduler
from sparse_bitnet.serve.tool_calls import syntax_of

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = 256


def endless(tokens, size):
    """Return logits of text that never ends by itself."""
    logits = logits_after(tokens, size)
    logits[END] = -100
    return logits


def number_tokenizer(size: int) -> Tokenizer:
    """Return a tokenizer whose tokens' texts are their numbers, each followed by a space."""
    tokenizer = Tokenizer(models.WordLevel({f"{i} ": i for i in range(size)}, unk_token="0 "))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def sentence_piece_tokenizer(letters: str, merges: list[str], *, adds_space: bool) -> Tokenizer:
    """Return a tokenizer of SentencePiece's kind: ▁ for spaces, <0x..> for bytes, three special tokens.

    `merges`: as "▁ a"; `adds_space`: whether a text begins with a space, which decoding removes.
    """
    specials = ["<unk>", "<s>", "</s>"]
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    pieces += [merge.replace(" ", "") for merge in merges]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    pairs = [tuple(merge.split()) for merge in merges]
    bpe = models.BPE(vocabulary, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), tokenizer.normalizer]
        )
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in specials])
    return tokenizer


def byte_tokenizer() -> TextTokenizer:
    """Return a tokenizer with one token per byte, and a special token `END` that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    assert tokenizer.token_to_id("<|end|>") == END
    return TextTokenizer(tokenizer)


@dataclass
class Running:
    """A running server."""

    url: str
    scheduler: ThreadedScheduler
    model: ServedModel
    engine: object
    connections: set

    def client(self, **options) -> openai.OpenAI:
        options = {"api_key": "key", "max_retries": 0, "timeout": 30} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120)

    def connect(self) -> socket.socket:
        """Return a connection for raw bytes."""
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=120)

    def is_idle(self, seconds: float = 10) -> bool:
        """Whether nothing runs or waits, soon."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            load = self.scheduler.load()
            if load.running == load.waiting == 0:
                return True
            time.sleep(0.005)
        return False


def application(
    engine,
    *,
    template: str | None = TEMPLATE,
    allowed_hosts: tuple = (),
    cors_origins: tuple = (),
    log_requests: bool = False,
    **options,
):
    """The application, its scheduler, not started, and its model. `options`: of the latter two."""
    fields = ("api_key", "max_tokens", "max_body_bytes", "pooling")
    own = {"pooling": "lasttoken"} | {name: options.pop(name) for name in fields if name in options}
    model = ServedModel(
        name="scripted",
        tokenizer=byte_tokenizer(),
        template=template and ChatTemplate(template),
        end_tokens=frozenset({END}),
        vocab_size=engine.vocab_size,
        hidden_size=engine.hidden_size,
        grammars=TokenGrammars(byte_tokenizer(), engine.vocab_size, frozenset({END})),
        tool_syntax=template and syntax_of(template),
        **own,
    )
    metrics = ServerMetrics()
    scheduler = ThreadedScheduler(engine, observer=metrics, **options)
    hosts = AllowedHosts(allowed_hosts, cors_origins)
    app = create_app(model, scheduler, metrics, hosts, log_requests)
    return app, scheduler, model


@contextmanager
def server(engine, **options) -> Iterator[Running]:
    """`options`: of `application`."""
    app, scheduler, model = application(engine, **options)
    bound = listen("127.0.0.1", 0)
    process = HttpServer(app, scheduler)
    thread = threading.Thread(target=process.run, args=([bound],), daemon=True)
    scheduler.start()
    thread.start()
    port = bound.getsockname()[1]
    try:
        while not process.started:
            time.sleep(0.005)
        connections = process.server_state.connections
        yield Running(f"http://127.0.0.1:{port}", scheduler, model, engine, connections)
    finally:
        scheduler.stop()
        process.should_exit = True
        thread.join(30)
        assert scheduler.join(30)
        bound.close()
    assert engine.sequences == []
