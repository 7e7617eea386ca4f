"""Frames and chunks under generated input: what is written is read back, and bad bytes raise ProtocolError alone."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileweave.protocol import (
    CHUNK_BYTES_MAX,
    FRAME_BYTES_MAX,
    META_BYTES_MAX,
    TERMS_MAX,
    Accuracy,
    Ack,
    Bye,
    Drop,
    Hello,
    Kind,
    Lease,
    Message,
    Panel,
    Ping,
    Profile,
    ProtocolError,
    Reassembly,
    Result,
    ResultDtype,
    Status,
    Term,
    chunks,
    decode,
    encode,
)

ids = st.text("abcXYZ019_.:-", min_size=1, max_size=64)
leases = st.integers(0, 2**53 - 1)
sizes = st.integers(0, 2**40)
seconds = st.floats(0, 1e7)
dimensions = st.integers(1, 2**24)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=500)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=64)
offsets = st.integers(0, 2**24)
terms = st.builds(Term, k=dimensions, a=ids, b=ids, a_row=offsets, a_column=offsets, b_row=offsets, b_column=offsets)
profiles = st.builds(
    Profile, kernel=ids.map(lambda s: s[:32]), flops=st.floats(0, 1e18), memory_bytes=sizes, workers=st.integers(1, 256)
)
bare: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Hello,
        client=names, profile=profiles, device=st.none() | ids, name=names,
        secret=st.none() | st.text("ab", min_size=16, max_size=99),
        panels=st.lists(ids, max_size=20), leases=st.lists(leases, max_size=64),
    ),
    st.builds(Drop, panels=st.lists(ids, max_size=50)),
    st.builds(
        Lease,
        lease=leases, job=ids, batch=dimensions, m=dimensions, n=dimensions, deadline_s=seconds,
        terms=st.lists(terms, min_size=1, max_size=20), a_by_k=st.booleans(), b_by_k=st.booleans(),
        dtype=st.sampled_from(get_args(ResultDtype)), accuracy=st.sampled_from(get_args(Accuracy)),
    ),
    st.builds(
        Ack,
        lease=leases, job=ids, verdict=st.sampled_from(["accepted", "duplicate", "late", "rejected"]), reason=texts,
        flop=leases,
    ),
    st.builds(Status, state=st.sampled_from(["ready", "paused", "stopping"]), reason=texts, visible=st.booleans()),
    st.builds(Bye, code=st.sampled_from(["done", "reload", "silent"]), reason=texts, retry_s=seconds),
)  # fmt: skip


@st.composite
def results(draw: st.DrawFn) -> tuple[Message, bytes]:
    payload = draw(st.binary(min_size=1, max_size=300))
    offset = draw(st.integers(0, 2**30))
    size = offset + len(payload) + draw(st.integers(0, 2**30))
    return Result(lease=draw(leases), job=draw(ids), seconds=draw(seconds), offset=offset, size=size), payload


frames = st.one_of(bare.map(lambda message: (message, b"")), results())


@given(frames)
def test_round_trip(sent: tuple[Message, bytes]) -> None:
    message, payload = sent
    frame = encode(message, payload)
    received, view = decode(frame)
    assert received == message
    assert view == payload
    assert (len(frame) - len(payload)) % 16 == 0


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_protocol_errors(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@given(st.sampled_from(list(Kind)), st.binary(max_size=64))
def test_random_metadata_raises_only_protocol_errors(kind: Kind, meta: bytes) -> None:
    header = b"TW\x02" + bytes([kind]) + len(meta).to_bytes(4, "little") + bytes(8)
    with pytest.raises(ProtocolError):
        decode(header + meta + bytes(-len(meta) % 16))


@given(frames, st.data())
def test_mutated_frames_raise_only_protocol_errors(sent: tuple[Message, bytes], data: st.DataObject) -> None:
    frame = bytearray(encode(*sent))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)) | st.just(len(frame)))
    try:
        message, payload = decode(memoryview(frame)[:cut])
    except ProtocolError:
        return
    assert encode(message, payload)  # what decodes is within the limits of encode


def test_payload_is_a_view_and_encode_copies_once() -> None:
    operand = np.arange(2**16, dtype=np.float32).reshape(256, 256)
    panel = Panel(panel="p", rows=256, columns=256, offset=0, size=operand.nbytes)
    tracemalloc.start()
    frame = encode(panel, memoryview(operand).cast("B"))
    _, peak = tracemalloc.get_traced_memory()
    view = decode(frame)[1]
    _, peak_after_decode = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < operand.nbytes + 10_000
    assert peak_after_decode < operand.nbytes + 30_000
    assert np.array_equal(np.frombuffer(view, np.float32).reshape(256, 256), operand)


@pytest.mark.parametrize("declared", [2**20 + 1, 2**31, 2**32 - 1])
def test_a_large_declared_size_allocates_nothing(declared: int) -> None:
    lies = b"TW\x02\x07" + (80).to_bytes(4, "little") + declared.to_bytes(4, "little") + bytes(4) + b"{" * 96
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="header says"):
        decode(lies)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000


def test_limits_of_frame_and_metadata() -> None:
    largest = Result(lease=2**53 - 1, job="j" * 64, seconds=1e7 / 3, offset=2**40 - CHUNK_BYTES_MAX, size=2**40)
    assert len(encode(largest, bytes(CHUNK_BYTES_MAX))) <= FRAME_BYTES_MAX
    with pytest.raises(ValueError, match="use chunks"):
        encode(largest, bytes(FRAME_BYTES_MAX))
    with pytest.raises(ValueError, match="several messages"):
        encode(Drop(panels=["p" * 64] * 4096))
    with pytest.raises(ValueError, match="expected none"):
        encode(Ping(nonce=1), b"x")
    with pytest.raises(ValueError, match="expected 24"):
        encode(Panel(panel="p", rows=2, columns=3, offset=0, size=28), b"x")
    with pytest.raises(ProtocolError, match="expected 16 to"):
        decode(bytes(FRAME_BYTES_MAX + 1))
    long_meta = META_BYTES_MAX + 16
    with pytest.raises(ProtocolError, match="metadata of"):
        decode(b"TW\x02\x0c" + long_meta.to_bytes(4, "little") + bytes(8) + b" " * long_meta)


@given(st.integers(0, 10 * 2**20), st.integers(4112, 2**21))
def test_chunks_cover_the_payload_in_order(size: int, frame_bytes_max: int) -> None:
    end = 0
    for offset, length in chunks(size, frame_bytes_max if size < 2**17 else max(frame_bytes_max, 2**16)):
        assert offset == end and offset % 16 == 0
        assert 0 < length <= CHUNK_BYTES_MAX
        end = offset + length
    assert end == size


def test_chunks_refuse_a_frame_without_room() -> None:
    with pytest.raises(ValueError, match="expected over"):
        list(chunks(1, 4096))


@given(st.binary(min_size=1, max_size=5000), st.integers(1, 700))
def test_reassembly_puts_chunks_together(payload: bytes, step: int) -> None:
    whole = Reassembly(6000)
    for offset in range(0, len(payload), step):
        done = whole.add(offset, len(payload), payload[offset : offset + step])
        assert done == whole.complete == (whole.received == len(payload))
    assert whole.data == payload
    with pytest.raises(ProtocolError):
        whole.add(len(payload), len(payload), b"x")


@given(st.lists(st.tuples(st.integers(-5, 70), st.integers(-5, 70), st.integers(0, 70)), max_size=8))
def test_reassembly_never_takes_a_wrong_chunk(steps: list[tuple[int, int, int]]) -> None:
    whole = Reassembly(64)
    taken, size_first = 0, 0
    for offset, size, length in steps:
        fits = offset == taken and size in (size_first or size, size) and 0 < size <= 64 and 0 < length <= size - offset
        fits = fits and (size_first in (0, size))
        if fits:
            whole.add(offset, size, bytes(length))
            taken, size_first = taken + length, size
        else:
            with pytest.raises(ProtocolError):
                whole.add(offset, size, bytes(length))
        assert (whole.received, whole.size) == (taken, size_first)


def test_reassembly_gives_nothing_before_its_end() -> None:
    with pytest.raises(ValueError, match="wait until complete"):
        _ = Reassembly(64).data


def test_whole_panel_through_frames() -> None:
    rng = random.Random(7)
    panel = np.frombuffer(rng.randbytes(3 * 2**20), dtype=np.float32).reshape(768, 1024)
    raw: Any = memoryview(panel).cast("B")
    whole = Reassembly(panel.nbytes)
    for offset, length in chunks(panel.nbytes):
        head = Panel(panel="p", rows=768, columns=1024, offset=offset, size=panel.nbytes)
        message, payload = decode(encode(head, raw[offset : offset + length]))
        assert isinstance(message, Panel)
        whole.add(message.offset, message.size, payload)
    assert whole.data == raw


def test_the_longest_lease_fits_its_frame() -> None:
    far = 2**24
    term = Term(k=far, a="a" * 64, b="b" * 64, a_row=far, a_column=far, b_row=far, b_column=far)
    lease = Lease(
        lease=2**53 - 1, job="j" * 64, batch=far, m=far, n=far, terms=[term] * TERMS_MAX, deadline_s=1234567.123456,
        a_by_k=False, b_by_k=False, accuracy="normwise",
    )  # fmt: skip
    assert decode(encode(lease))[0] == lease
