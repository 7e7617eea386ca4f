"""How every process of the server logs: one structlog line an event, on standard error, readable or JSON.

A terminal gets coloured lines, anything else (a file, a service manager) gets one JSON object a line. Standard output
stays free for what a command was asked to print. Tokens and secrets are never log fields.
"""

from __future__ import annotations

import sys

import structlog
from structlog.typing import Processor


def configure_logging(process: str) -> None:
    """Sets structlog up for this process; `process` names it in each line."""
    is_terminal = sys.stderr.isatty()
    render: Processor = structlog.dev.ConsoleRenderer() if is_terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.dict_tracebacks if not is_terminal else structlog.processors.StackInfoRenderer(),
            render,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(process=process)
