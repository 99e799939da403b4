"""The answers to calls on pins, from the built-in scheduler."""

from core.scheduling.interface import SchedulerInterface
from core.scheduling.scheduler import Scheduler
from ipc.wire.messages import CallDone, CallFailed, ErrorCode
from ipc.wire.pin_messages import ForkPin, GetPins, PinList, ReleasePin


def answer_pin_call(
    scheduler: SchedulerInterface, message: ReleasePin | ForkPin | GetPins, now_ns: int
) -> PinList | CallDone | CallFailed:
    """Answer a call. A scheduler that is not made of the built-in one's parts pins nothing: then CallFailed."""
    if not isinstance(scheduler, Scheduler):
        return CallFailed(message.call, ErrorCode.INVALID_ARGUMENT, "this engine's scheduler pins nothing")
    pins, ledger, size = scheduler.pins, scheduler.pins.ledger, scheduler.block_size
    match message:
        case GetPins():
            states, num_left_out = pins.states(message.tenant, now_ns)
            own = ledger.of_tenant(message.tenant) * size
            return PinList(message.call, states, own, ledger.max_of_tenant * size, num_left_out)
        case ReleasePin():
            refusal = pins.release(message.tenant, message.name, now_ns)
            failed = (ErrorCode.INVALID_ARGUMENT, refusal) if refusal else None
        case ForkPin():
            failed = pins.fork(message, now_ns)
    return CallDone(message.call) if failed is None else CallFailed(message.call, *failed)
