"""What every answer carries and every request must keep to: headers, a bound on bodies, a line in the log.

One ASGI middleware around the whole application. The body limit counts bytes as they come, whatever Content-Length says
or does not say, so that an endless upload is stopped at the limit; a body that pauses too long is given up. The log has
the path without its query. Origins are checked where a browser would send cookies or open a socket across sites.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backend.gateway.numbers import Numbers
from backend.settings import Settings

CSP = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; style-src 'self'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    # Nothing to other sites. Not no-referrer: under that a browser sends its own page's login form with `Origin: null`.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
}
MULTIPART_OVERHEAD_BYTES = 1 << 20

log = structlog.get_logger("gateway")


class BodyTooLarge(Exception):
    """The body went over its limit."""


class BodyTooSlow(Exception):
    """The body paused for too long."""


class Guard:
    """The middleware."""

    def __init__(self, app: ASGIApp, settings: Settings, numbers: Numbers) -> None:
        self._app = app
        self._settings = settings
        self._numbers = numbers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        answer = _Answer(send)
        try:
            await self._app(scope, self._bounded(scope, receive), answer)
        except BodyTooLarge:
            await answer.refuse(
                413, f"the body is over {self._limit(Headers(scope=scope))} bytes, the most it may have"
            )
        except BodyTooSlow:
            await answer.refuse(408, f"the body paused for over {self._settings.request_idle_s_max} s")
        except Exception:
            log.exception("request failed", method=scope["method"], path=scope["path"])
            await answer.refuse(500, "the server failed at this request; its log says why")
        finally:
            status = answer.status
            self._numbers.request_counts.get(f"{status // 100}xx", self._numbers.request_counts["5xx"]).inc()
            milliseconds = round((time.monotonic() - started_s) * 1000, 1)
            log.info("request", method=scope["method"], path=scope["path"], status=status, milliseconds=milliseconds)

    def _limit(self, headers: Headers) -> int:
        if headers.get("content-type", "").lower().startswith("multipart/form-data"):
            return 2 * self._settings.upload_bytes_max + MULTIPART_OVERHEAD_BYTES
        return self._settings.body_bytes_max

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        headers = Headers(scope=scope)
        limit = self._limit(headers)
        declared = headers.get("content-length", "0")
        too_large = not declared.isdigit() or int(declared) > limit
        got = 0
        complete = False

        async def bounded() -> Message:
            nonlocal got, complete
            if complete:
                return await receive()  # the wait for a disconnect
            if too_large:
                raise BodyTooLarge
            try:
                async with asyncio.timeout(self._settings.request_idle_s_max):
                    message = await receive()
            except TimeoutError:
                raise BodyTooSlow from None
            got += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if got > limit:
                raise BodyTooLarge
            return message

        return bounded


class _Answer:
    """`send` with our headers on the start of the answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 500
        self._started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
        await self._send(message)

    async def refuse(self, status: int, detail: str) -> None:
        """Answers in the application's stead, if it has not begun to; the connection ends, since more body follows."""
        if self._started:
            return
        body = json.dumps({"detail": detail}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": body})


def network_of(address: str) -> str:
    """Whom limits "for each address" count: the address, of IPv6 its /64, within which one host has as many addresses
    as it likes."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


def origin_is_allowed(origin: str | None, host: str | None, allowed: list[str]) -> bool:
    """Whether a page of `origin` may open a socket here: our own host, a named origin, or no page at all (a native
    client sends none)."""
    if origin is None or origin in allowed:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    default_port = {"http": ":80", "https": ":443"}.get(parts.scheme)
    if default_port is None or host is None:
        return False
    return parts.netloc.lower().removesuffix(default_port) == host.lower().removesuffix(default_port)
