"""The sans-I/O session: every frame a server may send, in orders that sockets rarely give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileweave.protocol import (
    CHUNK_BYTES_MAX,
    FRAME_BYTES_MAX,
    Ack,
    Bye,
    Drop,
    Fail,
    Hello,
    Lease,
    Limits,
    Message,
    Need,
    Panel,
    Ping,
    Pong,
    Profile,
    ProtocolError,
    Result,
    Revoke,
    Status,
    Term,
    Welcome,
    chunks,
    decode,
    encode,
)
from tileweave.volunteer.session import Session, Task

M = TypeVar("M")
MEMORY = 1 << 20
LIMITS = Limits(
    frame_bytes_max=FRAME_BYTES_MAX,
    panel_bytes_max=8 << 20,
    result_bytes_max=8 << 20,
    leases_max=4,
    ping_s=2.0,
    silence_s_max=6.0,
)
WELCOME = Welcome(device="d-1", name="quiet-otter", limits=LIMITS, secret="s" * 20)


def drain(session: Session) -> list[Message]:
    frames = iter(session.next_frame, None)
    return [decode(frame)[0] for frame in frames]


def only(messages: list[Message], kind: type[M]) -> list[M]:
    return [message for message in messages if isinstance(message, kind)]


def give(session: Session, *messages: Message) -> None:
    for message in messages:
        session.received(encode(message), 0.0)


def give_panel(session: Session, panel: str, rows: int, k: int, upto: int | None = None) -> None:
    size = rows * k * 4
    for offset, length in chunks(size):
        if upto is None or offset < upto:
            head = Panel(panel=panel, rows=rows, columns=k, offset=offset, size=size)
            session.received(encode(head, bytes(length)), 0.0)


def lease(number: int, m: int = 8, n: int = 8, k: int = 16, a: str = "a", b: str = "b", batch: int = 1) -> Lease:
    return Lease(lease=number, job="job-1", batch=batch, m=m, n=n, terms=[Term(k=k, a=a, b=b)], deadline_s=9.0)


def fresh(memory: int = MEMORY) -> Session:
    return Session(Hello(client="test/1", profile=Profile(), name="otter"), memory)


@pytest.fixture
def session() -> Session:
    """Welcomed, nothing else said."""
    session = fresh()
    session.connected(0.0)
    give(session, WELCOME)
    drain(session)
    return session


def task_of(session: Session) -> Task:
    task = session.next_task()
    assert task is not None
    return task


def test_joins_and_remembers_who_it_is() -> None:
    session = fresh()
    session.connected(0.0)
    (hello,) = drain(session)
    assert hello == Hello(client="test/1", profile=Profile(), name="otter")
    give(session, WELCOME)
    assert drain(session) == [Status(state="ready", capacity_bytes=MEMORY)]
    assert session.identity == ("d-1", "s" * 20, "quiet-otter")
    session.disconnected()
    session.connected(1.0)
    (again,) = drain(session)
    assert isinstance(again, Hello)
    assert (again.device, again.secret, again.name) == session.identity
    give(session, msgspec.structs.replace(WELCOME, secret=None))
    assert session.identity[1] == "s" * 20, "WELCOME sends the secret once; it is kept"


def test_a_lease_waits_for_its_panels_and_its_result_for_the_ack(session: Session) -> None:
    give(session, lease(1))
    assert [need.panel for need in only(drain(session), Need)] == ["a", "b"]
    give_panel(session, "a", 8, 16)
    assert session.next_task() is None
    give_panel(session, "b", 8, 16)
    task = task_of(session)
    assert {name: (held.rows, held.columns) for name, held in task.panels.items()} == {"a": (8, 16), "b": (8, 16)}
    session.computed(task, memoryview(bytes(256)), 0.5)
    assert drain(session) == [Result(lease=1, job="job-1", seconds=0.5, offset=0, size=256)]
    assert session.load == (0, 0, 1)
    give(session, Ack(lease=1, job="job-1", verdict="accepted", flop=2048))
    assert session.load == (0, 0, 0)
    assert (session.tally.flop, session.tally.verdicts["accepted"]) == (2048, 1)


def test_panels_in_flight_are_not_asked_for() -> None:
    session = fresh(8 << 20)
    session.connected(0.0)
    give(session, WELCOME)
    give_panel(session, "a", 512, 1024, upto=1)
    give_panel(session, "b", 8, 1024)
    give(session, lease(1, m=512, k=1024))
    assert only(drain(session), Need) == []


def test_a_chunk_at_offset_0_begins_a_panel_anew(session: Session) -> None:
    give(session, lease(1, m=64))
    give_panel(session, "b", 8, 16)
    head = Panel(panel="a", rows=64, columns=16, offset=0, size=4096)
    for payload in (bytes([1]) * 2048, bytes([2]) * 2048):
        session.received(encode(head, payload), 0.0)
    session.received(encode(msgspec.structs.replace(head, offset=2048), bytes([2]) * 2048), 0.0)
    assert bytes(task_of(session).panels["a"].data) == bytes([2]) * 4096


def test_panels_may_interleave(session: Session) -> None:
    sizes = {"a": 256 * 1024 * 4, "b": 8 * 1024 * 4}
    heads = [
        (Panel(panel=name, rows=size // 4096, columns=1024, offset=half * size // 2, size=size), size // 2)
        for half in (0, 1)
        for name, size in sizes.items()
    ]
    session = fresh(8 << 20)
    session.connected(0.0)
    give(session, WELCOME)
    for head, length in heads:
        session.received(encode(head, bytes(length)), 0.0)
    give(session, lease(1, m=256, n=8, k=1024))
    assert session.next_task() is not None


def test_results_go_again_after_a_reconnect_until_answered(session: Session) -> None:
    give_panel(session, "a", 8, 16)
    give_panel(session, "b", 8, 16)
    give(session, lease(1), lease(2), lease(3))
    first, second = task_of(session), task_of(session)
    session.computed(first, memoryview(bytes(256)), 0.1)
    drain(session)
    session.disconnected()
    session.computed(second, memoryview(bytes(256)), 0.1)  # finished between two connections
    session.connected(5.0)
    (hello,) = drain(session)
    assert isinstance(hello, Hello)
    assert hello.leases == [1, 2]
    assert set(hello.panels) == {"a", "b"}
    assert session.load == (0, 0, 2), "lease 3 was not started: the server has given it to another"
    give(session, WELCOME)
    assert [result.lease for result in only(drain(session), Result)] == [1, 2]
    give(session, Ack(lease=1, job="job-1", verdict="late"), Ack(lease=2, job="job-1", verdict="duplicate"))
    session.disconnected()
    session.connected(9.0)
    assert [hello.leases for hello in only(drain(session), Hello)] == [[]]


def test_a_result_that_hello_did_not_list_is_dropped(session: Session) -> None:
    give_panel(session, "a", 8, 16)
    give_panel(session, "b", 8, 16)
    give(session, lease(1))
    task = task_of(session)
    session.disconnected()
    session.connected(5.0)
    give(session, WELCOME)
    session.computed(task, memoryview(bytes(256)), 0.1)
    assert only(drain(session), Result) == []
    assert session.load == (0, 0, 0)


def test_pong_goes_between_two_chunks_of_a_result(session: Session) -> None:
    give_panel(session, "a", 8, 16)
    give_panel(session, "b", 8, 16)
    give(session, lease(1))
    session.computed(task_of(session), memoryview(bytes(3 * CHUNK_BYTES_MAX)), 0.1)
    session.next_frame()
    give(session, Ping(nonce=77))
    frame = session.next_frame()
    assert frame is not None and decode(frame)[0] == Pong(nonce=77)
    assert [result.offset for result in only(drain(session), Result)] == [CHUNK_BYTES_MAX, 2 * CHUNK_BYTES_MAX]


@pytest.mark.parametrize("word", [Revoke(job="job-1", leases=[1]), Ack(lease=1, job="job-1", verdict="late")])
def test_revoked_or_answered_work_stops_where_it_is(session: Session, word: Message) -> None:
    give(session, lease(1))
    drain(session)
    give(session, word)  # waiting
    give_panel(session, "a", 8, 16)
    give_panel(session, "b", 8, 16)
    assert session.next_task() is None
    give(session, lease(1))
    task = task_of(session)
    give(session, word)  # being computed
    session.computed(task, memoryview(bytes(256)), 0.1)
    assert only(drain(session), Result) == []
    give(session, lease(1))
    session.computed(task_of(session), memoryview(bytes(3 * CHUNK_BYTES_MAX)), 0.1)
    session.next_frame()
    give(session, word)  # being sent
    assert only(drain(session), Result) == []
    assert session.load == (0, 0, 0)


def test_drop_frees_memory(session: Session) -> None:
    give_panel(session, "a", 8, 16)
    give_panel(session, "b", 4, 16)
    assert session._panels.bytes_held == 12 * 16 * 4
    give(session, Drop(panels=["a", "never-held"]))
    assert session._panels.bytes_held == 4 * 16 * 4
    give(session, lease(1, n=4))
    assert [need.panel for need in only(drain(session), Need)] == ["a"]


def test_the_least_recently_used_panel_makes_room() -> None:
    session = fresh(memory=3 * 1024)
    session.connected(0.0)
    give(session, WELCOME)
    for panel in ("p1", "p2", "p3"):
        give_panel(session, panel, 16, 16)
    give_panel(session, "p1", 16, 16)  # sent again: now the latest
    give_panel(session, "p4", 16, 16)
    assert session._panels.ids() == ["p4", "p1", "p3"]
    assert session._panels.bytes_held == 3 * 1024


def test_a_lease_in_hand_keeps_its_panels_and_one_without_room_fails() -> None:
    session = fresh(memory=3 * 1024 + 512)
    session.connected(0.0)
    give(session, WELCOME)
    drain(session)
    give_panel(session, "a", 16, 16)
    give_panel(session, "b", 16, 16)
    give(session, lease(1, m=16, n=16))
    give_panel(session, "a2", 16, 16)
    give(session, lease(2, m=16, n=16, a="a2", b="b2"))
    give_panel(session, "b2", 16, 16)
    (fail,) = only(drain(session), Fail)
    assert (fail.lease, fail.code) == (2, "memory")
    assert task_of(session).lease.lease == 1


def test_chunks_of_a_panel_without_room_are_passed_over() -> None:
    session = fresh(memory=1 << 20)
    session.connected(0.0)
    give(session, WELCOME)
    give_panel(session, "big", 1024, 1024)
    assert session._panels.bytes_held == 0
    give_panel(session, "a", 8, 16)
    assert session._panels.ids() == ["a"]


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (lease(1, m=1000, n=1000, k=1000), "memory"),
        (lease(1, m=9), "panel"),
        (lease(1, k=17), "panel"),
        (lease(1, batch=2), "panel"),
    ],
)
def test_a_lease_it_cannot_compute_is_given_back(session: Session, bad: Lease, code: str) -> None:
    give_panel(session, "a", 8, 16)
    give_panel(session, "b", 8, 16)
    give(session, bad)
    assert session.next_task() is None
    (fail,) = only(drain(session), Fail)
    assert (fail.lease, fail.code) == (1, code)


def test_more_leases_than_agreed_are_given_back(session: Session) -> None:
    give(session, *(lease(number) for number in range(6)))
    assert [fail.lease for fail in only(drain(session), Fail)] == [4, 5]


def test_kernel_failure_is_told(session: Session) -> None:
    give_panel(session, "a", 8, 16)
    give_panel(session, "b", 8, 16)
    give(session, lease(1))
    session.failed(task_of(session), "kernel", "x" * 900)
    (fail,) = only(drain(session), Fail)
    assert (fail.code, len(fail.message)) == ("kernel", 500)


def test_silence_is_counted_from_the_last_frame() -> None:
    session = fresh()
    session.connected(10.0)
    assert session.silence_left_s(12.0) == 8.0
    session.received(encode(WELCOME), 13.0)
    assert session.silence_left_s(15.0) == 4.0
    session.received(encode(Ping(nonce=1)), 18.0)
    assert session.silence_left_s(25.0) == -1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: WELCOME,
        lambda: Hello(client="x", profile=Profile()),
        lambda: Status(state="ready"),
        lambda: Need(panel="a", lease=1),
    ],
)
def test_what_a_server_may_not_say_is_a_protocol_error(session: Session, make: Callable[[], Message]) -> None:
    with pytest.raises(ProtocolError):
        give(session, make())


def test_nothing_but_welcome_comes_first() -> None:
    session = fresh()
    session.connected(0.0)
    give(session, Ping(nonce=1))
    with pytest.raises(ProtocolError, match="WELCOME comes first"):
        give(session, lease(1))
    give(session, Bye(code="busy", retry_s=3.0))
    assert session.bye == Bye(code="busy", retry_s=3.0)


def test_a_panel_over_the_limit_or_out_of_order_is_a_protocol_error(session: Session) -> None:
    with pytest.raises(ProtocolError, match="WELCOME allowed"):
        session.received(encode(Panel(panel="a", rows=4096, columns=1024, offset=0, size=1 << 24), bytes(16)), 0.0)
    with pytest.raises(ProtocolError, match="first chunk"):
        session.received(encode(Panel(panel="a", rows=8, columns=16, offset=16, size=512), bytes(16)), 0.0)


panel_ids = st.sampled_from(["a", "b", "c", "d"])
numbers = st.integers(0, 5)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("panel"), panel_ids, st.integers(1, 12)),
        st.tuples(st.just("half"), panel_ids, st.integers(1, 12)),
        st.tuples(st.just("lease"), numbers, st.tuples(panel_ids, panel_ids, st.integers(1, 12), st.integers(1, 12))),
        st.tuples(st.just("drop"), panel_ids, st.none()),
        st.tuples(st.just("revoke"), numbers, st.none()),
        st.tuples(st.just("ack"), numbers, st.none()),
        st.tuples(st.just("take"), st.none(), st.none()),
        st.tuples(st.just("done"), st.none(), st.none()),
        st.tuples(st.just("drain"), st.integers(0, 3), st.none()),
        st.tuples(st.just("reconnect"), st.none(), st.none()),
    ),
    max_size=60,
)


@given(steps)
def test_any_order_of_events_keeps_the_books(events: list[tuple[str, Any, Any]]) -> None:
    """Whatever comes in whatever order: memory stays within bounds and no tile is in two places at once."""
    session = fresh(memory=3000)
    session.connected(0.0)
    give(session, WELCOME)
    taken: list[Task] = []
    for event, what, more in events:
        match event:
            case "panel":
                session._panels.drop([what])
                give_panel(session, what, more, 16)
            case "half":
                session._panels.drop([what])
                half = Panel(panel=what, rows=more, columns=16, offset=0, size=more * 64)
                session.received(encode(half, bytes(more * 32)), 0.0)
            case "lease":
                a, b, m, n = more
                give(session, lease(what, m=m, n=n, a=a, b=b))
            case "drop":
                give(session, Drop(panels=[what]))
            case "revoke":
                give(session, Revoke(job="job-1", leases=[what]))
            case "ack":
                give(session, Ack(lease=what, job="job-1", verdict="late"))
            case "take":
                task = session.next_task()
                if task is not None:
                    (term,) = task.lease.terms
                    assert task.panels[term.a].rows >= task.lease.m
                    assert task.panels[term.b].rows >= task.lease.n
                    taken.append(task)
            case "done" if taken:
                task = taken.pop(0)
                session.computed(task, memoryview(bytes(task.lease.m * task.lease.n * 4)), 0.1)
            case "drain":
                for _ in range(what):
                    session.next_frame()
            case "reconnect":
                session.disconnected()
                session.connected(0.0)
                give(session, WELCOME)
        store = session._panels
        held = sum(len(panel.data) for panel in store._held.values())
        arriving = sum(whole.size_max for whole in store._arriving.values())
        assert store.bytes_held == held + arriving <= 3000
        assert session.load[1] <= len(taken)
    session.disconnected()
    assert session.next_frame() is None
