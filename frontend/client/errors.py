"""The client's errors for what the engine refuses."""

from ipc.errors import DeadlineExceededError, EngineCoreError, HandshakeError, InvalidRequestError, RequestFailedError
from ipc.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, ErrorCode, Refused, RequestFailed


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
    return kind(f"{failed.message} ({ErrorCode(failed.code).name})")


def refusal(refused: Refused) -> HandshakeError:
    """Return the error of a handshake that the engine refused."""
    return HandshakeError(
        f"the engine refused this client: {refused.message} ({ErrorCode(refused.code).name}; it speaks protocol "
        f"{refused.major}.{refused.minor}, this client {PROTOCOL_MAJOR}.{PROTOCOL_MINOR})"
    )
