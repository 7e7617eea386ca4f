"""The allocator: each connected device serves one job at a time; devices go to jobs by the jobs' weights.

The idea: a pure state machine over the switchboard's messages. After each message the jobs' targets are computed anew
(devices x weight / all weights, whole numbers by largest remainder, at least one each where there are enough), free
devices go to the job that is furthest below its target, and devices move only from a job above its target to one below.
Remainders go to whoever has them already, so that one device coming or going moves at most one other. Between equals
the job with the larger debt is first: the device-seconds it was entitled to and did not get.

Fences: a connection is named in every message, and a device's newer connection replaces the older; `Assign.epoch` only
ever grows, also over restarts of the allocator (the caller gives a start that grows, such as the clock's seconds times
a million); `DeviceJoined.epoch` is the epoch of the coordinator it is meant for, so that the next one may ignore it.
Delivered twice, a message changes nothing. A restarted allocator asks for a census and hears of every connection again.

Left out: the volunteer's own choice of a job, and taking turns where there are fewer devices than jobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from backend.switchboard.messages import (
    Assign,
    Census,
    DeviceJoined,
    DeviceLeft,
    DeviceOffline,
    DeviceOnline,
    GatewayUp,
    JobGone,
    JobReady,
    ToAllocator,
)


@dataclass(frozen=True, slots=True)
class TellGateway:
    """Send this to a gateway's stream."""

    gateway: str
    message: Assign | Census


@dataclass(frozen=True, slots=True)
class TellCoordinator:
    """Send this to a job's coordinator's stream."""

    job: str
    message: DeviceJoined | DeviceLeft


Effect = TellGateway | TellCoordinator


@dataclass(slots=True, eq=False)
class _Job:
    epoch: int
    weight: float
    devices: dict[str, None] = field(default_factory=dict)  # in the order they were given
    debt_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Device:
    online: DeviceOnline
    job: str | None = None


class Allocator:
    """Devices and jobs, and who serves whom. `epoch_start`: larger than any epoch that an earlier allocator used."""

    def __init__(self, epoch_start: int) -> None:
        self._epoch = epoch_start
        self._jobs: dict[str, _Job] = {}
        self._devices: dict[str, _Device] = {}
        self._gateways: dict[str, str] = {}
        self._now_s: float | None = None
        self._effects: list[Effect] = []

    def census(self, gateways: Iterable[str]) -> list[Effect]:
        """After a start: have these gateways announce every connection again."""
        return [TellGateway(gateway, Census()) for gateway in gateways]

    def handle(self, message: ToAllocator, now_s: float) -> list[Effect]:
        """What to send because of `message`, in order. `now_s` is any monotonic clock's."""
        self._effects = []
        self._accrue(now_s)
        match message:
            case DeviceOnline():
                self._online(message)
            case DeviceOffline():
                device = self._devices.get(message.device)
                if device is not None and device.online.connection == message.connection:
                    self._remove(message.device, message.reason)
            case GatewayUp():
                self._gateway_up(message)
            case JobReady():
                self._job_ready(message)
            case JobGone():
                self._job_gone(message)
            case _:
                assert_never(message)
        self._balance()
        return self._effects

    def jobs_of_devices(self) -> dict[str, str | None]:
        """The job of each connected device, None where it has none."""
        return {name: device.job for name, device in self._devices.items()}

    def check_invariants(self) -> None:
        """Raise AssertionError where the two sides of the allocation disagree. For tests and the simulator."""
        for name, device in self._devices.items():
            assert device.job is None or name in self._jobs[device.job].devices, f"{device.job} does not know {name}"
        for job, entry in self._jobs.items():
            for name in entry.devices:
                assert self._devices[name].job == job, f"{name} does not know of {job}"
        if self._jobs:
            assert all(device.job for device in self._devices.values()), "a device without a job while there are jobs"

    # ---- messages ------------------------------------------------------------------------------------------------

    def _online(self, message: DeviceOnline) -> None:
        known = self._devices.get(message.device)
        if known is None:
            self._devices[message.device] = _Device(message)
        elif known.online.connection == message.connection:
            known.online = message
        else:
            self._tell_left(message.device, known, "connected anew")
            known.online = message
            if known.job is not None:
                self._tell_joined(message.device, known)

    def _gateway_up(self, message: GatewayUp) -> None:
        if self._gateways.get(message.gateway) == message.incarnation:
            return
        self._gateways[message.gateway] = message.incarnation
        for name in [name for name, device in self._devices.items() if device.online.gateway == message.gateway]:
            self._remove(name, "its gateway restarted")

    def _job_ready(self, message: JobReady) -> None:
        job = self._jobs.get(message.job)
        weight = max(message.weight, 1e-6)
        if job is None:
            self._jobs[message.job] = _Job(message.epoch, weight)
        elif message.epoch >= job.epoch:
            restarted = message.epoch > job.epoch
            job.epoch, job.weight = message.epoch, weight
            if restarted:
                for name in job.devices:
                    self._tell_joined(name, self._devices[name])

    def _job_gone(self, message: JobGone) -> None:
        job = self._jobs.get(message.job)
        if job is None or message.epoch < job.epoch:
            return
        del self._jobs[message.job]
        for name in job.devices:
            device = self._devices[name]
            device.job = None
            if not self._jobs:
                self._tell_assigned(name, device)

    # ---- balance -------------------------------------------------------------------------------------------------

    def _accrue(self, now_s: float) -> None:
        """Debts grow with time: what a job was entitled to since the last message, less what it had."""
        passed_s = 0.0 if self._now_s is None else max(0.0, now_s - self._now_s)
        self._now_s = now_s
        weights = sum(job.weight for job in self._jobs.values())
        for job in self._jobs.values():
            job.debt_s += passed_s * (len(self._devices) * job.weight / weights - len(job.devices))

    def _targets(self) -> dict[str, int]:
        """Devices each job should have. They sum to all devices."""
        devices = len(self._devices)
        weights = sum(job.weight for job in self._jobs.values())
        least = 1 if devices >= len(self._jobs) else 0
        quotas = {name: devices * job.weight / weights for name, job in self._jobs.items()}
        targets = {name: max(least, int(quota)) for name, quota in quotas.items()}

        def claim(name: str) -> tuple[float, bool, float, str]:
            job = self._jobs[name]
            return quotas[name] - targets[name], len(job.devices) > targets[name], job.debt_s, name

        while (surplus := devices - sum(targets.values())) != 0:
            if surplus > 0:
                targets[max(targets, key=claim)] += 1
            else:
                targets[min((name for name in targets if targets[name] > least), key=claim)] -= 1
        return targets

    def _balance(self) -> None:
        if not self._jobs:
            return
        targets = self._targets()

        def below(name: str) -> tuple[int, float, str]:
            return targets[name] - len(self._jobs[name].devices), self._jobs[name].debt_s, name

        for name, device in self._devices.items():
            if device.job is None:
                self._give(name, device, max(targets, key=below))
        for source, job in self._jobs.items():
            while len(job.devices) > targets[source]:
                name = next(reversed(job.devices))
                device = self._devices[name]
                self._tell_left(name, device, "given to another job")
                del job.devices[name]
                self._give(name, device, max(targets, key=below))

    def _give(self, name: str, device: _Device, job: str) -> None:
        device.job = job
        self._jobs[job].devices[name] = None
        self._tell_joined(name, device)

    def _remove(self, name: str, reason: str) -> None:
        device = self._devices.pop(name)
        self._tell_left(name, device, reason)
        if device.job is not None:
            del self._jobs[device.job].devices[name]

    # ---- effects -------------------------------------------------------------------------------------------------

    def _tell_assigned(self, name: str, device: _Device) -> None:
        self._epoch += 1
        online = device.online
        assign = Assign(device=name, connection=online.connection, job=device.job, epoch=self._epoch)
        self._effects.append(TellGateway(online.gateway, assign))

    def _tell_joined(self, name: str, device: _Device) -> None:
        self._tell_assigned(name, device)
        assert device.job is not None
        joined = DeviceJoined(online=device.online, epoch=self._jobs[device.job].epoch)
        self._effects.append(TellCoordinator(device.job, joined))

    def _tell_left(self, name: str, device: _Device, reason: str) -> None:
        if device.job is not None:
            left = DeviceLeft(device=name, connection=device.online.connection, reason=reason)
            self._effects.append(TellCoordinator(device.job, left))
