"""ResponseItems: the items of one answer of the Responses API, and the events that make them."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from frontend.calls.delta import Delta, Kind
from frontend.calls.scanner import Scanner
from frontend.http.bodies import Json
from frontend.http.openai.chat_message import CallIds
from frontend.http.request import new_id

Event = tuple[str, Json]
#: Kind -> the type of its item, of the part in it, and the name of its events.
_PARTS = {
    Kind.CONTENT: ("message", "output_text", "response.output_text"),
    Kind.REASONING: ("reasoning", "reasoning_text", "response.reasoning_text"),
}
_ARGUMENTS = "response.function_call_arguments"


class TokenText(NamedTuple):
    """A token of an answer: its text, "" for a part of a character, and its log probabilities as shown.

    is_shown: whether the answer's text has it; one that ends the answer or is special is not.
    """

    text: str
    logprobs: Json
    is_shown: bool = True


class ResponseItems:
    """See the module's docstring. items: the items so far. scanner: None = all text is content. ids: of calls.

    draw: returns the random part of the next id.
    """

    def __init__(self, scanner: Scanner | None, ids: CallIds, draw: Callable[[], str] = new_id) -> None:
        self.items: list[Json] = []
        self._draw = draw
        self._scanner, self._ids = scanner, ids
        self._text = ""  # of tokens with log probabilities, which is still to be read
        self._tokens = deque[TokenText]()  # that make it, and what follows
        self._read: list[TokenText] = []  # tokens since the last piece that was shown
        self._logprobs: list[Json] = []  # of the open item
        self._kind: Kind | None = None  # of the open item
        self._pieces: list[str] = []  # of the open item's text or arguments

    def feed(self, text: str, finish_reason: str | None, tokens: Sequence[TokenText] = ()) -> list[Event]:
        """Take a piece of the text, and the finish reason if it is the last; return the events.

        tokens: those with log probabilities, which are then shown with the text that they make. The text may come later
        than its tokens, and a part of it never.
        """
        self._text += text
        self._tokens += tokens
        events: list[Event] = []
        while self._tokens:  # one by one, so that each is shown with its own text, however long a piece is
            own = self._tokens[0].text
            if not self._text.startswith(own):
                if own.startswith(self._text) and finish_reason is None:
                    break
                self._tokens[0] = self._tokens[0]._replace(text="", is_shown=False)
                continue
            self._read.append(self._tokens.popleft())
            self._text = self._text[len(own) :]
            events += self._feed(own)
        if not self._tokens or finish_reason is not None:
            text, self._text = self._text, ""
            events += self._feed(text)
        if finish_reason is not None:
            rest = [] if self._scanner is None else self._scanner.finish()
            events += [event for delta in rest for event in self._take(delta)]
            events += self._close("incomplete" if finish_reason == "length" else "completed")
        return events

    def _feed(self, text: str) -> list[Event]:
        if not text:
            return []
        deltas = [Delta(Kind.CONTENT, text)] if self._scanner is None else self._scanner.feed(text)
        return [event for delta in deltas for event in self._take(delta)]

    def _logprobs_of(self, delta: Delta) -> list[Json]:
        """Return the log probabilities of the last tokens that make a piece; what came before them is not shown."""
        read, self._read = self._read, []
        missing, begin = len(delta.text), len(read)
        while begin and (missing > 0 or (read[begin - 1].is_shown and not read[begin - 1].text)):
            begin -= 1
            missing -= len(read[begin].text)
        return [one.logprobs for one in read[begin:] if one.is_shown]

    def _take(self, delta: Delta) -> list[Event]:
        if delta.kind == Kind.CALL:
            return self._close() + self._open_call(delta.text)
        events: list[Event] = []
        if delta.kind != self._kind:
            events = self._close() + self._open_text(delta.kind)
        self._pieces.append(delta.text)
        place: Json = {**self._place(), "delta": delta.text}
        if delta.kind == Kind.ARGUMENTS:
            return [*events, (f"{_ARGUMENTS}.delta", place)]
        place["content_index"] = 0
        if delta.kind == Kind.CONTENT:
            place["logprobs"] = self._logprobs_of(delta)
            self._logprobs += place["logprobs"]
        else:
            self._read.clear()
        return [*events, (f"{_PARTS[delta.kind][2]}.delta", place)]

    def _open_text(self, kind: Kind) -> list[Event]:
        item: Json = {"type": _PARTS[kind][0], "status": "in_progress"}
        if kind == Kind.CONTENT:
            item |= {"id": f"msg_{self._draw()}", "role": "assistant", "content": []}
        else:
            item |= {"id": f"rs_{self._draw()}", "summary": [], "content": []}
        events = self._open(kind, item)
        return [
            *events,
            ("response.content_part.added", {**self._place(), "content_index": 0, "part": _part(kind, "")}),
        ]

    def _open_call(self, name: str) -> list[Event]:
        fields = {"id": f"fc_{self._draw()[:24]}", "call_id": self._ids.make(), "name": name, "arguments": ""}
        return self._open(Kind.ARGUMENTS, {"type": "function_call", "status": "in_progress", **fields})

    def _open(self, kind: Kind, item: Json) -> list[Event]:
        self._kind, self._pieces, self._logprobs = kind, [], []
        self.items.append(item)
        return [("response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)})]

    def _close(self, status: str = "completed") -> list[Event]:
        """End the open item, if there is one."""
        if self._kind is None:
            return []
        kind, item, text = self._kind, self.items[-1], "".join(self._pieces)
        self._kind = None
        item["status"] = status
        if kind == Kind.ARGUMENTS:
            item["arguments"] = text
            done: Json = {**self._place(), "name": item["name"], "arguments": text}
            events: list[Event] = [(f"{_ARGUMENTS}.done", done)]
        else:
            part = _part(kind, text, self._logprobs)
            item["content"] = [part]
            place = {**self._place(), "content_index": 0}
            ended = {**place, "text": text, **({"logprobs": self._logprobs} if kind == Kind.CONTENT else {})}
            events = [(f"{_PARTS[kind][2]}.done", ended), ("response.content_part.done", {**place, "part": part})]
        return [*events, ("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})]

    def _place(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _part(kind: Kind, text: str, logprobs: Sequence[Json] = ()) -> Json:
    """Return a part of an item."""
    part: Json = {"type": _PARTS[kind][1], "text": text}
    return {**part, "annotations": [], "logprobs": logprobs} if kind == Kind.CONTENT else part
