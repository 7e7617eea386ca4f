"""/ws/device: who is let in, and under which name.

In this order: the page's Origin, the number of sockets of the address and of the gateway, a HELLO within its time, the
device's credentials (a wrong pair gets a new identity, like none), its quarantine. Every refusal after the handshake is
a BYE with a reason and a time to come back, since a browser cannot read anything else. Then the connection runs.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass

import structlog
from limits import RateLimitItemPerHour
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.websockets import WebSocket, WebSocketDisconnect

from backend.gateway.connection import Connection
from backend.gateway.context import Gateway, gateway_of
from backend.gateway.jobs import clean_text
from backend.gateway.ports import Closed, Identity
from backend.gateway.security import network_of, origin_is_allowed
from backend.gateway.wire import Wire
from backend.settings import Settings
from tileweave.protocol import (
    TEXT_CHARACTERS_MAX,
    Bye,
    ByeCode,
    Hello,
    Limits,
    Profile,
    ProtocolError,
    VersionMismatch,
    Welcome,
    decode,
    encode,
)

CLOSE_S_MAX = 1.0
BUSY_RETRY_S = 30.0
RETRY_S_MAX = 86400.0
MEMORY_BYTES_BELIEVED_MAX = 1 << 34  # claims are hints, kept within what a device could be
FLOPS_BELIEVED_MAX = 1e13

log = structlog.get_logger("gateway")


class Refused(Exception):
    """Not let in; `bye` says why."""

    def __init__(self, code: ByeCode, reason: str, retry_s: float = 0.0) -> None:
        super().__init__(reason)
        self.bye = Bye(code=code, reason=reason[:TEXT_CHARACTERS_MAX], retry_s=min(retry_s, RETRY_S_MAX))


class Registrations:
    """How many new devices an address has made in the last hour."""

    def __init__(self, per_hour_max: int) -> None:
        self._item = RateLimitItemPerHour(per_hour_max)
        self._limiter = MovingWindowRateLimiter(MemoryStorage())

    def check(self, address: str) -> None:
        """Counts one more. Raises Refused."""
        if not self._limiter.hit(self._item, address):
            raise Refused("busy", f"{self._item.amount} new devices of your address within the hour, the most", 600.0)


@dataclass(frozen=True, slots=True)
class SocketTransport:
    """A Starlette websocket as a connection's transport."""

    socket: WebSocket

    async def receive(self) -> bytes | None:
        """See `ports.Transport`."""
        message = await self.socket.receive()
        if message["type"] == "websocket.disconnect":
            raise Closed(f"the socket was closed ({message.get('code', 1006)})")
        frame: bytes | None = message.get("bytes")
        return frame

    async def send(self, frame: bytes) -> None:
        """See `ports.Transport`."""
        try:
            await self.socket.send_bytes(frame)
        except (WebSocketDisconnect, RuntimeError, OSError) as error:  # RuntimeError: it was closed meanwhile
            raise Closed(str(error) or "the socket was closed") from None


async def device_socket(socket: WebSocket) -> None:
    """One device, from its handshake to its end."""
    gateway = gateway_of(socket)
    headers = socket.headers
    if not origin_is_allowed(headers.get("origin"), headers.get("host"), gateway.settings.allowed_origins):
        await socket.close()  # before the handshake: the answer is 403
        return
    address = socket.client.host if socket.client else ""
    await socket.accept()
    wire: Wire = socket.scope.get("state", {}).get("wire") or Wire()
    try:
        await _admit(gateway, socket, wire, address)
    except Closed as closed:
        log.info("device gone before it was let in", address=address, reason=str(closed))
    await _close(socket, wire)


async def _admit(gateway: Gateway, socket: WebSocket, wire: Wire, address: str) -> None:
    try:
        async with gateway.fleet.door(network_of(address)) as refusal:
            if refusal is not None:
                raise Refused("busy", refusal, BUSY_RETRY_S)
            await _serve(gateway, socket, wire, address)
    except Refused as refused:
        log.info("device refused", address=address, code=refused.bye.code, reason=refused.bye.reason)
        await _send_within(socket, wire, encode(refused.bye))


async def _serve(gateway: Gateway, socket: WebSocket, wire: Wire, address: str) -> None:
    transport = SocketTransport(socket)
    hello = await _hello(transport, gateway.settings.hello_s_max)
    identity, secret = await _identify(gateway, hello, address, socket.app.state.registrations)
    welcome = Welcome(device=identity.device, name=identity.name, secret=secret, limits=wire_limits(gateway.settings))
    await _send_within(socket, wire, encode(welcome))
    finished = list(hello.leases) if secret is None else []  # a device made just now has no results to send again
    connection = Connection(gateway.fleet, transport, wire, identity, finished)
    log.info("device online", device=identity.device, address=address, client=hello.client)
    async with gateway.fleet.member(connection):
        await connection.run()
    log.info("device offline", device=identity.device, reason=connection.end_reason)
    await gateway.store(
        gateway.devices.update,
        identity.device,
        identity.name,
        identity.profile.agent,
        identity.profile.kernel,
        time.time(),
    )


async def _hello(transport: SocketTransport, seconds_max: float) -> Hello:
    try:
        async with asyncio.timeout(seconds_max):
            frame = await transport.receive()
        if frame is None:
            raise ProtocolError("got a text message, expected HELLO in a binary frame")
        message, _ = decode(frame)
    except TimeoutError:
        raise Refused("protocol", f"no HELLO within {seconds_max} s") from None
    except VersionMismatch as error:
        raise Refused("reload", str(error)) from None
    except ProtocolError as error:
        raise Refused("protocol", str(error)) from None
    if not isinstance(message, Hello):
        raise Refused("protocol", f"the first message is {message.KIND.name}, expected HELLO")
    return message


async def _identify(
    gateway: Gateway, hello: Hello, address: str, registrations: Registrations
) -> tuple[Identity, str | None]:
    """Who it is, and the secret of a device made just now. Raises Refused."""
    profile = _believed(hello.profile)
    name, now_s = clean_text(hello.name)[:64], time.time()
    device, secret = "", None
    if hello.device is not None and hello.secret is not None:
        row = await gateway.store(gateway.devices.authenticate, hello.device, hello.secret)
        if row is not None:
            device, name = row.id, name or row.name
    if not device:
        registrations.check(network_of(address))
        device, secret = await gateway.store(gateway.devices.register, name, profile.agent, now_s)
        name = name or f"Volunteer {device[1:5]}"
    await gateway.store(gateway.devices.update, device, name, profile.agent, profile.kernel, now_s)
    standing = await gateway.store(gateway.ledger.standing, device, now_s)
    left_s = standing.quarantined_until_s - now_s
    if left_s > 0:
        raise Refused("quarantined", "a result of this device was wrong; it may come back later", left_s)
    identity = Identity(device, secrets.token_hex(8), name, profile, standing.accepted, standing.rejects)
    return identity, secret


def _believed(profile: Profile) -> Profile:
    """The profile with its claims clamped and its texts cleaned."""
    return Profile(
        kernel=clean_text(profile.kernel)[:32] or "unknown",
        flops=min(profile.flops, FLOPS_BELIEVED_MAX),
        memory_bytes=min(profile.memory_bytes, MEMORY_BYTES_BELIEVED_MAX),
        workers=profile.workers,
        agent=clean_text(profile.agent)[:300],
    )


def wire_limits(settings: Settings) -> Limits:
    """What WELCOME says."""
    return Limits(
        frame_bytes_max=settings.frame_bytes_max,
        panel_bytes_max=settings.panel_bytes_max,
        result_bytes_max=settings.result_bytes_max,
        leases_max=settings.leases_per_device_max,
        ping_s=settings.ping_s,
        silence_s_max=settings.silence_s_max,
    )


async def _send_within(socket: WebSocket, wire: Wire, frame: bytes) -> None:
    try:
        async with asyncio.timeout(CLOSE_S_MAX):
            await SocketTransport(socket).send(frame)
    except TimeoutError:
        wire.abort()
        raise Closed("took nothing") from None


async def _close(socket: WebSocket, wire: Wire) -> None:
    try:
        async with asyncio.timeout(CLOSE_S_MAX):
            await socket.close()
    except (TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
        wire.abort()
