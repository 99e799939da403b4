"""Scanner: reads reasoning, content and calls from an answer's text, piece by piece.

An answer that is not streamed is made of the pieces that the same scanner reads from its whole text: there is no other
parser. Anything that is not a call in the model's format is content.
"""

import re

from frontend.calls.delta import Delta, Kind, Sink, Thought
from frontend.calls.formats import AnswerForm, CallFormat
from frontend.calls.json_calls import Tools
from frontend.calls.source import NotACallError, Reading, Source


class Scanner:
    """The scanner of one answer.

    form: how the model writes reasoning and calls. tools: the tools of the request; None = calls are content.
    is_parallel: whether several calls are shown. in_reasoning: whether the prompt has started the reasoning.
    """

    def __init__(
        self, form: AnswerForm, tools: Tools = None, *, is_parallel: bool = True, in_reasoning: bool = False
    ) -> None:
        self._source = Source()
        self._sink = Sink(is_parallel=is_parallel)
        self._tools = tools
        self._reading: Reading[None] | None = self._read(form, in_reasoning)
        next(self._reading, None)

    @property
    def num_calls(self) -> int:
        """Return the number of calls so far."""
        return self._sink.num_calls

    @property
    def thoughts(self) -> list[Thought]:
        """Return the positions of the reasoning in the text so far."""
        return self._sink.thoughts

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that this piece of the text completes."""
        self._source.add(text)
        self._go_on()
        return self._sink.take()

    def finish(self) -> list[Delta]:
        """Return the rest. No text may follow; a second call returns nothing."""
        self._source.is_ended = True
        self._go_on()
        if self._reading is not None:
            self._reading = None
            self._sink.finish()
        return self._sink.take()

    def _go_on(self) -> None:
        if self._reading is not None:
            next(self._reading, None)

    def _read(self, form: AnswerForm, in_reasoning: bool) -> Reading[None]:
        if not self._source.text:
            yield  # until the first piece
        if form.is_harmony:
            yield from read_harmony(self._source, self._sink)
            return
        if form.reasoning is not None:
            yield from self._read_reasoning(*form.reasoning, in_reasoning)
        if form.calls is not None and self._tools is not None:
            yield from self._read_answer(form.calls)
        while True:
            self._sink.content(self._source.text[self._source.at :])
            self._source.at = len(self._source.text)
            if self._source.is_ended:
                return
            yield

    def _read_reasoning(self, begin: str, end: str, in_reasoning: bool) -> Reading[None]:
        source, thought = self._source, Thought(self._source.position)
        if not in_reasoning:
            source.keep(source.at, most=1 << 30)
            yield from source.skip_space()
            if not (yield from source.take(begin)):
                source.back()
                return
            source.give_back()
        self._sink.text(Kind.REASONING, "")
        self._sink.thoughts.append(thought)
        if (yield from source.until([end], self._sink.reasoning)):
            thought.end = source.position

    def _read_answer(self, calls: CallFormat) -> Reading[None]:
        source, sink = self._source, self._sink
        if calls.is_bare:
            source.keep(source.at, calls.most_kept)
            yield from self._read_calls(calls, is_bare=True)
        begins_too = any(begin.startswith(calls.end) for begin in calls.begins)  # also if there is no end mark
        marks = calls.begins if begins_too else (*calls.begins, calls.end)
        while True:
            mark = yield from source.until(marks, sink.content, most_kept=calls.most_kept)
            if not mark:
                return
            if mark == calls.end:  # one too many
                text = source.give_back()
                if not sink.num_calls:
                    sink.content(text)
                continue
            yield from self._read_calls(calls, is_bare=False)

    def _read_calls(self, calls: CallFormat, *, is_bare: bool) -> Reading[None]:
        source = self._source
        # Without a mark, only a tool's name distinguishes a call from an answer in JSON.
        tools = self._tools if is_bare or calls.needs_tools else None
        try:
            yield from calls.read(source, self._sink, tools, calls.end)
        except NotACallError:
            self._sink.content(source.give_back())


# OpenAI's harmony format, of gpt-oss: messages in channels, each between marks.
#
#     <|channel|>analysis<|message|>...<|end|>
#     <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
#     <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>
#     <|start|>assistant<|channel|>final<|message|>...<|return|>
#
# analysis is reasoning, a message to functions.NAME is a call, every other message is content.


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
