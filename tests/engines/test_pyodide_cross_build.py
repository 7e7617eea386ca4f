"""`make pyodide-wheel`: through `pyodide build` where that works, else by ziglang alone, and it says which."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "kernels_wasm" / "pyodide"


@pytest.fixture
def cross_build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SOURCE))
    for name in ("build_wheel", "cross_build"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("cross_build")


def pretend(cross_build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """A `pyodide` command of ours, and a pyodide-build that counts as installed."""
    command = tmp_path / "pyodide"
    command.write_text(f"#!{sys.executable}\nimport sys\narguments = sys.argv[1:]\n{script}")
    command.chmod(0o755)
    monkeypatch.setattr(cross_build, "PYODIDE", command)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_without_pyodide_build_ziglang_makes_the_wheel(cross_build, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    cross_build.main(tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size > 10_000
    assert "not through `pyodide build`: pyodide-build is not installed" in capsys.readouterr().out


def test_a_cross_build_environment_that_cannot_be_had_is_said(cross_build, monkeypatch, tmp_path, capsys) -> None:
    pretend(cross_build, monkeypatch, tmp_path, "sys.exit('first line\\nno network')")
    cross_build.main(tmp_path / "out")
    assert list((tmp_path / "out").glob("*.whl"))
    assert "`pyodide xbuildenv` failed: no network; by ziglang alone" in capsys.readouterr().out


def test_what_pyodide_build_made_is_what_is_served(cross_build, monkeypatch, tmp_path, capsys) -> None:
    """Wheels of older versions go, and the lock names the new one."""
    script = """
if arguments[0] == "build":
    import pathlib
    pathlib.Path(arguments[2], "tileweave_kernel-9-py3-none-any.whl").write_bytes(b"from pyodide build")
"""
    pretend(cross_build, monkeypatch, tmp_path, script)
    out = tmp_path / "out"
    out.mkdir()
    (out / "tileweave_kernel-0-py3-none-any.whl").write_bytes(b"old")
    theirs = tmp_path / "theirs.json"
    theirs.write_text('{"info": {}, "packages": {}}')
    monkeypatch.setattr(cross_build.build_wheel, "PYODIDE_LOCK", theirs)
    cross_build.main(out)
    assert [path.read_bytes() for path in out.glob("*.whl")] == [b"from pyodide build"]
    package = json.loads((out / "pyodide-lock.json").read_text())["packages"]["tileweave-kernel"]
    assert package["sha256"] == hashlib.sha256(b"from pyodide build").hexdigest()
    assert capsys.readouterr().out.startswith("through `pyodide build`\n")
