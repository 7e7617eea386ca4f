"""The device socket of a real gateway process: who is let in, the life of a tile, and misbehaviour."""

from __future__ import annotations

import shutil
import signal
import socket as sockets
import time
from pathlib import Path

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from backend.switchboard.messages import (
    Acknowledge,
    Assign,
    Census,
    DeviceOffline,
    DeviceOnline,
    DropPanels,
    GatewayUp,
    Kick,
    LeaseFailed,
    PanelRef,
    Push,
    Release,
    ResultReady,
    RevokeLeases,
)
from tileweave.protocol import (
    Ack,
    Bye,
    Fail,
    Hello,
    Lease,
    Need,
    Panel,
    Ping,
    Pong,
    Profile,
    Result,
    Status,
    Term,
    chunks,
    decode,
    encode,
)


def online(served, device: str) -> DeviceOnline:
    found = served.world.wait_until(
        f"{device} to be announced",
        lambda: [item for item in served.world.told_allocator() if getattr(item, "device", "") == device],
    )
    return found[0]


def push(served, peer, job: str, lease: int, m: int = 4, n: int = 6, k: int = 32, path: Path | None = None,
         name: str = "1.1") -> Push:  # fmt: skip
    """A lease with its panels in an arena of the run directory; A is all 1, B^T all 2."""
    path = path or served.world.settings.run_dir / "arena"
    if not path.exists():
        numbers = np.full(m * k, 1, np.float32).tobytes() + np.full(n * k, 2, np.float32).tobytes()
        path.write_bytes((1).to_bytes(8, "little") + numbers)
    terms = [Term(k=k, a=f"{name}.a", b=f"{name}.b")]
    message = Push(
        device=peer.welcome.device,
        connection=online(served, peer.welcome.device).connection,
        lease=Lease(lease=lease, job=job, batch=1, m=m, n=n, terms=terms, deadline_s=60),
        panels=[
            PanelRef(f"{name}.a", str(path), 8, m, k, 0, 1),
            PanelRef(f"{name}.b", str(path), 8 + m * k * 4, n, k, 0, 1),
        ],
    )
    served.world.tell_gateway(message)
    return message


def returning(served, lease: int):
    """A device that comes back with a finished result."""
    made = served.device().welcome
    return served.device(device=made.device, secret=made.secret, leases=[lease])


def closed_with(peer, code: str, reason: str = "") -> None:
    bye = peer.expect("Bye")
    assert bye.code == code
    assert reason in bye.reason
    with pytest.raises(ConnectionClosed):
        peer.socket.recv(20)


def test_a_tile_goes_out_and_its_product_comes_back(make_served) -> None:
    served = make_served()
    peer = served.device(name="  Ada\x00 <b>")
    world, device = served.world, peer.welcome.device
    assert peer.welcome.name == "Ada <b>"
    job = world.running_job().id
    connection = online(served, device).connection
    world.tell_gateway(Assign(device=device, connection=connection, job=job, epoch=1))
    push(served, peer, job, 7)
    frames = []
    while True:
        message, payload = peer.receive()
        if not isinstance(message, Ping):
            frames.append((type(message).__name__, payload))
        if isinstance(message, Lease):
            break
    assert [name for name, _ in frames] == ["Panel", "Panel", "Lease"]
    assert frames[0][1] == np.full(4 * 32, 1, np.float32).tobytes()
    assert frames[1][1] == np.full(6 * 32, 2, np.float32).tobytes()

    product = np.full(24, 64, np.float32).tobytes()
    for offset in (0, 48):  # two chunks
        peer.send(Result(lease=7, job=job, seconds=0.5, offset=offset, size=96), product[offset : offset + 48])
    ready = world.wait_told(job, ResultReady)
    assert (ready.lease, ready.seconds, ready.connection, ready.slot.size) == (7, 0.5, connection, 96)
    with Path(ready.slot.path).open("rb") as file:
        file.seek(ready.slot.offset)
        assert file.read(96) == product
    ack = Ack(lease=7, job=job, verdict="accepted", flop=1536)
    world.tell_gateway(Acknowledge(device=device, connection=connection, ack=ack), Release(slots=[ready.slot.slot]))
    assert peer.expect("Ack") == ack

    # Sent once more it is a duplicate; a lease never held is late. Both are final, and reach no coordinator.
    peer.send(Result(lease=7, job=job, seconds=0.5, offset=0, size=96), product)
    assert peer.expect("Ack").verdict == "duplicate"
    peer.send(Result(lease=8, job=job, seconds=0.5, offset=0, size=96), product)
    assert peer.expect("Ack").verdict == "late"
    # The panels are held: the next lease goes out alone.
    push(served, peer, job, 9)
    while isinstance(message := peer.receive()[0], Ping):
        pass
    assert isinstance(message, Lease)
    assert len([item for item in world.told_coordinator(job) if isinstance(item, ResultReady)]) == 1


def test_a_result_of_the_wrong_length_is_reported_and_takes_no_slot(make_served) -> None:
    served = make_served()
    peer = served.device()
    job = served.world.running_job().id
    push(served, peer, job, 7)
    peer.expect("Lease")
    peer.send(Result(lease=7, job=job, seconds=0.5, offset=0, size=92), bytes(92))
    failed = served.world.wait_told(job, LeaseFailed)
    assert failed.bad
    assert "expected 96" in failed.message
    # The connection lives on, and the length of the next lease is right.
    push(served, peer, job, 8)
    peer.expect("Lease")
    peer.send(Result(lease=8, job=job, seconds=0.5, offset=0, size=96), bytes(96))
    assert served.world.wait_told(job, ResultReady).lease == 8


def test_fail_needs_and_revoke(make_served) -> None:
    served = make_served()
    peer = served.device()
    world, device = served.world, peer.welcome.device
    job = world.running_job().id
    sent = push(served, peer, job, 7)
    peer.expect("Lease")
    wanted = sent.panels[0].panel
    peer.send(Need(panel=wanted, lease=7))
    while isinstance(message := peer.receive()[0], Ping):
        pass
    assert message.panel == wanted
    peer.send(Fail(lease=7, job=job, code="memory", message="no room"))
    failed = world.wait_told(job, LeaseFailed)
    assert (failed.code, failed.message, failed.bad) == ("memory", "no room", False)

    sent = push(served, peer, job, 8)
    peer.expect("Lease")
    world.tell_gateway(RevokeLeases(device=device, connection=sent.connection, job=job, leases=[8]))
    assert peer.expect("Revoke").leases == [8]
    peer.send(Result(lease=8, job=job, seconds=0.1, offset=0, size=96), bytes(96))  # crossed it on the way
    assert peer.expect("Ack").verdict == "late"
    world.tell_gateway(DropPanels(panels=[wanted, "1.9.a.0"], device=device, connection=sent.connection))
    assert peer.expect("Drop").panels == [wanted]


def test_a_vanished_panel_fails_its_lease_and_nothing_else(make_served) -> None:
    served = make_served()
    peer = served.device()
    job = served.world.running_job().id
    gone = served.world.settings.run_dir / "gone" / "arena"
    gone.parent.mkdir()
    gone.write_bytes(bytes(4))
    push(served, peer, job, 7, path=gone)
    failed = served.world.wait_told(job, LeaseFailed)
    assert (failed.lease, failed.code, failed.bad) == (7, "panel", False)
    shutil.rmtree(gone.parent)
    push(served, peer, job, 8)
    assert peer.expect("Lease").lease == 8


def test_a_panel_is_never_completed_out_of_a_source_that_was_overwritten(make_served) -> None:
    """The script has its product and puts something else in the operand's place while a slow device still reads it."""
    served = make_served()
    job = served.world.running_job().id
    arena = served.world.settings.run_dir / "arena"
    stamp, size = (1).to_bytes(8, "little"), 60 << 20  # more than the sockets between us and the client's queue hold
    raw = sockets.socket()
    raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 1 << 16)
    raw.connect(("127.0.0.1", served.port))
    peer = served.device_on(served.socket(sock=raw))
    arena.write_bytes(stamp + bytes([1]) * (size + 1024))
    push(served, peer, job, 7, m=size // 256, n=4, k=64, path=arena)
    first, _ = peer.receive()
    while not isinstance(first, Panel):
        first, _ = peer.receive()
    with arena.open("r+b") as file:
        file.write(bytes(8))  # freed
        file.write(bytes([2]) * size)
    assert peer.expect("Drop").panels == [first.panel]
    assert served.world.wait_told(job, LeaseFailed).lease == 7
    with arena.open("r+b") as file:
        file.write(stamp + bytes([3]) * size)
    push(served, peer, job, 8, m=size // 256, n=4, k=64, path=arena)
    got = bytearray()
    while not isinstance((received := peer.receive())[0], Lease):
        message, payload = received
        if isinstance(message, Ping):
            peer.send(Pong(nonce=message.nonce))
        if isinstance(message, Panel) and message.panel == first.panel:
            assert message.offset == len(got)
            got += payload
    assert bytes(got) == bytes([3]) * size


def test_a_result_is_sent_again_after_the_gateway_was_killed(make_served) -> None:
    served = make_served()
    peer = served.device()
    job = served.world.running_job().id
    push(served, peer, job, 7)
    peer.expect("Lease")
    served.process.kill()
    served.process.wait()
    served.start()
    again = served.device(device=peer.welcome.device, secret=peer.welcome.secret, leases=[7])
    assert again.welcome.device == peer.welcome.device
    assert again.welcome.secret is None
    again.send(Result(lease=7, job=job, seconds=0.5, offset=0, size=96), bytes(96))
    ready = served.world.wait_told(job, ResultReady)
    assert (ready.lease, ready.device) == (7, peer.welcome.device)
    ups = [item for item in served.world.told_coordinator(job) if isinstance(item, GatewayUp)]
    assert len(ups) == 1  # the second start; at the first there was no job
    assert len({item.incarnation for item in served.world.told_allocator() if isinstance(item, GatewayUp)}) == 2


def test_results_of_an_ended_job_are_answered_late(make_served) -> None:
    served = make_served()
    peer = served.device()
    world = served.world
    job = world.running_job().id
    push(served, peer, job, 7)
    peer.expect("Lease")
    peer.send(Result(lease=7, job=job, seconds=0.5, offset=0, size=96), bytes(96))
    world.wait_told(job, ResultReady)
    world.jobs.request_cancel(job, 0.0)  # its coordinator dies without a word
    ack = peer.expect("Ack")
    assert (ack.lease, ack.verdict) == (7, "late")
    again = returning(served, 3)
    again.send(Result(lease=3, job="never", seconds=0.5, offset=0, size=96), bytes(96))
    assert again.expect("Ack").verdict == "late"


def test_a_bad_first_frame_gets_a_reason(make_served) -> None:
    served = make_served()
    for frame, code, reason in (
        (b"x", "protocol", "1 bytes"),
        (b"TW\x01" + bytes(13), "reload", "version 1"),
        (b"TW\x02\x63" + bytes(12), "protocol", "unknown message number 99"),
        (bytes((1 << 20) + 1), "protocol", "1048577 bytes"),
        ("text", "protocol", "text message"),
        (encode(Status(state="ready")), "protocol", "expected HELLO"),
    ):
        connection = served.socket()
        connection.send(frame)
        bye, _ = decode(connection.recv(20))
        assert isinstance(bye, Bye)
        assert bye.code == code
        assert reason in bye.reason
        with pytest.raises(ConnectionClosed):
            connection.recv(20)


def test_misbehaviour_after_hello_ends_the_connection_with_a_reason(make_served) -> None:
    served = make_served(device_messages_per_s_max=50.0)
    hello = Hello(client="test", profile=Profile())
    peer = served.device()
    peer.send(hello)
    closed_with(peer, "protocol", "HELLO")

    peer = served.device()
    peer.socket.send(b"TW\x02\x63" + bytes(12))
    closed_with(peer, "protocol", "unknown message")

    peer = returning(served, 1)
    peer.send(Result(lease=1, job="j", seconds=0, offset=0, size=1 << 30), bytes(1 << 16))
    closed_with(peer, "protocol", "expected at most")

    peer = returning(served, 1)
    job = served.world.running_job().id
    peer.send(Result(lease=1, job=job, seconds=0, offset=0, size=1 << 18), bytes(1 << 16))
    peer.send(Result(lease=1, job=job, seconds=0, offset=0, size=1 << 18), bytes(1 << 16))
    closed_with(peer, "protocol", "expected byte 65536")

    peer = served.device()
    for nonce in range(200):
        peer.send(Ping(nonce=nonce))
    while (message := peer.receive()[0]) and not isinstance(message, Bye):
        pass
    assert "messages a second" in message.reason


def test_origins_addresses_and_quarantine(make_served) -> None:
    served = make_served(devices_per_address_max=3, allowed_origins=["https://tiles.example"])
    with pytest.raises(InvalidStatus) as refused:
        served.socket(origin="https://evil.example")
    assert refused.value.response.status_code == 403
    own = served.socket(origin=f"http://127.0.0.1:{served.port}")
    named = served.socket(origin="https://tiles.example")
    peer = served.device()
    for _ in range(50):
        connection = served.socket()
        bye, _ = decode(connection.recv(20))
        assert (bye.code, bye.retry_s > 0) == ("busy", True)
        connection.close()
    own.close()
    named.close()
    bad = peer.welcome
    job = served.world.running_job().id
    served.world.ledger.blame(bad.device, job, "wrong product", time.time())
    connection = served.socket()
    connection.send(encode(Hello(client="test", profile=Profile(), device=bad.device, secret=bad.secret)))
    bye, _ = decode(connection.recv(20))
    assert (bye.code, bye.retry_s > 0) == ("quarantined", True)


def test_credentials_of_another_device_make_a_new_one(make_served) -> None:
    served = make_served()
    first, second = served.device(name="one"), served.device(name="two")
    thief = served.device(device=first.welcome.device, secret=second.welcome.secret)
    assert thief.welcome.device not in (first.welcome.device, second.welcome.device)
    assert thief.welcome.secret is not None


def test_a_device_that_connects_again_replaces_itself(make_served) -> None:
    served = make_served()
    first = served.device()
    second = served.device(device=first.welcome.device, secret=first.welcome.secret)
    closed_with(first, "replaced")
    kick = Kick(device=first.welcome.device, connection="another", code="done", reason="")
    served.world.tell_gateway(kick, Census())  # a stale order hits nobody
    second.send(Ping(nonce=5))
    assert second.expect("Pong").nonce == 5


def test_what_a_device_claims_is_shown_as_its_claim(make_served) -> None:
    served = make_served()
    device = served.device(profile=Profile(kernel="wasm-strict", flops=7e9)).welcome.device
    key = f"tw:dev:{device}"
    shown = served.world.wait_until("the live figures", lambda: served.world.redis.hgetall(key))
    assert (shown[b"kernel"], float(shown[b"claimed_flops"])) == (b'"wasm-strict"', 7e9)
    assert b"measured_flops" not in shown


def test_a_silent_client_is_closed(make_served) -> None:
    served = make_served(ping_s=0.05, silence_s_max=0.3, slot_wait_s_max=0.1)
    peer = served.device()
    closed_with(peer, "silent")
    assert [item for item in served.world.told_allocator() if isinstance(item, DeviceOffline)]


def test_a_client_that_never_reads_is_closed_and_the_others_are_not(make_served) -> None:
    served = make_served(send_stall_s_max=1.0)
    world = served.world
    raw = sockets.socket()
    raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", served.port))
    stuck = served.device_on(served.socket(sock=raw, max_queue=1))
    witness = served.device()
    job = world.running_job().id
    for lease in range(8):  # 8 x 8 MiB; the client library stops reading at one waiting message
        path = world.settings.run_dir / f"arena-{lease}"
        path.write_bytes((1).to_bytes(8, "little") + bytes(8 << 20))
        push(served, stuck, job, lease, m=512, n=512, k=2048, path=path, name=f"p{lease}")
    gone = world.wait_until(
        "the end of the device that does not read",
        lambda: [item for item in world.told_allocator() if isinstance(item, DeviceOffline)],
    )
    assert gone[0].device == stuck.welcome.device
    assert "took nothing" in gone[0].reason
    witness.send(Ping(nonce=1))
    assert witness.expect("Pong").nonce == 1


def test_a_stopping_gateway_says_goodbye(make_served) -> None:
    served = make_served()
    peer = served.device()
    assert served.stop() == -signal.SIGTERM
    bye = peer.expect("Bye")
    assert (bye.code, bye.retry_s > 0) == ("shutdown", True)
    assert [item for item in served.world.told_allocator() if isinstance(item, DeviceOffline)]


def test_upload_slots_that_run_out_send_the_device_back_with_its_result(make_served) -> None:
    served = make_served(slots_bytes_max=1 << 16, slot_wait_s_max=0.2)
    first, second = returning(served, 1), returning(served, 1)
    job = served.world.running_job().id
    first.send(Result(lease=1, job=job, seconds=0, offset=0, size=1 << 16), bytes(1 << 15))
    first.send(Ping(nonce=1))
    first.expect("Pong")
    second.send(Result(lease=1, job=job, seconds=0, offset=0, size=1 << 16), bytes(1 << 15))
    bye = second.expect("Bye")
    assert (bye.code, bye.retry_s > 0) == ("busy", True)
    first.send(Result(lease=1, job=job, seconds=0, offset=1 << 15, size=1 << 16), bytes(1 << 15))
    assert served.world.wait_told(job, ResultReady).device == first.welcome.device


@pytest.mark.parametrize("elements", [4 << 20, 4_220_000, 16 << 20])  # 16 MiB, 16.1 MiB, 64 MiB
def test_large_payloads_arrive_whole(make_served, elements) -> None:
    served = make_served()
    peer = served.device()
    world = served.world
    job = world.running_job().id
    data = np.random.default_rng(1).bytes(elements * 4)
    path = world.settings.run_dir / "large"
    path.write_bytes((1).to_bytes(8, "little") + data + bytes(4 * 4 * 4))
    push(served, peer, job, 7, m=elements // 4, n=4, k=4, path=path)  # a product as large as its panel
    got = bytearray()
    while True:
        message, payload = peer.receive()
        if isinstance(message, Lease):
            break
        if isinstance(message, Panel) and message.panel == "1.1.a":
            assert message.offset == len(got)
            got += payload
    assert bytes(got) == data
    for offset, length in chunks(len(data)):
        chunk = data[offset : offset + length]
        peer.send(Result(lease=7, job=job, seconds=1, offset=offset, size=len(data)), chunk)
    slot = world.wait_told(job, ResultReady).slot
    with Path(slot.path).open("rb") as file:
        file.seek(slot.offset)
        assert file.read(slot.size) == data
