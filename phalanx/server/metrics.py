"""Metrics of the server for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from phalanx.inference.request import Event, Finished, NewToken
from phalanx.server.engine_thread import EngineThread

# upper bounds of histograms, in seconds: to the first token, between tokens, of a whole request
FIRST = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
EACH = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
WHOLE = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class Metrics:
    """A registry of its own: several servers in a process do not share figures."""

    def __init__(self, engine: EngineThread):
        self.registry = CollectorRegistry()
        own = self.registry
        self.requests = Counter("phalanx_requests", "Requests answered.", ["path", "status"], registry=own)
        self.prompt_tokens = Counter("phalanx_prompt_tokens", "Tokens of prompts.", registry=own)
        self.cached_tokens = Counter(
            "phalanx_cached_prompt_tokens", "Tokens of prompts that needed no computing.", registry=own
        )
        self.made_tokens = Counter("phalanx_generated_tokens", "Tokens made.", registry=own)
        self.sequences = Counter("phalanx_sequences", "Sequences that are over, by reason.", ["reason"], registry=own)
        self.first = Histogram(
            "phalanx_time_to_first_token_seconds", "From the request to its first token.", buckets=FIRST, registry=own
        )
        self.each = Histogram(
            "phalanx_time_per_output_token_seconds",
            "From one token of a sequence to the next.",
            buckets=EACH,
            registry=own,
        )
        self.seconds = Histogram("phalanx_request_seconds", "From the request to its end.", buckets=WHOLE, registry=own)
        gauges = {
            "phalanx_sequences_running": ("Sequences that run.", lambda: engine.load.running),
            "phalanx_sequences_waiting": ("Sequences that wait for room.", lambda: engine.load.waiting),
            "phalanx_pages_in_use": ("Pages of the cache in use.", lambda: engine.load.pages_used),
            "phalanx_pages": ("Pages of the cache.", lambda: engine.load.pages),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=own).set_function(value)
        own.register(DraftMetrics(engine))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class DraftMetrics(Collector):
    """Drafts that the engine has counted."""

    def __init__(self, engine: EngineThread):
        self._engine = engine

    def collect(self) -> Iterator[CounterMetricFamily]:
        load = self._engine.load
        yield CounterMetricFamily("phalanx_drafted_tokens", "Tokens drafted, of sequences that are over.", load.drafted)
        yield CounterMetricFamily("phalanx_accepted_draft_tokens", "Of those, tokens that were kept.", load.accepted)


class Stopwatch:
    """Times of one request's tokens; `first` is the time to the first of all."""

    def __init__(self, metrics: Metrics, prompt_tokens: int):
        self._metrics = metrics
        self._began = time.monotonic()
        self._last: dict[int, float] = {}
        self.prompt_tokens = prompt_tokens
        self.made = 0
        self.cached = 0
        self.first: float | None = None
        metrics.prompt_tokens.inc(prompt_tokens)

    def note(self, index: int, event: Event) -> None:
        if isinstance(event, NewToken):
            now = time.monotonic()
            self.made += 1
            self._metrics.made_tokens.inc()
            if self.first is None:
                self.first = now - self._began
                self._metrics.first.observe(self.first)
            if index in self._last:
                self._metrics.each.observe(now - self._last[index])
            self._last[index] = now
        elif isinstance(event, Finished):
            self.cached += event.cached
            self._metrics.cached_tokens.inc(event.cached)
            self._metrics.sequences.labels(event.reason).inc()

    def stopped(self) -> None:
        """A stop string ended a sequence: the engine was not asked for more."""
        self._metrics.sequences.labels("stop").inc()

    def end(self) -> None:
        self._metrics.seconds.observe(time.monotonic() - self._began)
