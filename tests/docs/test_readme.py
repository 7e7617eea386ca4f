"""The README says what is true: its tree comes from the files, and the commands it shows exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_tree_is_what_the_files_say_of_themselves() -> None:
    done = subprocess.run(
        [sys.executable, "docs/make_tree.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_command_shown_exists() -> None:
    text = (ROOT / "README.md").read_text()
    shown = set(re.findall(r"tileweave (serve|submit|jobs|volunteer|simulate|demo|bench)\b((?: --[a-z-]+)*)", text))
    assert {"serve", "submit", "jobs", "volunteer"} <= {command for command, _ in shown}
    for command, options in shown:
        done = subprocess.run(
            [sys.executable, "-m", "backend.cli", command, "--help"],
            cwd=ROOT, capture_output=True, text=True, check=True, env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        for option in options.split():
            assert option in done.stdout, f"README shows {command} {option}"


def test_every_make_target_shown_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z-]+)", (ROOT / "README.md").read_text())) <= targets
