"""Structured logs on standard error: readable text for a terminal, or one JSON object per line."""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog


def configure(level: str, log_format: str) -> None:
    """Sets up logging for this process.

    Args:
        level: a name of the logging module, such as INFO.
        log_format: "console" or "json".
    """
    renderer = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *([] if log_format == "json" else [_printable]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _printable(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escapes non-printable characters, so that text from a client cannot control the terminal."""
    for name, value in event.items():
        if isinstance(value, str) and name != "exception" and not value.isprintable():
            event[name] = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in value)
    return event
