"""The client's errors for what the engine refuses."""

from ipc.errors import (
    DeadlineExceededError,
    EngineCoreError,
    EngineDeadError,
    HandshakeError,
    InvalidRequestError,
    RequestFailedError,
)
from ipc.wire.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, ErrorCode, Refused, RequestFailed, Welcome
from ipc.wire.sockets import HANDSHAKE_MS

_SAME_TOKENS = "L2"  # the level at which equal fingerprints mean equal tokens


def fresh(error: EngineCoreError) -> EngineCoreError:
    """Return an equal error, because one error raised by several threads would collect their tracebacks."""
    return type(error)(*error.args)


def request_error(failed: RequestFailed) -> EngineCoreError:
    """Return the error of a request that the engine failed.

    It is an InvalidRequestError, a DeadlineExceededError or another RequestFailedError.
    """
    if failed.code == ErrorCode.INVALID_ARGUMENT:
        return InvalidRequestError(failed.message)
    kind = DeadlineExceededError if failed.code == ErrorCode.DEADLINE_EXCEEDED else RequestFailedError
    error = kind(f"{failed.message} ({ErrorCode(failed.code).name})")
    error.code, error.retry_after_ms = ErrorCode(failed.code).name, failed.retry_after_ms
    return error


def unanswered(error: EngineDeadError, seconds: float) -> EngineDeadError:
    """Return the error of a connection that ended so many seconds after it was made, before anything was heard."""
    if seconds < HANDSHAKE_MS / 1000:
        return error
    return EngineDeadError(f"{error}, on which nothing was said for {seconds:.0f} s: an engine that is stopped is so")


def refusal(refused: Refused) -> HandshakeError:
    """Return the error of a handshake that the engine refused."""
    return HandshakeError(
        f"the engine refused this client: {refused.message} ({ErrorCode(refused.code).name}; it speaks protocol "
        f"{refused.major}.{refused.minor}, this client {PROTOCOL_MAJOR}.{PROTOCOL_MINOR})"
    )


def why_not_again(before: Welcome, now: Welcome) -> str:
    """Return why requests of the engine `before` cannot go on at the engine that answers `now`; "" where they can."""
    if now.engine_id == before.engine_id:
        return ""
    if now.model_fingerprint != before.model_fingerprint:
        return (
            f"another model answers: {now.model_name} ({now.model_fingerprint}), not {before.model_name} "
            f"({before.model_fingerprint}); requests are lost"
        )
    if before.numerics != _SAME_TOKENS or now.numerics != _SAME_TOKENS:
        levels = f"{before.numerics} before and {now.numerics} now"
        return f"its tokens may differ at numerics level {levels} ({_SAME_TOKENS} is needed); requests are lost"
    lengths = before.limits.max_model_len, now.limits.max_model_len
    if lengths[0] != lengths[1]:  # a request without max_tokens would end elsewhere
        return f"its max_model_len is {lengths[1]}, not {lengths[0]}: streams may end elsewhere; requests are lost"
    return ""
