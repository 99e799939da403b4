"""HttpError: a status, and the one error body of this server. The table from the engine's errors to statuses is here.

A body is `{"error": {"message", "type", "param", "code"}}` for every status, and at most 2 KiB long: an answer must not
be many times longer than its request. `x-should-retry: false` keeps clients from repeating a request that would fail
again.
"""

import math
import re

import msgspec

from ipc.errors import (
    DeadlineExceededError,
    EngineCoreError,
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
    RequestFailedError,
)

_MAX_MESSAGE_CHARS = 400  # 6 bytes each if JSON escapes them all

Headers = list[tuple[bytes, bytes]]

#: Message of status 499, which is only logged.
PEER_LEFT = "the peer has left"

#: Status -> its type for clients of OpenAI and vLLM.
ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    421: "MisdirectedRequestError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    431: "RequestHeaderFieldsTooLargeError",
    499: "ClientClosedRequestError",  # in the log and the metrics only: the caller is gone
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
    507: "InsufficientStorageError",
}
_FIELD = re.compile(r"[A-Za-z_]\w*(?=[\s=:\[]|$)")
_NO_RETRY: Headers = [(b"x-should-retry", b"false")]
#: Statuses after which the rest of the connection's bytes cannot be trusted.
_CLOSING = (408, 413, 431)


class HttpError(Exception):
    """An answer other than success. param: the wrong field of the body. headers: further ones."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | int | None = None,
        headers: Headers | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, status if code is None else code
        self.headers = list(headers or [])
        if status in _CLOSING:
            self.headers.append((b"connection", b"close"))

    def body(self) -> bytes:
        """Return the JSON body."""
        return msgspec.json.encode({"error": self.fields()})

    def fields(self) -> dict[str, str | int | None]:
        """Return the value of "error" in the body."""
        message = str(self)
        if len(message) > _MAX_MESSAGE_CHARS:
            message = f"{message[: _MAX_MESSAGE_CHARS - 4]} ..."
        message = message.encode(errors="replace").decode()  # a caller's text may have lone surrogates
        return {"message": message, "type": ERROR_TYPES[self.status], "param": self.param, "code": self.code}


def http_error(error: Exception, *, max_model_len: int, prompt_param: str | None = None) -> HttpError:
    """Return the answer to an error of the engine or of the client.

    max_model_len: tokens, for the message. prompt_param: the field of the route's body with the prompt.
    """
    if isinstance(error, HttpError):
        return error
    text = str(error)
    if isinstance(error, PromptTooLongError):
        limit = f"This model's maximum context length is {max_model_len} tokens, prompt and output together"
        text = f"{limit}: {error.excess or text}"
        return HttpError(400, text, param=prompt_param, code="context_length_exceeded")
    if isinstance(error, InvalidRequestError):
        return HttpError(400, text, param=_first_word(text))
    if isinstance(error, DeadlineExceededError):
        return HttpError(504, text, headers=_NO_RETRY)
    if isinstance(error, RequestFailedError):
        return _failed(error, text)
    if isinstance(error, EngineDeadError):
        return HttpError(503, "the engine is not running", headers=retry_after(1000))
    if isinstance(error, EngineCoreError):
        return HttpError(503, text, headers=retry_after(1000))
    return HttpError(500, "the server failed to handle this request", headers=_NO_RETRY)


def _failed(error: RequestFailedError, text: str) -> HttpError:
    """Return the answer to a refusal or a failure; it gives a time to retry only if another attempt can succeed."""
    if error.code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE", ""):
        return HttpError(503, text, headers=retry_after(error.retry_after_ms or 1000))
    if error.code == "PIN_REFUSED":
        return HttpError(429, text, code="pin_refused", headers=_NO_RETRY)
    if error.code == "QUARANTINED":
        return HttpError(422, text, code="quarantined")
    return HttpError(500, text, headers=_NO_RETRY)


def retry_after(milliseconds: int) -> Headers:
    """Return the headers that tell clients when to send a request again."""
    seconds = max(1, math.ceil(milliseconds / 1000))
    return [(b"retry-after-ms", b"%d" % milliseconds), (b"retry-after", b"%d" % seconds)]


def _first_word(text: str) -> str | None:
    """Return the field with which a message begins, or None."""
    found = _FIELD.match(text)
    if found is None:
        return None
    return found[0] if "_" in found[0] or found[0] in ("n", "stop", "seed", "temperature", "messages") else None
