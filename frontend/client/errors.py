"""What the engine's refusals become in a client."""

from ipc.errors import EngineCoreError, HandshakeError, InvalidRequestError, RequestFailedError
from ipc.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, ErrorCode, Refused, RequestFailed


def fresh(error: EngineCoreError) -> EngineCoreError:
    """An equal error: one that is raised by several threads would collect their tracebacks."""
    return type(error)(*error.args)


def request_error(failed: RequestFailed) -> EngineCoreError:
    if failed.code == ErrorCode.INVALID_ARGUMENT:
        return InvalidRequestError(failed.message)
    return RequestFailedError(f"{failed.message} ({ErrorCode(failed.code).name})")


def refusal(refused: Refused) -> HandshakeError:
    return HandshakeError(
        f"the engine refused this client: {refused.message} ({ErrorCode(refused.code).name}; it speaks protocol "
        f"{refused.major}.{refused.minor}, this client {PROTOCOL_MAJOR}.{PROTOCOL_MINOR})"
    )
