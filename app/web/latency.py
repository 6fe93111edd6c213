"""Latency of the most recent requests."""

from collections import deque
from threading import Lock

from app.statistics.schemas import Latency

_KEPT = 2000


class LatencyGauge:
    """Keeps the seconds of the newest requests of this process."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        self._lock = Lock()

    def add(self, seconds: float) -> None:
        with self._lock:
            self._seconds.append(seconds)

    def read(self) -> Latency:
        """Percentiles in milliseconds; null before the first request."""
        with self._lock:
            ordered = sorted(self._seconds)

        def percentile(share: float) -> float | None:
            if not ordered:
                return None
            return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)

        return Latency(
            requests=len(ordered), p50_ms=percentile(0.5), p90_ms=percentile(0.9), p99_ms=percentile(0.99)
        )
