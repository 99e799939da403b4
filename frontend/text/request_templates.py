"""RequestTemplates: chat templates sent by callers, rendered in a process that is killed if it takes too much."""

import signal
import threading
from typing import Any

from frontend.text.template_messages import Chat, decode_rendered, encode_message
from ipc.errors import EngineStartError, InvalidRequestError
from ipc.machine.bounded_process import BoundedProcess
from ipc.machine.channel import ChannelEndedError
from ipc.machine.child_process import describe_exit

#: Limits of one chat: CPU time, and memory beyond that of the process.
MAX_CPU_MS, MAX_MEMORY_BYTES = 1000, 256 << 20


class RequestTemplates:
    """Renders one chat at a time; any thread may call. The first chat starts the process."""

    def __init__(self, max_cpu_ms: int = MAX_CPU_MS, max_memory_bytes: int = MAX_MEMORY_BYTES) -> None:
        self._bounds = max_cpu_ms, max_memory_bytes
        self._process: BoundedProcess | None = None
        self._lock = threading.Lock()  # of the process

    def render(self, template: str | None, messages: list[dict[str, Any]], **arguments: Any) -> str:
        """Return what render_chat() returns for the same arguments. Errors: InvalidRequestError."""
        assert template is not None, "a caller's template"
        try:
            message = encode_message(Chat(template, messages, arguments))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequestError(f"these messages cannot be passed to a chat template: {error}") from error
        with self._lock:
            rendered = decode_rendered(self._ask(message))
        if rendered.error:
            raise InvalidRequestError(rendered.error)
        return rendered.prompt

    def close(self) -> None:
        """Kill the process, even while it renders."""
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None

    def _ask(self, message: bytes) -> bytes:
        try:
            if self._process is None:
                self._process = BoundedProcess("frontend.text.template_process", *self._bounds)
            return self._process.ask(message)
        except (OSError, EngineStartError) as error:
            raise InvalidRequestError(f"the process that renders templates could not be started: {error}") from error
        except ChannelEndedError as error:
            assert self._process is not None, "a process has ended"
            process, self._process = self._process, None
            raise InvalidRequestError(self._why(process.end())) from error

    def _why(self, code: int) -> str:
        """Return why a chat has no prompt, from the exit code of its process."""
        max_cpu_ms, max_bytes = self._bounds
        if code == -signal.SIGPROF:
            return f"the chat template takes more than {max_cpu_ms} ms of CPU time"
        return (
            f"the chat template cannot be used: the process that rendered it {describe_exit(code)}; "
            f"it may take more than {max_bytes >> 20} MiB of memory, or nest too deeply"
        )
