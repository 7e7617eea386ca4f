"""The script's socket: answers reach whoever waits, and every way to lose the coordinator is a clear error."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tileweave.script import wire
from tileweave.script.channel import EXIT_CANCELLED, Channel, GemmError, JobCancelled, JobLost

REGION = wire.Region("f", 0, 4)
PART = wire.Part(REGION, "content", 0, 1)


def gemm(number: int) -> wire.GemmRequest:
    return wire.GemmRequest(id=number, step=1, batch=1, m=1, n=1, k=1, a=[PART], b=[PART], c=REGION)


def connect(peer: Any) -> Channel:
    channel, welcome = Channel.connect(peer.path, peer.token, os.getpid())
    assert welcome == peer.welcome
    return channel


def scripted(peer: Any, replies: Callable[[wire.FromScript], list[Any] | None]) -> Channel:
    """Connected to a peer that answers all but the hello as `replies` says."""
    peer.answer = lambda m: peer.default_answer(m) if isinstance(m, wire.ScriptHello) else replies(m)
    return connect(peer)


def test_hello_names_the_token_and_the_process(start_peer: Any) -> None:
    peer = start_peer(config={"width": 8})
    channel = connect(peer)
    assert peer.messages == [wire.ScriptHello(token="secret", pid=os.getpid())]
    channel.close()


def test_answers_in_any_order_reach_the_threads_that_wait_for_them(start_peer: Any) -> None:
    held: list[wire.FromScript] = []

    def replies(message: wire.FromScript) -> list[Any]:
        held.append(message)
        if len(held) < 8:
            return []
        return [wire.Product(id=m.id) for m in reversed(held) if isinstance(m, wire.GemmRequest)]

    channel = scripted(start_peer(), replies)
    done: list[int] = []

    def one(number: int) -> None:
        channel.send(gemm(number))
        channel.wait_product(number)
        done.append(number)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(done) == list(range(8))
    channel.close()


def test_a_gemm_that_cannot_be_computed_says_why(start_peer: Any) -> None:
    channel = scripted(start_peer(), lambda m: [wire.GemmFailed(id=m.id, reason="operands are not finite")])
    channel.send(gemm(5))
    with pytest.raises(GemmError, match="operands are not finite"):
        channel.wait_product(5)
    channel.close()


def test_frames_may_come_in_pieces(start_peer: Any) -> None:
    peer = start_peer()

    def replies(message: wire.FromScript) -> list[Any]:
        for byte in len(body := msgspec.msgpack.encode(wire.Product(id=1))).to_bytes(4, "little") + body:
            peer.send_raw(bytes([byte]))
        return [wire.Recorded(step=9)]

    channel = scripted(peer, replies)
    channel.send(gemm(1))
    channel.wait_product(1)
    channel.wait_recorded(9)
    channel.close()


def test_cancel_ends_a_wait_and_is_an_exit_that_except_exception_lets_through(start_peer: Any) -> None:
    channel = scripted(start_peer(), lambda m: [wire.Control(what="cancel")])
    channel.send(gemm(1))
    with pytest.raises(JobCancelled) as caught:
        channel.wait_product(1)
    assert caught.value.code == EXIT_CANCELLED
    assert not isinstance(caught.value, Exception)
    with pytest.raises(JobCancelled):  # and again, should a script have swallowed it
        channel.poll()
    channel.close()


def test_poll_takes_what_came_and_does_not_wait(start_peer: Any) -> None:
    peer = start_peer()
    channel = scripted(peer, lambda m: [wire.Recorded(step=4), wire.Product(id=1)])
    assert channel.poll() == -1
    channel.send(gemm(1))
    channel.wait_product(1)
    assert channel.poll() == 4
    channel.close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "closed the connection"),
        ((wire.FRAME_BYTES_MAX + 1).to_bytes(4, "little"), "announced a frame of 1,048,577 bytes"),
        (b"\x04\0\0\0{}{}", "something else than a message"),
        (b"\x03\0\0\0\x81\xa1t", "something else than a message"),
    ],
)
def test_a_coordinator_that_dies_or_speaks_nonsense_is_lost(start_peer: Any, data: bytes, words: str) -> None:
    peer = start_peer()

    def replies(message: wire.FromScript) -> None:
        peer.send_raw(data)

    channel = scripted(peer, replies)
    channel.send(gemm(1))
    with pytest.raises(JobLost, match=words):
        channel.wait_product(1)
    with pytest.raises(JobLost, match=words):
        channel.poll()
    peer.join()
    with pytest.raises(JobLost, match="broke"):
        channel.send(gemm(2))
    channel.close()


def test_nobody_listening_or_a_wrong_token_is_a_lost_job(start_peer: Any, tmp_path: Path) -> None:
    with pytest.raises(JobLost, match="no coordinator answers"):
        Channel.connect(str(tmp_path / "nothing"), "t", 1)
    with pytest.raises(JobLost, match="closed the connection"):
        Channel.connect(start_peer().path, "wrong", 1)


def test_a_message_beyond_the_frame_limit_is_refused_here(start_peer: Any) -> None:
    channel = connect(start_peer())
    with pytest.raises(ValueError, match="at most 1,048,576"):
        channel.send(wire.SampleText(step=1, text="x" * (1 << 20)))
    channel.close()
