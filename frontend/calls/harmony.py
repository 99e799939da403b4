"""OpenAI's harmony format, of gpt-oss: messages in channels, each between marks.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

analysis is reasoning, a message to functions.NAME is a call, every other message is content.
"""

import re

from frontend.calls.delta import Sink
from frontend.calls.source import Reading, Source

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT = re.compile(r"to=(\S+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."


def read_harmony(source: Source, sink: Sink) -> Reading[None]:
    """Read a whole answer."""
    while True:
        mark = yield from source.until(MARKS, sink.content)  # text outside of messages
        while mark in ("<|start|>", "<|channel|>", "<|constrain|>"):
            header: list[str] = [mark]
            mark = yield from _read_header(source, header)
            if mark == "<|message|>":
                mark = yield from _read_message(source, sink, "".join(header))
        if mark == "<|message|>":
            mark = yield from source.until(_ENDS, sink.content)
        if not mark:
            return


def _read_header(source: Source, header: list[str]) -> Reading[str]:
    """Read up to the message; return the mark before it, or the one that stands there instead."""
    while True:
        mark = yield from source.until(MARKS, header.append)
        if mark not in ("<|channel|>", "<|constrain|>"):
            return mark
        header.append(mark)


def _read_message(source: Source, sink: Sink, header: str) -> Reading[str]:
    """Read a message's text; return the mark behind it."""
    recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
    name = recipient[1].split("<", 1)[0] if recipient else ""
    if name.startswith(_FUNCTIONS) and name != _FUNCTIONS:
        sink.begin_call(name.removeprefix(_FUNCTIONS))
        parts: list[bool] = []

        def show(text: str) -> None:
            if text:
                parts.append(True)
            sink.arguments(text)

        mark = yield from source.until(_ENDS, show)
        if not parts:
            sink.arguments("{}")
        return mark
    is_thought = bool(name) or (channel is not None and channel[1] == "analysis")
    return (yield from source.until(_ENDS, sink.reasoning if is_thought else sink.content))
