"""Every address, path and limit of the server, each with its meaning above its default.

Values come from the environment (`TILEWEAVE_PORT=9000`) or from the command line, which sets the same fields. The
object is built once, where a process starts, and handed down; nothing reads the environment at import. A child process
gets its parent's choices through `environment()`. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


class Settings(BaseSettings):
    """The server's settings; immutable once built. Raises pydantic.ValidationError on a value out of its range."""

    model_config = SettingsConfigDict(env_prefix="TILEWEAVE_", frozen=True, extra="ignore")

    # ---- addresses and paths -----------------------------------------------------------------------------------------

    # Where the server listens. Loopback until the admin chooses otherwise: an open port is a decision.
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    # Gateway processes sharing the listening socket. One core carries about 3 GB/s of panels, so one is enough here.
    gateways: int = Field(default=1, ge=1, le=64)
    # Jobs, credit, checkpoints, the token: everything that must survive.
    data_dir: Path = Field(default_factory=lambda: Path.home() / ".local" / "share" / "tileweave")
    # A Redis or Valkey to use instead of the embedded one, e.g. redis://host:6379/0 or unix:///path?db=0.
    redis_url: str | None = None
    # Proxies in front of us (addresses or networks) whose X-Forwarded-For and -Proto are believed. Nobody by default.
    trusted_proxies: list[str] = []
    # Pages of other origins that may open /ws/device, e.g. https://tiles.example.org. Our own is always allowed.
    allowed_origins: list[str] = []
    # PEM files; with both, the server speaks https (browsers give Web Locks to secure pages only).
    tls_cert: Path | None = None
    tls_key: Path | None = None
    # The admin's token, where it should not be made at first start and kept in data_dir/token.
    admin_token: SecretStr | None = None

    # ---- devices: one websocket each ---------------------------------------------------------------------------------

    # One websocket message. Larger ones upload slower, smaller ones cost more calls; 1 MiB is the protocol's ceiling.
    frame_bytes_max: int = Field(default=MIB, ge=64 * KIB, le=MIB)
    # One panel: what a device must be able to hold of one operand.
    panel_bytes_max: int = Field(default=64 * MIB, ge=4 * KIB)
    # One tile's product, also the size of the largest upload slot.
    result_bytes_max: int = Field(default=64 * MIB, ge=4 * KIB)
    # Leases one device may hold at a time once it has proved itself; enough to cover a round trip of 300 ms.
    leases_per_device_max: int = Field(default=8, ge=1, le=64)
    # Devices with one address (a school behind one router is 30 or so; a flood is thousands).
    devices_per_address_max: int = Field(default=64, ge=1)
    # New devices one address may register in an hour: a loop of fresh identities is not a class of pupils.
    registrations_per_hour_max: int = Field(default=600, ge=1)
    # Open device sockets of one gateway process; an idle one costs about 31 KB.
    connections_max: int = Field(default=20_000, ge=1)
    # From the socket's opening to a complete HELLO.
    hello_s_max: float = Field(default=10.0, gt=0)
    # Between PINGs of the server; also told to the client.
    ping_s: float = Field(default=1.0, gt=0)
    # A connection from which no frame has come for this long is dead (the promise is 15 s; half of it leaves time).
    silence_s_max: float = Field(default=8.0, gt=0)
    # One frame handed to a socket must be accepted by its buffer within this; a client that never reads is closed.
    send_stall_s_max: float = Field(default=15.0, gt=0)
    # Messages waiting for one device's socket. More means that it does not read: it is closed.
    outbox_messages_max: int = Field(default=4096, ge=16)
    # Upload slots of one gateway together; beyond it a finished upload waits for a slot.
    slots_bytes_max: int = Field(default=GIB, ge=4 * KIB)
    # How long a finished upload waits for a slot before its device is told to come back with it (BYE busy).
    slot_wait_s_max: float = Field(default=4.0, gt=0)
    # A slot whose coordinator never released it (it crashed in between) is used again after this.
    slot_held_s_max: float = Field(default=600.0, gt=0)
    # Between two chunks of one result; a device that breaks off keeps no slot.
    upload_stall_s_max: float = Field(default=15.0, gt=0)
    # Files (arenas of jobs) a gateway keeps mapped at once.
    maps_max: int = Field(default=64, ge=1)
    # Messages a second one device may send beyond the chunks of its results: pings, status, fails.
    device_messages_per_s_max: float = Field(default=200.0, gt=0)

    # ---- REST and pages ----------------------------------------------------------------------------------------------

    # A body that is not an upload: job descriptions, forms.
    body_bytes_max: int = Field(default=MIB, ge=KIB)
    # One uploaded matrix file; a multipart request may be two of these.
    upload_bytes_max: int = Field(default=GIB, ge=KIB)
    # A request's headers must be complete, and a body must not pause, for longer than this.
    request_idle_s_max: float = Field(default=20.0, gt=0)
    # Rows of one page of a list.
    page_rows_max: int = Field(default=100, ge=1)
    # Rows of one answer of a job's metrics.
    metrics_rows_max: int = Field(default=10_000, ge=1)
    # Failed logins (pages) and wrong tokens (REST) of one address in a minute before it is told to wait.
    login_failures_per_minute_max: int = Field(default=10, ge=1)
    # A page's session.
    session_s_max: float = Field(default=12 * 3600.0, gt=0)
    # Open event streams (GET /jobs/{id}/events) of one gateway, and of one address.
    event_streams_max: int = Field(default=1000, ge=1)
    event_streams_per_address_max: int = Field(default=32, ge=1)
    # Events waiting for one watching page; a slow one loses the oldest, each being superseded by the next.
    events_queued_max: int = Field(default=256, ge=4)
    # A comment on an idle event stream, so that proxies keep it open.
    event_heartbeat_s: float = Field(default=15.0, gt=0)
    # Seconds a stopping gateway gives its open requests.
    shutdown_s_max: float = Field(default=5.0, gt=0)

    # ---- jobs --------------------------------------------------------------------------------------------------------

    # Jobs computing at once; each is two processes.
    jobs_running_max: int = Field(default=2, ge=1)
    # Jobs waiting; beyond it POST /jobs is answered 503.
    jobs_queued_max: int = Field(default=100, ge=1)
    # Steps of one job.
    steps_max: int = Field(default=1_000_000, ge=1)
    # Times a job's processes are started again after a crash before the job fails with the reason.
    job_restarts_max: int = Field(default=10, ge=0)
    # A checkpoint at least this often (seconds of work lost at most when a script dies).
    checkpoint_every_s: float = Field(default=30.0, gt=0)
    # Elements of one side of a gemm job's matrices.
    gemm_dimension_max: int = Field(default=2**20, ge=1)
    # GEMMs smaller than this (2mnk FLOP) are computed at home in `tiles` mode.
    gemm_flop_min: int = Field(default=1_000_000, ge=0)

    # ---- coordinator -------------------------------------------------------------------------------------------------

    # Between looks at deadlines.
    tick_s: float = Field(default=0.05, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("got one of tls_cert and tls_key, expected both or neither")
        if self.silence_s_max <= 2 * self.ping_s:
            raise ValueError(f"silence_s_max {self.silence_s_max} must be more than two pings ({self.ping_s} s each)")
        if self.slot_wait_s_max >= self.silence_s_max:
            raise ValueError(f"slot_wait_s_max {self.slot_wait_s_max} must be below silence_s_max {self.silence_s_max}")
        if self.admin_token is not None and len(self.admin_token.get_secret_value()) < 16:
            raise ValueError("admin_token is shorter than 16 characters; use a longer one, e.g. `openssl rand -hex 24`")
        return self

    @property
    def database_path(self) -> Path:
        """The SQLite database: jobs, ledger, devices."""
        return self.data_dir / "tileweave.sqlite"

    @property
    def jobs_dir(self) -> Path:
        """One directory for each job: checkpoints, inputs, result."""
        return self.data_dir / "jobs"

    @property
    def datasets_dir(self) -> Path:
        """Files and folders that a job's `data` may name. Put there by hand, with the rights of who runs the server."""
        return self.data_dir / "datasets"

    @property
    def token_path(self) -> Path:
        """The admin token's file, mode 0600."""
        return self.data_dir / "token"

    @property
    def run_dir(self) -> Path:
        """Files of work in flight (arenas, upload slots, sockets): shared memory where there is some, since they are
        never needed after a restart. Named after the user and the data directory, so that two servers do not meet."""
        shm = Path("/dev/shm")  # noqa: S108 - the name below it is ours, and the supervisor checks who owns it
        if not (shm.is_dir() and os.access(shm, os.W_OK)):
            return self.data_dir / "run"
        digest = hashlib.sha256(str(self.data_dir.expanduser().absolute()).encode()).hexdigest()[:12]
        return shm / f"tileweave-{os.getuid()}-{digest}"

    def environment(self) -> dict[str, str]:
        """The variables that make a child process build these same settings. The admin token is left out: a child
        that needs it inherits the variable or reads the file."""
        values = self.model_dump(mode="json", exclude={"admin_token"}, exclude_none=True)
        return {
            f"TILEWEAVE_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
            for name, value in values.items()
        }


def load_or_create_token(settings: Settings) -> tuple[str, bool]:
    """The admin token, and whether it was made just now (then `serve` prints it, once). TILEWEAVE_ADMIN_TOKEN wins;
    else the file, which is created with mode 0600 in one step. Raises ValueError on an empty file."""
    if settings.admin_token is not None:
        return settings.admin_token.get_secret_value(), False
    path = settings.token_path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    token = secrets.token_urlsafe(32)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        token = path.read_text(encoding="ascii").strip()
        if len(token) < 16:
            raise ValueError(
                f"{path} holds {len(token)} characters, expected a token of 16 or more; delete it for a new one"
            ) from None
        return token, False
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
        file.flush()
        os.fsync(file.fileno())
    return token, True
