"""The gateway's process: `python -m backend.gateway --index 0 --fd 3`, started by the supervisor.

It serves on a listening socket that it inherits, so that a restart never loses a connection that is being made. It ends
in order on SIGTERM (devices get BYE `shutdown`), and at once when its supervisor dies.
"""

from __future__ import annotations

import argparse
import socket

import uvicorn
from fastapi import FastAPI

from backend.gateway.app import create_app
from backend.gateway.context import Gateway
from backend.gateway.wire import DeviceSocket, guarded_http
from backend.logs import configure_logging
from backend.parent import watch_parent
from backend.settings import Settings

OVERSIZE_BYTES = 64 << 10  # a frame a little too large is read, so that its sender gets BYE with the reason


class Server(uvicorn.Server):
    """Says goodbye to devices and watchers before uvicorn closes their sockets."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends all connections."""
        gateway: Gateway = self._app.state.gateway
        gateway.live.close()
        await gateway.fleet.goodbye("shutdown", "the server stops or restarts; come back", retry_s=1.0)
        await super().shutdown(sockets)


def server(settings: Settings, app: FastAPI) -> Server:
    """uvicorn, set up for `app` with the limits of the settings."""
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=guarded_http(settings.request_idle_s_max),
        ws=DeviceSocket,
        ws_max_size=settings.frame_bytes_max + OVERSIZE_BYTES,
        ws_per_message_deflate=False,
        ws_ping_interval=None,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_s_max)),
        lifespan="on",
        server_header=False,
        access_log=False,  # ours has no query strings
        log_config=None,
        log_level="warning",
    )
    return Server(config, app)


def main() -> None:
    """Serves until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", type=int, required=True, help="number of this gateway, from 0")
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the listening socket")
    arguments = parser.parse_args()
    configure_logging(f"gateway-{arguments.index}")
    watch_parent()
    settings = Settings()
    listener = socket.socket(fileno=arguments.fd)
    server(settings, create_app(settings, arguments.index)).run(sockets=[listener])


if __name__ == "__main__":
    main()
