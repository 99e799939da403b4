"""Delta: a piece of an answer, read by a scanner from the model's text; and the message made of all pieces."""

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

import msgspec


class Kind(Enum):
    """The kind of a piece."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"  # start of a call; the text is the tool's name
    ARGUMENTS = "arguments"  # a part of a call's JSON text


class Delta(NamedTuple):
    """One piece. call: index of its call; -1 for the other kinds."""

    kind: Kind
    text: str
    call: int = -1


class Call(msgspec.Struct):
    """One call of a tool. arguments: JSON text, as the model wrote it; it may be wrong, or cut at the answer's end."""

    name: str
    arguments: str = ""


class Thought(msgspec.Struct):
    """A part of an answer that is reasoning, with its marks.

    begin, end: characters of the text; None = it continues.
    """

    begin: int
    end: int | None = None


class Message(msgspec.Struct):
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = []


def fold(deltas: Iterable[Delta]) -> Message:
    """Return the message that these pieces make. A whole answer is the fold of its stream."""
    message = Message()
    for kind, text, call in deltas:
        match kind:
            case Kind.REASONING:
                message.reasoning += text
            case Kind.CONTENT:
                message.content += text
            case Kind.CALL:
                message.calls.append(Call(text))
            case Kind.ARGUMENTS:
                message.calls[call].arguments += text
    return message


class Sink:
    """The output of readers. It merges pieces and drops the white space around reasoning and calls.

    is_parallel: whether an answer may have several calls; otherwise those after the first are dropped.
    """

    def __init__(self, *, is_parallel: bool = True) -> None:
        self.num_calls = 0
        self.thoughts: list[Thought] = []
        self._is_parallel = is_parallel
        self._deltas: list[Delta] = []
        self._pieces: list[str] = []  # of the last delta
        self._space: list[str] = []  # white space that is shown only if text of the same kind follows
        self._kind = Kind.CONTENT  # of the last text
        self._is_begin = False  # of content after reasoning or a call, or of reasoning

    def take(self) -> list[Delta]:
        """Return the deltas since the last call."""
        self._close()
        deltas, self._deltas = self._deltas, []
        return deltas

    def text(self, kind: Kind, text: str) -> None:
        """Add content or reasoning."""
        if kind != self._kind:
            self._kind, self._is_begin = kind, True
            self._space.clear()
        if self._is_begin:
            text = text.lstrip()
            if not text:
                return
            self._is_begin = False
        body = text.rstrip()
        if body:
            self._add(kind, "".join(self._space) + body)
            self._space = [text[len(body) :]]
        else:
            self._space.append(text)

    def content(self, text: str) -> None:
        """Add content."""
        self.text(Kind.CONTENT, text)

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        self.text(Kind.REASONING, text)

    def begin_call(self, name: str) -> None:
        """Begin a call. The following arguments belong to it."""
        self._kind, self._is_begin = Kind.CONTENT, True
        self._space.clear()
        self.num_calls += 1
        if self._shows_call():
            self._close()
            self._deltas.append(Delta(Kind.CALL, name, self.num_calls - 1))

    def arguments(self, text: str) -> None:
        """Add a part of the last call's arguments."""
        if self._shows_call():
            self._add(Kind.ARGUMENTS, text)

    def finish(self) -> None:
        """Show the white space at the end of content; nothing follows."""
        if self._kind == Kind.CONTENT and not self._is_begin and any(self._space):
            self._add(Kind.CONTENT, "".join(self._space))
        self._space.clear()

    def _shows_call(self) -> bool:
        return self._is_parallel or self.num_calls == 1

    def _add(self, kind: Kind, text: str) -> None:
        if not text:
            return
        call = self.num_calls - 1 if kind == Kind.ARGUMENTS else -1
        if not self._pieces or self._deltas[-1].kind != kind or self._deltas[-1].call != call:
            self._close()
            self._deltas.append(Delta(kind, "", call))
        self._pieces.append(text)

    def _close(self) -> None:
        if self._pieces:
            self._deltas[-1] = self._deltas[-1]._replace(text="".join(self._pieces))
            self._pieces = []
