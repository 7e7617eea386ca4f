"""Settings: children see what their parent chose, contradictions are refused, and the token is kept to its owner."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from pydantic import ValidationError

from backend.settings import Settings, load_or_create_token


def test_a_child_builds_the_same_settings_without_the_token(monkeypatch, tmp_path) -> None:
    chosen = Settings(
        data_dir=tmp_path,
        port=9000,
        trusted_proxies=["10.0.0.0/8"],
        ping_s=0.5,
        admin_token="x" * 20,
        redis_url="unix:///r",
    )
    environment = chosen.environment()
    assert "x" * 20 not in json.dumps(environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Settings(admin_token="x" * 20) == chosen


@pytest.mark.parametrize(
    "values",
    [
        {"tls_cert": Path("cert.pem")},
        {"silence_s_max": 1.0, "ping_s": 1.0},
        {"slot_wait_s_max": 100.0},
        {"admin_token": "short"},
        {"port": 70000},
        {"frame_bytes_max": 2 << 20},
    ],
)
def test_contradictions_are_refused(values) -> None:
    with pytest.raises(ValidationError):
        Settings(**values)


def test_every_setting_has_a_comment_before_it() -> None:
    source = Path(Settings.__module__.replace(".", "/") + ".py")
    lines = (Path(__file__).parents[2] / source).read_text().splitlines()
    for name in Settings.model_fields:
        (at,) = [number for number, line in enumerate(lines) if line.startswith(f"    {name}: ")]
        block = lines[:at][::-1]
        first = next(
            line for line in block if not any(line.startswith(f"    {other}: ") for other in Settings.model_fields)
        )
        assert first.strip().startswith("#"), name


def test_the_token_is_made_once_for_its_owner_only(tmp_path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    token, fresh = load_or_create_token(settings)
    assert fresh
    assert len(token) >= 32
    assert stat.S_IMODE(settings.token_path.stat().st_mode) == 0o600
    assert load_or_create_token(settings) == (token, False)
    settings.token_path.write_text("")
    with pytest.raises(ValueError, match="delete it"):
        load_or_create_token(settings)
    assert load_or_create_token(Settings(data_dir=tmp_path, admin_token="y" * 16)) == ("y" * 16, False)


def test_the_run_directory_is_this_servers_own(tmp_path) -> None:
    one, two = Settings(data_dir=tmp_path / "one"), Settings(data_dir=tmp_path / "two")
    assert one.run_dir != two.run_dir
    assert one.run_dir == Settings(data_dir=tmp_path / "one").run_dir
