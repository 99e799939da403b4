"""The access log: a line on standard error for each request at its end, without any content of request or answer."""

import contextlib
import ipaddress
import os
import select
import time

from frontend.http.replies.reply import Reply
from frontend.http.request import Request
from ipc.log_lines import LogFormat, log_line

_MAX_BYTES = 4096  # a writable pipe takes this many without waiting (PIPE_BUF)


def access_line(form: LogFormat, request: Request, status: int, reply: Reply | None, now: float) -> str:
    """Return the line of one request. reply: that of an answer of tokens. now: monotonic seconds."""
    began = request.received_at
    fields: dict[str, object] = {
        "route": request.route or "none",
        "status": status,
        "ms": round((now - began) * 1000, 1),
        "client": _address(request.client),
        "request_id": request.id,
        "key": None if request.key is None else request.key.name,
    }
    if reply is not None:
        fields["end"] = reply.cause
        fields["ttft_ms"] = round((reply.first_token_at - began) * 1000, 1) if reply.first_token_at else None
        fields["prompt_tokens"] = reply.usage.prompt_tokens
        fields["cached_tokens"] = reply.usage.cached_tokens
        fields["completion_tokens"] = reply.usage.completion_tokens
    return log_line(form, f"engine-core: http {request.method}", fields)


def _address(client: str) -> str | None:
    """Return a caller's address; None if it has none, or if a proxy sends one that is not an address."""
    try:
        return str(ipaddress.ip_address(client))
    except ValueError:
        return None


class AccessLog:
    """Writes lines to a file descriptor. It never waits: if they are not read, lines are dropped and counted."""

    def __init__(self, form: LogFormat, fd: int = 2) -> None:
        self.num_dropped = 0
        self._form: LogFormat = form
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, request: Request, status: int, reply: Reply | None) -> None:
        """Write the line of one request, as one write."""
        line = access_line(self._form, request, status, reply, time.monotonic())
        data = f"{line}\n".encode(errors="backslashreplace")[:_MAX_BYTES]
        if not self._poll.poll(0):
            self.num_dropped += 1
            return
        with contextlib.suppress(OSError):  # a full disk, a closed pipe
            os.write(self._fd, data)
