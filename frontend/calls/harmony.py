"""OpenAI's harmony format, of gpt-oss: messages in channels, each between marks.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

analysis is reasoning, a message to functions.NAME is a call, every other message is content.
"""

import re

from frontend.calls.delta import Sink, Thought
from frontend.calls.source import Reading, Source

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT = re.compile(r"to=(\S+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."
_TO = "to="
_MAX_RECEIVER = 200  # characters


class _Opening:
    """The text before the first mark. The prompt ends inside a header, so a recipient there belongs to the header."""

    def __init__(self, sink: Sink) -> None:
        self.header = ""
        self._sink = sink
        self._is_content = False

    def take(self, text: str) -> None:
        """Take text; text that cannot be a recipient is content."""
        self.header += text
        begin = self.header.lstrip()[: len(_TO)]
        if self._is_content or not _TO.startswith(begin) or len(self.header) > _MAX_RECEIVER:
            self.end()

    def end(self) -> None:
        """Turn the taken text into content."""
        self._is_content = True
        text, self.header = self.header, ""
        self._sink.content(text)


def read_harmony(source: Source, sink: Sink) -> Reading[None]:
    """Read a whole answer."""
    opening = _Opening(sink)
    mark = yield from source.until(MARKS, opening.take)
    if mark not in ("<|channel|>", "<|constrain|>", "<|message|>"):
        opening.end()
    before = opening.header
    while True:
        if mark == "<|message|>" and before:
            mark = yield from _read_message(source, sink, before)
        while mark in ("<|start|>", "<|channel|>", "<|constrain|>"):
            header, before = [before, mark], ""
            mark = yield from _read_header(source, header)
            if mark == "<|message|>":
                mark = yield from _read_message(source, sink, "".join(header))
        before = ""
        if mark == "<|message|>":
            mark = yield from source.until(_ENDS, sink.content)
        if not mark:
            return
        mark = yield from source.until(MARKS, sink.content)  # text outside of messages


def _read_header(source: Source, header: list[str]) -> Reading[str]:
    """Read up to the message; return the mark before it, or the mark found instead."""
    while True:
        mark = yield from source.until(MARKS, header.append)
        if mark not in ("<|channel|>", "<|constrain|>"):
            return mark
        header.append(mark)


def _read_message(source: Source, sink: Sink, header: str) -> Reading[str]:
    """Read a message's text; return the mark after it."""
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
    if not is_thought:
        return (yield from source.until(_ENDS, sink.content))
    thought = Thought(source.position)
    sink.thoughts.append(thought)
    mark = yield from source.until(_ENDS, sink.reasoning)
    thought.end = source.position if mark else None
    return mark
