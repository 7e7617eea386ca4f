"""The operand arena: regions never overlap, are what the files hold, stay warm, and end in a clear error."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileweave.script.arena import FREE, REGION_BYTES_MIN, Arena, ArenaFullError, Block, size_class

SEGMENT = 1 << 16


@given(st.integers(1, 1 << 40))
def test_size_classes_are_aligned_and_waste_at_most_a_quarter(size: int) -> None:
    reserved = size_class(size)
    assert size <= reserved <= max(REGION_BYTES_MIN, size * 1.25)
    assert reserved % 64 == 0
    assert size_class(reserved) == reserved


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30_000)), max_size=40))
def test_regions_in_use_never_overlap_and_are_what_the_files_hold(script: list[tuple[bool, int]]) -> None:
    with TemporaryDirectory() as folder:
        arena = Arena(Path(folder), segment_bytes=SEGMENT)
        used: list[tuple[Block, int]] = []
        for number, (free, floats) in enumerate(script):
            if free and used:
                block, _ = used.pop(floats % len(used))
                arena.free(block)
            else:
                block = arena.allocate(4 * floats)
                block.floats.fill_(number)
                used.append((block, number))
        for block, number in used:
            region = block.region
            assert region.offset % 64 == 0
            assert block.floats.data_ptr() % 64 == 0
            assert region.offset + region.size <= Path(region.path).stat().st_size
            found = np.fromfile(region.path, np.float32, block.floats.numel(), offset=region.offset)
            assert (found == number).all()
        arena.close()
        assert list(Path(folder).iterdir()) == []


def test_a_loop_of_equal_sizes_does_not_grow_and_gets_the_warm_region(tmp_path: Path) -> None:
    arena = Arena(tmp_path, segment_bytes=SEGMENT)
    regions = set()
    for _ in range(100):
        blocks = [arena.allocate(4 * n) for n in (3000, 3000, 5000)]
        regions.add(tuple(block.region.offset for block in blocks))
        for block in reversed(blocks):
            arena.free(block)
    assert len(regions) == 1
    assert arena.reserved == SEGMENT


def test_a_stamp_is_there_exactly_while_its_region_is_in_use(tmp_path: Path) -> None:
    def stamp(block: Block) -> int:
        return int(np.fromfile(block.region.path, "<u8", 1, offset=block.stamp_offset)[0])

    arena = Arena(tmp_path, segment_bytes=SEGMENT)
    first, other = arena.allocate(100), arena.allocate(100)
    assert stamp(first) == first.stamp != other.stamp
    arena.free(first)
    assert stamp(first) == FREE
    again = arena.allocate(100)
    assert again.region == first.region
    assert stamp(again) == again.stamp not in (first.stamp, other.stamp)


def test_a_request_beyond_a_segment_gets_a_file_of_its_own(tmp_path: Path) -> None:
    arena = Arena(tmp_path, segment_bytes=SEGMENT)
    small = arena.allocate(40)
    large = arena.allocate(4 * SEGMENT)
    assert large.region.path != small.region.path
    assert large.floats.numel() == SEGMENT
    assert arena.allocate(40).region.path == small.region.path


def test_the_limit_is_an_error_that_names_the_sizes(tmp_path: Path) -> None:
    arena = Arena(tmp_path, limit=2 * SEGMENT, segment_bytes=SEGMENT)
    arena.allocate(SEGMENT // 2)
    with pytest.raises(ArenaFullError, match=r"holds 65,536 bytes and needs 118,784 more, beyond its limit of 131,072"):
        arena.allocate(SEGMENT * 7 // 4)
    arena.allocate(SEGMENT // 4)  # a smaller one still fits


def test_a_full_file_system_is_an_error_before_any_page_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    arena = Arena(tmp_path, segment_bytes=SEGMENT)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaFullError, match=r"no room for 65,536 bytes of operands .* bytes are free"):
        arena.allocate(40)
    assert list(tmp_path.iterdir()) == []
