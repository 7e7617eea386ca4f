"""Who this volunteer is next time: device id and secret, in one small file for each server.

The secret is what the server knows the device by, so the file is readable by its owner alone and replaced atomically.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tileweave.volunteer.errors import OptionError


@dataclass(frozen=True, slots=True)
class Identity:
    """The credentials of a device the server has made."""

    device: str
    secret: str


def identity_path(url: str) -> Path:
    """Where the identity for the server at `url` is kept by default."""
    host = urlsplit(url).netloc.replace(":", "-").replace("/", "-")
    return Path.home() / ".local" / "share" / "tileweave" / f"volunteer-{host}.json"


def load_identity(path: Path) -> Identity | None:
    """The identity kept in `path`, None when there is none yet. Raises OptionError for any other file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Identity(str(content["device"]), str(content["secret"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{path} is not an identity file ({error!r}); delete it to join as a new device") from None


def save_identity(path: Path, identity: Identity) -> None:
    """Writes the file with mode 0600, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"device": identity.device, "secret": identity.secret}, file)
    part.replace(path)
