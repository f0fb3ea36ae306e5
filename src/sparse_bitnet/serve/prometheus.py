# SPDX-License-Identifier: Apache-2.0
"""Metrics of the server: counters and histograms that `/metrics` shows, in Prometheus' text format."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from sparse_bitnet.generation.request import Generation
from sparse_bitnet.generation.scheduler import Load, Observer

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class ServerMetrics(Observer):
    """Metrics of one scheduler, in a registry of its own: two servers in a process do not mix."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def named(kind, name: str, text: str, **more):
            return kind(f"sparse_bitnet_{name}", text, registry=self._registry, **more)

        self._requests = named(
            Counter, "requests", "Generations ended, by outcome", labelnames=("outcome",)
        )
        self._responses = named(
            Counter, "http_responses", "HTTP responses", labelnames=("path", "status")
        )
        self._prompt = named(Counter, "prompt_tokens", "Tokens of prompts")
        self._cached = named(Counter, "cached_tokens", "Tokens of prompts found in the cache")
        self._generated = named(Counter, "generated_tokens", "Tokens generated")
        self._guessed = named(Counter, "guessed_tokens", "Tokens computed ahead of being drawn")
        self._accepted = named(Counter, "accepted_tokens", "Of those, the ones that were drawn")
        self._preempted = named(Counter, "preemptions", "Generations paused for want of cache")
        self._queue = named(Gauge, "queue_length", "Generations waiting")
        self._running = named(Gauge, "running", "Generations running")
        self._capacity = named(Gauge, "cache_tokens", "Tokens the cache has room for")
        self._used = named(Gauge, "cache_used_tokens", "Tokens of the cache in use")
        self._kept = named(Gauge, "kept_prefixes", "Ended sequences kept for prefix reuse")
        self._first = named(
            Histogram, "time_to_first_token_seconds", "From arrival", buckets=_SECONDS
        )
        self._token = named(
            Histogram, "time_per_token_seconds", "Between tokens", buckets=_TOKEN_SECONDS
        )
        self._whole = named(Histogram, "request_seconds", "Arrival to end", buckets=_SECONDS)

    def token(self, seconds: float, first: bool) -> None:
        self._generated.inc()
        (self._first if first else self._token).observe(seconds)

    def ended(self, generation: Generation) -> None:
        self._requests.labels(generation.finish_reason).inc()
        self._whole.observe(time.perf_counter() - generation.arrived)
        self._prompt.inc(generation.prompt_tokens if generation.started else 0)
        self._cached.inc(generation.cached_tokens)
        self._guessed.inc(generation.guessed_tokens)
        self._accepted.inc(generation.accepted_tokens)
        self._preempted.inc(generation.pauses)

    def responded(self, path: str, status: int) -> None:
        """An HTTP response has begun; `path` is one of the server's own."""
        self._responses.labels(path, str(status)).inc()

    def text(self, load: Load) -> bytes:
        """The exposition, with the gauges set to `load`."""
        self._queue.set(load.waiting)
        self._running.set(load.running)
        self._capacity.set(load.cache_tokens)
        self._used.set(load.cache_tokens - load.free_tokens)
        self._kept.set(load.kept_prefixes)
        return generate_latest(self._registry)
