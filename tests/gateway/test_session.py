"""The parts without I/O: session, outbox, slots, maps and the link meter."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from backend.gateway.link import LinkMeter
from backend.gateway.maps import Maps, PanelGone
from backend.gateway.outbox import Chunk, Outbox
from backend.gateway.session import Abandon, Begin, Finish, Publish, Reply, Session, Write
from backend.gateway.slots import Slots, sweep
from backend.switchboard.messages import PanelRef, Push
from tileweave.conversions import panel_floats, panel_of
from tileweave.protocol import Ack, Drop, Lease, Ping, ProtocolError, Result, Revoke, Term, encode
from tileweave.protocol.elements import panel_bytes, scales_offset

MIB = 1 << 20


def a_push(lease: int, a: str = "a", b: str = "b", rows: int = 4, k: int = 8) -> Push:
    return Push(
        device="d",
        connection="c",
        lease=Lease(lease=lease, job="j", batch=1, m=rows, n=rows, terms=[Term(k=k, a=a, b=b)], deadline_s=9),
        panels=[PanelRef(a, "/a", 0, rows, k, 0, 1), PanelRef(b, "/b", 0, rows, k, 0, 1)],
    )


def result(lease: int, offset: int, size: int) -> Result:
    return Result(lease=lease, job="j", seconds=1.0, offset=offset, size=size)


def drain(outbox: Outbox) -> list[object]:
    pieces = []
    while (piece := outbox.next()) is not None:
        pieces.append((piece.ref.panel, piece.offset) if isinstance(piece, Chunk) else piece)
    return pieces


def test_each_panel_is_sent_once_and_before_its_lease() -> None:
    outbox = Outbox(MIB, 100)
    first, second = a_push(1), a_push(2, b="b2")
    outbox.push(first)
    outbox.push(second)
    assert drain(outbox) == [("a", 0), ("b", 0), first.lease, ("b2", 0), second.lease]


def test_control_messages_overtake_chunks_but_drop_does_not() -> None:
    outbox = Outbox(MIB, 100)
    big = a_push(1, rows=1024, k=1024)  # 4 MiB: five chunks each
    outbox.push(big)
    assert isinstance(outbox.next(), Chunk)
    outbox.control(Ping(nonce=1))
    outbox.drop(["a", "never sent"])
    assert outbox.next() == Ping(nonce=1)
    rest = drain(outbox)
    assert [piece[0] for piece in rest[:4]] == ["a"] * 4
    assert rest[-2:] == [big.lease, Drop(panels=["a"])]
    outbox.push(a_push(2, rows=1024, k=1024))
    assert drain(outbox)[0] == ("a", 0)  # dropped, so it is sent anew


def test_a_revoked_lease_is_not_sent_and_its_panels_only_as_far_as_begun() -> None:
    outbox = Outbox(MIB, 100)
    outbox.push(a_push(1, rows=1024, k=1024))
    outbox.push(a_push(2, a="a2"))
    outbox.push(a_push(3, a="a3"))
    assert outbox.next().ref.panel == "a"
    outbox.revoke({1, 2})
    assert [piece[0] if isinstance(piece, tuple) else piece.lease for piece in drain(outbox)] == [
        "a", "a", "a", "a", "a3", "b", 3,
    ]  # fmt: skip


def test_a_lost_panel_takes_its_lease_along_and_is_sent_next_time() -> None:
    outbox = Outbox(MIB, 100)
    outbox.push(a_push(1))
    outbox.push(a_push(2, b="b2"))
    first = outbox.next()
    assert first.ref.panel == "a"
    outbox.lost(first)
    assert [piece[0] if isinstance(piece, tuple) else piece.lease for piece in drain(outbox)] == ["a", "b2", 2]


def test_many_panels_with_the_longest_ids_are_dropped_in_frames_that_can_be_sent() -> None:
    outbox = Outbox(MIB, 10_000)
    names = [f"{number:064d}" for number in range(3000)]
    for number, name in enumerate(names):
        outbox.push(a_push(number, a=name, b=name))
    outbox.drop(names)
    drops = [piece for piece in drain(outbox) if isinstance(piece, Drop)]
    assert sorted(name for drop in drops for name in drop.panels) == names
    for drop in drops:
        encode(drop)


def test_all_that_was_sent_is_dropped_before_the_next_job() -> None:
    outbox = Outbox(MIB, 100)
    outbox.push(a_push(1))
    outbox.drop_all()
    outbox.push(a_push(2))
    outbox.push(a_push(3))
    kinds = [piece[0] if isinstance(piece, tuple) else type(piece).__name__ for piece in drain(outbox)]
    assert kinds == ["a", "b", "Lease", "Drop", "a", "b", "Lease", "Lease"]


def test_what_has_come_of_a_panel_that_is_lost_midway_is_dropped() -> None:
    outbox = Outbox(MIB, 100)
    outbox.push(a_push(1, rows=1024, k=1024))
    outbox.push(a_push(2, rows=1024, k=1024))
    first, second = outbox.next(), outbox.next()
    assert first.offset == 0 < second.offset
    outbox.lost(second)
    rest = drain(outbox)
    assert rest[0] == Drop(panels=["a"])
    assert rest[1] == ("a", 0), "the second lease sends it from the start"
    assert [piece.lease for piece in rest if isinstance(piece, Lease)] == [2]


def test_a_drop_between_two_leases_is_between_them_on_the_wire_too() -> None:
    outbox = Outbox(MIB, 100)
    for lease in (1, 2):
        outbox.push(a_push(lease))
        outbox.drop(["a"])
    order = [piece[0] if isinstance(piece, tuple) else type(piece).__name__ for piece in drain(outbox)]
    assert order == ["a", "b", "Lease", "Drop", "a", "Lease", "Drop"]


def test_a_full_outbox_says_so() -> None:
    outbox = Outbox(MIB, 3)
    for lease in range(4):
        assert not outbox.full
        outbox.push(a_push(lease))
    assert outbox.full


def test_a_whole_result_and_one_in_chunks() -> None:
    session = Session("d", "c", [], MIB)
    session.leased(a_push(1))
    effects = session.receive(result(1, 0, 64), memoryview(bytes(64)))
    assert [type(effect) for effect in effects] == [Begin, Write, Finish]
    session.leased(a_push(2))
    assert [type(effect) for effect in session.receive(result(2, 0, 64), memoryview(bytes(16)))] == [Begin, Write]
    assert [type(effect) for effect in session.receive(result(2, 16, 64), memoryview(bytes(48)))] == [Write, Finish]
    # Again, before the answer: nothing happens; after it: the same answer.
    assert session.receive(result(1, 0, 64), memoryview(bytes(64))) == []
    session.acknowledged(Ack(lease=1, job="j", verdict="accepted", flop=1))
    (reply,) = session.receive(result(1, 0, 64), memoryview(bytes(64)))
    assert reply.message.verdict == "duplicate"


@pytest.mark.parametrize(("offset", "size", "length"), [(8, 64, 8), (16, 65, 16), (0, 64, 16), (32, 64, 32)])
def test_chunks_out_of_order_end_the_connection(offset, size, length) -> None:
    session = Session("d", "c", [], MIB)
    session.leased(a_push(1))
    session.receive(result(1, 0, 64), memoryview(bytes(16)))
    with pytest.raises(ProtocolError):
        session.receive(result(1, offset, size), memoryview(bytes(length)))


def test_a_revoked_upload_frees_its_slot_and_its_last_chunks_are_ignored() -> None:
    session = Session("d", "c", [], MIB)
    session.leased(a_push(1))
    session.receive(result(1, 0, 64), memoryview(bytes(16)))
    assert session.revoked("j", [1]) == [Abandon(1), Reply(Revoke(job="j", leases=[1]))]
    assert session.receive(result(1, 16, 64), memoryview(bytes(16))) == []
    assert session.receive(result(1, 32, 64), memoryview(bytes(32))) == []
    with pytest.raises(ProtocolError):
        session.receive(result(1, 32, 64), memoryview(bytes(32)))


def test_one_result_sent_again_at_a_time() -> None:
    session = Session("d", "c", [5, 6], MIB)
    begin, _ = session.receive(result(5, 0, 64), memoryview(bytes(16)))
    assert begin == Begin(5, "j", 64, leased=False)
    with pytest.raises(ProtocolError, match="one after the other"):
        session.receive(result(6, 0, 64), memoryview(bytes(16)))


def test_the_end_of_a_job_answers_what_was_sent_and_revokes_the_rest() -> None:
    session = Session("d", "c", [], MIB)
    for lease in (1, 2, 3):
        session.leased(a_push(lease))
    session.receive(result(1, 0, 64), memoryview(bytes(64)))
    session.receive(result(2, 0, 64), memoryview(bytes(16)))
    assert session.jobs() == {"j"}
    effects = session.job_ended("j")
    assert Abandon(2) in effects
    replies = [effect.message for effect in effects if isinstance(effect, Reply)]
    assert [(reply.lease, reply.verdict) for reply in replies if isinstance(reply, Ack)] == [(1, "late")]
    assert [sorted(reply.leases) for reply in replies if isinstance(reply, Revoke)] == [[2, 3]]
    assert session.jobs() == set()
    assert not any(isinstance(effect, Publish) for effect in effects)


def test_slots_are_whole_apart_and_merge_again(tmp_path) -> None:
    slots = Slots(tmp_path / "results-0-1.bin", 1 << 20)
    rng = random.Random(1)
    taken = {}
    for _ in range(2000):
        if taken and rng.random() < 0.5:
            slot = taken.pop(rng.choice(list(taken)))
            assert slots.view(slot)[: slot.size] == bytes([slot.number % 251]) * slot.size
            assert slots.give_back(slot.number)
            assert not slots.give_back(slot.number)
        elif (slot := slots.take(rng.randrange(1, 100_000))) is not None:
            slots.view(slot)[:] = bytes([slot.number % 251]) * slot.size
            taken[slot.number] = slot
    for number in taken:
        slots.give_back(number)
    assert slots.used_bytes == 0
    whole = slots.take(1 << 20)
    assert whole is not None
    assert slots.take(1) is None
    slots.close()


def test_slot_numbers_of_an_earlier_run_free_nothing(tmp_path) -> None:
    first = Slots(tmp_path / "results-0-1.bin", 1 << 16)
    old = first.take(10)
    first.close()
    second = Slots(tmp_path / "results-0-2.bin", 1 << 16)
    new = second.take(10)
    assert not second.give_back(old.number)
    assert second.give_back(new.number)
    second.close()
    sweep(tmp_path, "0", keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["results-0-2.bin"]


def ref(path: Path | str, offset: int, stamp: bytes = b"aaaaaaaa") -> PanelRef:
    return PanelRef("p", str(path), offset, 1, 4, 0, int.from_bytes(stamp, "little"))


def test_panels_come_from_the_file_that_is_there_now(tmp_path) -> None:
    maps = Maps(tmp_path, 2)
    arena = tmp_path / "arena"
    arena.write_bytes(b"a" * 4096)
    assert bytes(maps.panel(ref(arena, 16)).data) == b"a" * 16
    with arena.open("ab") as file:
        file.write(b"b" * 4096)  # it grew
    assert bytes(maps.panel(ref(arena, 4096)).data) == b"b" * 16
    arena.unlink()
    arena.write_bytes(b"c" * 64)  # another file of the same name
    assert bytes(maps.panel(ref(arena, 0, b"cccccccc")).data) == b"c" * 16
    gone = [
        ref(arena, 60, b"cccccccc"),
        ref(arena, 0),  # another stamp
        ref(tmp_path / "none", 0),
        ref("/etc/passwd", 0),
        ref(f"{tmp_path}/../{tmp_path.name}/arena", 0),
    ]
    for one in gone:
        with pytest.raises(PanelGone):
            maps.panel(one)


def test_an_i8_panel_is_its_elements_and_its_scales(tmp_path) -> None:
    arena = tmp_path / "arena"
    numbers = np.random.default_rng(1).standard_normal((5, 130), dtype=np.float32)
    arena.write_bytes((7).to_bytes(8, "little") + bytes(panel_of(numbers, "i8")))
    scales = 8 + scales_offset(5, 130)
    rows = slice(2, 5)
    found = PanelRef("p", str(arena), 8 + 2 * 130, 3, 130, 0, 7, "i8", scales + 2 * 2 * 4)
    data = Maps(tmp_path, 2).panel(found).data
    assert data.nbytes == found.size == panel_bytes(3, 130, "i8")
    assert (panel_floats(data, 3, 130, "i8") == panel_floats(panel_of(numbers[rows], "i8"), 3, 130, "i8")).all()


def test_the_link_meter_reads_a_simulated_link() -> None:
    meter = LinkMeter()
    rtt_s, bps = 0.05, 1.25e6
    for second in range(5):
        meter.pong(meter.ping(second), second + rtt_s + second * 0.01)
    assert meter.rtt_s == pytest.approx(rtt_s)
    for _ in range(4):  # the kernel takes it all at once; the PONG comes when the last byte has arrived
        meter.chunk(MIB, 10.0)
    nonce = meter.ping(10.001)
    meter.pong(nonce, 10.0 + 4 * MIB / bps + rtt_s)
    assert meter.down_bps == pytest.approx(bps, rel=0.01)
    meter.upload(MIB, MIB / 2.5e5)
    assert meter.up_bps == pytest.approx(2.5e5)
    meter.pong(999, 0.0)  # never sent
    meter.upload(10, 0.0)
    assert meter.up_bps == pytest.approx(2.5e5)
