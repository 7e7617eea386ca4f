"""Switchboard messages to the core's events, and the core's effects to switchboard messages. Pure."""

from __future__ import annotations

from backend.coordinator import events as core
from backend.switchboard import messages as wire
from backend.switchboard.streams import gateway_stream
from tileweave.protocol.messages import TEXT_CHARACTERS_MAX, Ack


def event_of(message: wire.ToCoordinator) -> core.Event | None:
    """The event a message means; None for what is not the core's business."""
    match message:
        case wire.DeviceJoined(online=online):
            return core.Joined.of(online)
        case wire.DeviceLeft() | wire.DeviceOffline():
            return core.Left(message.device, message.connection, message.reason)
        case wire.GatewayUp():
            return core.GatewayRestarted(message.gateway)
        case wire.ResultReady():
            return core.ResultArrived(
                message.device, message.connection, message.lease, message.seconds, message.upload_s, message.slot
            )
        case wire.LeaseFailed():
            return core.LeaseFail(
                message.device, message.connection, message.lease, message.code, message.message, message.bad
            )
        case wire.DeviceStatus():
            return core.StatusChanged(
                message.device, message.connection, message.state == "ready", message.reason,
                message.rtt_s, message.down_bps, message.up_bps,
            )  # fmt: skip
        case wire.JobControl():
            return None


def messages_of(effect: core.Effect, job: str) -> list[tuple[str, wire.ToGateway]]:
    """What an effect says to gateways, by stream; nothing where it is not for them."""
    match effect:
        case core.SendLease():
            push = wire.Push(
                device=effect.device, connection=effect.connection, lease=effect.lease, panels=list(effect.panels)
            )
            return [(gateway_stream(effect.gateway), push)]
        case core.SendAck():
            ack = Ack(
                lease=effect.lease, job=job, verdict=effect.verdict, reason=effect.reason[:TEXT_CHARACTERS_MAX],
                flop=effect.flop,
            )  # fmt: skip
            answer = wire.Acknowledge(device=effect.device, connection=effect.connection, ack=ack)
            return [(gateway_stream(effect.gateway), answer)]
        case core.FreeSlot():
            return [(gateway_stream(effect.slot.gateway), wire.Release(slots=[effect.slot.slot]))]
        case core.SendRevoke():
            revoke = wire.RevokeLeases(
                device=effect.device, connection=effect.connection, job=job, leases=list(effect.leases)
            )
            return [(gateway_stream(effect.gateway), revoke)]
        case core.DropPanels():
            drop = wire.DropPanels(device=effect.device, connection=effect.connection, panels=list(effect.panels))
            return [(gateway_stream(effect.gateway), drop)]
        case _:
            return []
