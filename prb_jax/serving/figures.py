"""What the server counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Figures:
    """The counters of one server.

    Attributes:
      requests: by path and status; paths that there are not count as "other".
      seconds: from a request's start to its answer, by path.
      scores: responses that were scored.
      truncated: of them, the ones whose profile or prompt was cut to keep the length limit.
      batches: given to the device.
      tokens: computed, without padding.
      waiting: responses that wait for their scores.
    """

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter("prb_requests", "Requests answered.", ["path", "status"], registry=own)
        self.seconds = Histogram(
            "prb_request_seconds", "Until the answer.", ["path"], buckets=_SECONDS, registry=own
        )
        self.scores = Counter("prb_scores", "Responses scored.", registry=own)
        self.truncated = Counter(
            "prb_truncated", "Responses scored with a shortened profile or prompt.", registry=own
        )
        self.batches = Counter("prb_batches", "Batches given to the device.", registry=own)
        self.tokens = Counter("prb_tokens", "Tokens computed, without padding.", registry=own)
        self.waiting = Gauge("prb_waiting", "Responses that wait for their scores.", registry=own)

    def text(self) -> bytes:
        """Return all of them in the text format of Prometheus."""
        return generate_latest(self.registry)
