"""Health, Prometheus metrics and latency."""
