"""Which tile a device gets next: pure choices over the records, no change to them.

In this order: a tile that came back; the next of the device's own share, of the oldest GEMM that has one, since what it
needs was sent there before; the last tile of the share with the most work left (first of all shares whose device is
gone), unless its owner would be done sooner than this device with one tile, which is not asked of a device on trial;
and where no tile waits, a backup of a lease that this device would finish before its holder. A tile that a device
spoiled is not given to it again while another device could take it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from backend.coordinator.fleet import DeviceRecord, MachineLimits
from backend.coordinator.records import RETURNED, GemmRun, LeaseRecord, Tile
from planner.shapes import EXACT, Rect
from planner.tiles import TILE_SECONDS_MAX, fits, split, tile_seconds

STRIP_WORTH = 3.0
"""A tile of a strip is taken from another only where that gains so much: its panels serve more than this GEMM."""

PREFETCH = 2
"""Leases a device may have out and still take tiles of another's share."""


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Choices at one moment over these devices."""

    devices: Mapping[str, DeviceRecord]
    limits: MachineLimits
    now_s: float

    def own_tile(self, gemm: GemmRun, device: DeviceRecord) -> Tile | None:
        """The ready tile of this GEMM that came back, or is next of the device's own share, if any."""
        for share in (RETURNED, device.device):
            for tile in gemm.queues.get(share, {}).values():
                if self._may(tile, device):
                    return tile
        return None

    def others_tile(self, gemm: GemmRun, device: DeviceRecord) -> Tile | None:
        """The ready tile of this GEMM that the device should take of another's share, if any."""
        if len(device.out) >= PREFETCH:
            return None
        trial = device.on_trial(self.limits)
        left_s = {share: self._left_s(gemm, share) for share in gemm.queues if share not in (RETURNED, device.device)}
        for share in sorted(left_s, key=lambda name: (-left_s[name], -gemm.queued_flop[name], name)):
            tiles = gemm.queues[share].values()
            for tile in tiles if left_s[share] == math.inf else reversed(tiles):
                worth = 1.0 if tile.grains == EXACT else STRIP_WORTH
                if self._may(tile, device) and (trial or worth * self.seconds(tile, device) <= left_s[share]):
                    return tile
        return None

    def backup_tile(self, gemm: GemmRun, device: DeviceRecord) -> Tile | None:
        """The tile out on lease that would gain most from a second lease on this idle device, if any."""
        best: tuple[float, Tile] | None = None
        for tile in gemm.leased.values():
            out = tile.out()
            if len(out) >= self.limits.leases_per_tile_max or not self._may(tile, device):
                continue
            if any(lease.owner.device == device.device for lease in out):
                continue
            done_s = min(self.expected_s(lease) for lease in out)
            overdue_s = self.now_s - done_s
            straggles = overdue_s > max(self.limits.backup_s_min, min(lease.predicted_s for lease in out) / 2)
            tried = any(lease.owner.unknown and lease.owner.leases <= self.limits.trials_max for lease in out)
            if not straggles and (tried or done_s - self.now_s <= self.seconds(tile, device)):
                continue  # a trial that is cut short tells nothing
            rank = abs(overdue_s)
            grains = tile.grains
            if (best is None or rank > best[0]) and fits(
                tile.rect, gemm.shape, device.planned(), self.limits.plan, grains
            ):
                best = (rank, tile)
        return None if best is None else best[1]

    def pieces(self, tile: Tile, device: DeviceRecord) -> tuple[Rect, ...]:
        """The tile as this device should get it: whole, or cut into smaller ones where it would not fit or would take
        far too long; empty where nothing of it fits."""
        shape, planned = tile.gemm.shape, device.planned()
        seconds = self.seconds(tile, device)
        if seconds <= 2 * TILE_SECONDS_MAX and fits(tile.rect, shape, planned, self.limits.plan, tile.grains):
            return (tile.rect,)
        return split(tile.rect, shape, planned, self.limits.plan, math.ceil(seconds / TILE_SECONDS_MAX))

    def seconds(self, tile: Tile, device: DeviceRecord) -> float:
        """From sending the tile to the idle device to its result, with the panels that it lacks."""
        new_bytes = device.new_bytes(tile.panels)
        return tile_seconds(tile.rect, tile.gemm.shape, device.planned(), new_bytes, self.limits.plan.lease_seconds)

    def expected_s(self, lease: LeaseRecord) -> float:
        """When the lease's result should be here, behind the earlier leases of its device."""
        at_s = lease.sent_s
        for earlier in lease.owner.out.values():
            at_s = (earlier.started_s if earlier.started_s is not None else at_s) + earlier.predicted_s
            if earlier is lease:
                break
        return at_s

    def able(self, device: DeviceRecord) -> bool:
        """Does the device take work now?"""
        return not device.why_not(self.now_s)

    def _may(self, tile: Tile, device: DeviceRecord) -> bool:
        return device.device not in tile.spoiled or not any(
            other.device not in tile.spoiled and self.able(other) for other in self.devices.values()
        )

    def _left_s(self, gemm: GemmRun, share: str) -> float:
        """Seconds the share's owner needs for what it still has queued; infinite where it takes no work."""
        owner = self.devices.get(share)
        if owner is None or not self.able(owner):
            return math.inf
        flop = gemm.queued_flop[share]
        planned = owner.planned()
        bytes_up = gemm.shape.result_bytes * flop / (2 * gemm.shape.depth)
        leases_s = len(gemm.queues[share]) * self.limits.plan.lease_seconds
        before_s = sum(lease.predicted_s for lease in owner.out.values())
        return before_s + max(flop / planned.flops, bytes_up / planned.up_bps, leases_s)
