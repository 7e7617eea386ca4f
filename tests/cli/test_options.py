"""Wrong options of the command line: exit status 2, and one line that says what was got and what is expected."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from backend.cli import app


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["serve", "--port", "99999"], "settings: port: got 99999: Input should be less than or equal to 65535"),
        (["serve", "--tls-cert", "c.pem"], "got one of tls_cert and tls_key, expected both or neither"),
        (["serve", "--tls-cert", "c.pem", "--tls-key", "k.pem"], "the TLS certificate or key cannot be used"),
        (["submit", "gpt-bytes", "--config", "[1]"], "--config: got [1], expected a JSON object"),
        (["submit", "gpt-bytes", "--config", "{x"], "--config: got {x, expected a JSON object"),
        (["submit"], "give a recipe, or --gemm A B"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(tmp_path: Path, options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, options, env={"TILEWEAVE_DATA_DIR": str(tmp_path)})
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
