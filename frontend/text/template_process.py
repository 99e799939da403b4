"""The process that renders untrusted chat templates: `python -P -m frontend.text.template_process FD CPU_MS MEMORY`.

frontend/text/request_templates.py starts it; ipc/machine/bounded_process.py states how it ends. A template is a
program: the sandbox bounds the size of each expression, but not how often a template loops or how much it keeps.
"""

import contextlib
import os
import sys

import msgspec

from frontend.text.chat_template import render_chat
from frontend.text.template_messages import Rendered, decode_chat, encode_message
from ipc.errors import InvalidRequestError
from ipc.machine.bounded_process import limit_memory, limited_cpu_time, open_channel
from ipc.machine.channel import Channel, ChannelEndedError


def main(arguments: list[str]) -> int:
    """Answer the owner until it is gone; return the exit code. arguments: see above."""
    if len(arguments) != 3 or not all(argument.isdigit() for argument in arguments):
        print(f"usage: {__doc__}", file=sys.stderr)
        return 2
    fd, max_cpu_ms, max_memory_bytes = map(int, arguments)
    channel = open_channel(fd)
    limit_memory(max_memory_bytes)
    with contextlib.suppress(ChannelEndedError):
        serve(channel, max_cpu_ms / 1000)
    return 0


def serve(channel: Channel, max_cpu_s: float) -> None:
    """Answer the owner's messages. Errors: ChannelEndedError once it is gone."""
    while True:
        message = channel.receive()
        with limited_cpu_time(max_cpu_s):
            answer = encode_message(_render(message))
        channel.send(answer)


def _render(message: bytes) -> Rendered:
    try:
        chat = decode_chat(message)
        return Rendered(render_chat(chat.template, chat.messages, **chat.arguments))
    except (InvalidRequestError, MemoryError, msgspec.DecodeError) as error:
        return Rendered(error=str(error) or "the chat template takes too much memory")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)  # skips the interpreter's teardown
