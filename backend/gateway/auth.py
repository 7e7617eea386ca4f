"""Who may change something: the admin token, or a page's session that was opened with it.

REST takes `Authorization: Bearer <token>`, compared in constant time. Pages log in once with the token in a form and
get a cookie (HttpOnly, SameSite=Strict) that holds an expiry and a nonce, signed with a key derived from the token:
nothing is stored, and a new token ends every session. What a cookie may do needs the session's CSRF token as well, in
the header X-CSRF-Token or the form field `csrf`. Wrong tokens are counted for each address; too many make it wait.

The token never appears in a URL, a cookie or a log. Pure but for the clock that is passed in.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable

from fastapi import HTTPException, Request
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from backend.gateway.security import network_of

COOKIE = "tileweave_session"
CSRF_HEADER = "X-CSRF-Token"
TOKEN_CHARS_MAX = 512


class Auth:
    """Checks tokens, sessions and CSRF tokens. `clock` gives unix seconds."""

    def __init__(
        self, token: str, session_s_max: float, failures_per_minute_max: int, clock: Callable[[], float]
    ) -> None:
        self._token = token.encode()
        self._key = hmac.digest(self._token, b"tileweave page sessions", hashlib.sha256)
        self._session_s_max = session_s_max
        self._clock = clock
        self._failures = RateLimitItemPerMinute(failures_per_minute_max)
        self._limiter = MovingWindowRateLimiter(MemoryStorage())

    def token_is_right(self, given: str, address: str) -> bool:
        """Compares in constant time and counts a failure. Raises HTTPException 429 after too many from `address`."""
        address = network_of(address)
        if not self._limiter.test(self._failures, address):
            raise HTTPException(
                429, "too many wrong tokens from your address; wait a minute, then try again", {"Retry-After": "60"}
            )
        right = len(given) <= TOKEN_CHARS_MAX and hmac.compare_digest(given.encode(), self._token)
        if not right:
            self._limiter.hit(self._failures, address)
        return right

    def new_session(self) -> str:
        """A cookie's value."""
        body = f"{int(self._clock() + self._session_s_max)}.{secrets.token_urlsafe(16)}"
        return f"{body}.{self._sign('session', body)}"

    def session_is_valid(self, cookie: str) -> bool:
        """Whether we signed it and its time has not come."""
        body, _, signature = cookie.rpartition(".")
        expiry = body.partition(".")[0]
        signed = hmac.compare_digest(signature.encode(), self._sign("session", body).encode())
        return signed and expiry.isdigit() and int(expiry) > self._clock()

    def csrf_token(self, cookie: str) -> str:
        """What pages of this session send along with each change."""
        return self._sign("csrf", cookie)

    def csrf_is_right(self, cookie: str, given: str) -> bool:
        """Compares in constant time."""
        return hmac.compare_digest(given.encode(), self.csrf_token(cookie).encode())

    def _sign(self, what: str, body: str) -> str:
        digest = hmac.digest(self._key, f"{what}:{body}".encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def address_of(request: Request) -> str:
    """The peer's address, as the proxies named in the settings have it."""
    return request.client.host if request.client else ""


def auth_of(request: Request) -> Auth:
    """The application's `Auth`."""
    auth: Auth = request.app.state.auth
    return auth


def session_of(request: Request) -> str | None:
    """The request's valid session cookie, if it has one."""
    cookie = request.cookies.get(COOKIE, "")
    return cookie if cookie and auth_of(request).session_is_valid(cookie) else None


def bearer_of(request: Request) -> str | None:
    """The bearer token that was sent, right or wrong."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def require_admin(request: Request) -> None:
    """A dependency of every route that changes something. Raises HTTPException 401, 403 or 429."""
    auth = auth_of(request)
    token = bearer_of(request)
    if token is not None:
        if auth.token_is_right(token, address_of(request)):
            return
        raise HTTPException(401, "wrong token; see the file `token` in the data directory", _CHALLENGE)
    session = session_of(request)
    if session is None:
        raise HTTPException(401, "no token; expected the header Authorization: Bearer <token>", _CHALLENGE)
    if not auth.csrf_is_right(session, request.headers.get(CSRF_HEADER, "")):
        raise HTTPException(403, f"the header {CSRF_HEADER} is missing or wrong; reload the page")


_CHALLENGE = {"WWW-Authenticate": "Bearer"}
