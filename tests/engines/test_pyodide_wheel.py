"""The wheel that Pyodide loads, as a file: the same bytes twice, its side modules' imports and exports, its lock."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from auditwheel_emscripten import get_exports, get_imports

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "kernels_wasm" / "pyodide"
BUILDS = ["relaxed", "strict"]


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_wheel", SOURCE / "build_wheel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    return directory / builder.build_wheel(str(directory))


@pytest.fixture
def libraries(wheel: Path, tmp_path: Path) -> dict[str, Path]:
    """The wheel's side modules under the ending by which auditwheel knows them; each path can be asked about once."""
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for build in BUILDS:
            found[build] = tmp_path / f"{build}.so"
            found[build].write_bytes(archive.read(f"tileweave_kernel/gemm_{build}.wasm"))
    return found


def test_two_builds_are_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    """The second in a process of its own."""
    build = f"import build_wheel; build_wheel.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], check=True, cwd=SOURCE, timeout=120)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_name_version_and_tag(wheel: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert wheel.name == f"tileweave_kernel-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        info = f"tileweave_kernel-{version}.dist-info"
        assert f"Version: {version}\n" in archive.read(f"{info}/METADATA").decode()
        assert "Tag: py3-none-any\n" in archive.read(f"{info}/WHEEL").decode()


def test_record_has_every_file_and_its_digest(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        record = next(name for name in archive.namelist() if name.endswith("/RECORD"))
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
        assert sorted(name for name, _, _ in rows) == sorted(archive.namelist())
        for name, digest, size in rows:
            if name == record:
                continue
            data = archive.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={expected}", str(len(data)))


def test_pyodide_does_not_load_the_side_modules_by_itself(wheel: Path) -> None:
    """It would load every .so at installation, the relaxed one too where the browser cannot."""
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if ".so" in name]


@pytest.mark.parametrize("build", BUILDS)
def test_side_module_exports_the_kernel_and_nothing_else(libraries: dict[str, Path], build: str) -> None:
    (exports,) = get_exports(libraries[build]).values()
    assert {export.name for export in exports} == {
        "gemm",
        "gemm_scratch_bytes",
        "gemm_fast",
        "gemm_fast_scratch_bytes",
    }


@pytest.mark.parametrize("build", BUILDS)
def test_side_module_imports_no_function(libraries: dict[str, Path], build: str) -> None:
    """Whatever it imported, another Pyodide might not have."""
    (imports,) = get_imports(libraries[build]).values()
    names = {entry.field for entry in imports}
    assert names <= {"memory", "__indirect_function_table", "__memory_base", "__table_base", "__stack_pointer"}
    assert "memory" in names, "it works on Pyodide's memory"


def test_builds_differ(libraries: dict[str, Path]) -> None:
    assert libraries["relaxed"].read_bytes() != libraries["strict"].read_bytes()


def test_lock_names_this_wheel_and_nothing_else(builder: ModuleType, wheel: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.json"
    info = {"abi_version": "1", "arch": "wasm32", "platform": "emscripten_1", "python": "3.14.2"}
    theirs.write_text(json.dumps({"info": info, "packages": {"numpy": {"file_name": "https://elsewhere/numpy.whl"}}}))
    lock = json.loads(builder.lock(wheel, theirs).read_text())
    assert lock["info"] == info
    assert list(lock["packages"]) == ["tileweave-kernel"]
    package = lock["packages"]["tileweave-kernel"]
    assert package["file_name"] == wheel.name
    assert package["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert package["depends"] == []
