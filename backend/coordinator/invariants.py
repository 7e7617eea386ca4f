"""What must hold of the book after every event. Read by tests and the simulator; never by the running server.

Tiles cover C exactly once. A tile is in exactly the queue its state says. A lease belongs to a live tile or has ended.
A device has no more leases than its cap, no two of the same tile, and no more bytes than its memory.
"""

from __future__ import annotations

import numpy as np

from backend.coordinator.book import Book
from backend.coordinator.fleet import DeviceRecord
from backend.coordinator.records import GemmRun
from backend.coordinator.transitions import ENDED, HOLDS_SLOT, LeaseState, TileState, tile_state


def check_invariants(book: Book) -> None:
    """Raise AssertionError, saying what does not hold."""
    for gemm in book.gemms.values():
        _check_gemm(gemm)
    for device in book.devices.values():
        _check_device(book, device)
    for number, lease in book.leases.items():
        gemm = lease.tile.gemm
        live = book.gemms.get(gemm.request.gemm) is gemm
        assert live or lease.state in HOLDS_SLOT, f"lease {number} {lease.state.value} outlives its GEMM"
        assert (lease.slot is not None) == (lease.state in HOLDS_SLOT), f"lease {number} {lease.state.value}, slot held"
        if lease.state is LeaseState.OUT:
            assert book.devices.get(lease.owner.device) is lease.owner, f"lease {number} is out on a device that left"
        if lease.state not in ENDED and live:
            assert gemm.tiles.get(lease.tile.number) is lease.tile, f"lease {number} without a tile"


def _check_gemm(gemm: GemmRun) -> None:
    done = 0
    queued: dict[str, int] = {}
    for tile in gemm.tiles.values():
        states = [lease.state for lease in tile.leases]
        assert tile.state is tile_state(states), f"tile {tile.number} is {tile.state.value} with leases {states}"
        assert states.count(LeaseState.ACCEPTED) + states.count(LeaseState.STORING) <= 1, f"tile {tile.number} twice"
        in_queue = tile.number in gemm.queues.get(tile.share, {})
        assert in_queue == (tile.state is TileState.READY), f"tile {tile.number} {tile.state.value}, queued {in_queue}"
        assert (tile.number in gemm.leased) == (tile.state is TileState.LEASED), f"tile {tile.number} filed wrongly"
        done += tile.state is TileState.DONE
        if in_queue:
            queued[tile.share] = queued.get(tile.share, 0) + tile.flop
    assert queued == gemm.queued_flop, f"queued FLOP {gemm.queued_flop}, should be {queued}"
    assert sum(len(queue) for queue in gemm.queues.values()) + done <= len(gemm.tiles), "queues hold tiles twice"
    assert gemm.remaining == len(gemm.tiles) - done, f"{gemm.remaining} tiles remain, should be one less per done"
    assert not gemm.planned or gemm.remaining > 0, "a GEMM without open tiles has not ended"
    if gemm.planned and gemm.cuts != gemm.cuts_checked:
        _check_cover(gemm)
        gemm.cuts_checked = gemm.cuts


def _check_cover(gemm: GemmRun) -> None:
    borders = sorted({k for tile in gemm.tiles.values() for k in tile.rect.k_run(gemm.shape)})
    count = np.zeros((gemm.shape.batch, gemm.shape.m, gemm.shape.n, len(borders) - 1), dtype=np.uint8)
    for tile in gemm.tiles.values():
        rect = tile.rect
        k0, k1 = (borders.index(k) for k in rect.k_run(gemm.shape))
        count[rect.b0 : rect.b1, rect.m0 : rect.m1, rect.n0 : rect.n1, k0:k1] += 1
        assert rect.batch == 1 or (rect.m, rect.n) == (gemm.shape.m, gemm.shape.n), f"{rect} is not one run of rows"
    assert bool((count == 1).all()), "tiles do not cover C exactly once"


def _check_device(book: Book, device: DeviceRecord) -> None:
    name, limits = device.device, book.limits
    assert len(device.out) <= limits.leases_per_device_max, f"{name} has {len(device.out)} leases"
    tiles = {id(lease.tile) for lease in device.out.values()}
    assert len(tiles) == len(device.out), f"{name} has two leases of one tile"
    assert device.held_bytes == sum(device.held.values()), f"{name} holds {device.held_bytes} bytes, miscounted"
    assert device.used.keys() == device.held.keys(), f"{name} holds panels of no step"
    assert device.pinned() <= device.held.keys(), f"{name} works on panels it does not hold"
    over = device.memory_bytes - device.memory_offered - device.free_bytes()
    assert over <= 0, f"{name}: memory over by {over} bytes"
    assert not (device.barred and device.out), f"{name} is barred and has leases"
    for number, lease in device.out.items():
        assert lease.state is LeaseState.OUT and lease.owner is device, f"lease {number} of {name} is not out"
    first = next(iter(device.out.values()), None)
    assert first is None or first.started_s is not None, f"{name}: no lease of it runs"
    for lease in device.unacknowledged.values():
        assert lease.state in HOLDS_SLOT or lease.state is LeaseState.OUT, f"{name} keeps a result nobody waits for"
