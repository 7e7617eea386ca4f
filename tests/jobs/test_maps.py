"""Views of shared files: what lies inside is seen without a copy, what does not is an error and never a crash."""

from __future__ import annotations

import numpy as np
import pytest

from backend.jobs.maps import Maps, RegionError
from tileweave.script.wire import Region


def test_a_view_sees_what_is_written_and_writes_through(tmp_path) -> None:
    path = tmp_path / "segment"
    np.arange(16, dtype=np.float32).tofile(path)
    region = Region(str(path), 8, 16)
    seen = Maps(tmp_path).floats(region, 4)
    assert seen.tolist() == [2, 3, 4, 5]
    assert not seen.flags.writeable
    Maps(tmp_path, writable=True).floats(region, 4)[1] = -1
    assert seen.tolist() == [2, -1, 4, 5]


def test_a_file_that_grew_or_was_replaced_is_mapped_anew(tmp_path) -> None:
    path = tmp_path / "segment"
    maps = Maps(tmp_path)
    np.zeros(4, np.float32).tofile(path)
    assert maps.floats(Region(str(path), 0, 16), 4).sum() == 0
    with path.open("ab") as file:
        file.write(np.ones(4, np.float32).tobytes())
    assert maps.floats(Region(str(path), 16, 16), 4).sum() == 4
    path.unlink()
    np.full(8, 7, np.float32).tofile(path)
    assert maps.floats(Region(str(path), 0, 16), 4).sum() == 28


def test_arrays_outlive_the_cache(tmp_path) -> None:
    maps = Maps(tmp_path, maps_max=1)
    for name in ("a", "b"):
        np.full(4, ord(name), np.float32).tofile(tmp_path / name)
    first = maps.floats(Region(str(tmp_path / "a"), 0, 16), 4)
    maps.floats(Region(str(tmp_path / "b"), 0, 16), 4)
    assert first.tolist() == [97] * 4


@pytest.mark.parametrize(
    ("name", "offset", "size", "count", "what"),
    [
        ("run/../secret", 0, 16, 4, "below"),
        ("/etc/hostname", 0, 4, 1, "below"),
        ("run/segment", 0, 12, 4, "12 bytes, expected 16"),
        ("run/segment", -4, 16, 4, "offset -4"),
        ("run/segment", 2, 16, 4, "offset 2"),
        ("run/segment", 4, 16, 4, "up to byte 20 .* has 16"),
        ("run/missing", 0, 16, 4, "No such file"),
        ("run/empty", 0, 16, 4, "empty"),
    ],
)
def test_regions_that_are_not_there(tmp_path, name, offset, size, count, what) -> None:
    run = tmp_path / "run"
    run.mkdir()
    np.zeros(4, np.float32).tofile(run / "segment")
    (run / "empty").touch()
    with pytest.raises(RegionError, match=what):
        Maps(run).floats(Region(str(tmp_path / name), offset, size), count)
