"""ParsedAnswer: an answer in pieces with complete calls, for dialects in which arguments are an object and not text."""

import json
from typing import Any, NamedTuple

from frontend.calls.delta import Delta, Kind
from frontend.calls.scanner import Scanner


class WholeCall(NamedTuple):
    """One complete call."""

    name: str
    arguments: dict[str, Any]


class ParsedAnswer:
    """Reads one answer. scanner: None = all of it is content.

    A call is sent when it is complete. If its arguments are not a JSON object, because they are wrong or cut, it
    becomes content.
    """

    def __init__(self, scanner: Scanner | None) -> None:
        self.num_calls = 0
        self._scanner = scanner
        self._name: str | None = None
        self._arguments: list[str] = []

    def feed(self, text: str, *, is_end: bool) -> list[Delta | WholeCall]:
        """Return the parts that this piece of the text completes. is_end: it is the last piece."""
        if self._scanner is None:
            return [Delta(Kind.CONTENT, text)] if text else []
        shown: list[Delta | WholeCall] = []
        deltas = self._scanner.feed(text)
        for delta in [*deltas, *self._scanner.finish()] if is_end else deltas:
            if delta.kind == Kind.ARGUMENTS:
                self._arguments.append(delta.text)
                continue
            shown += self._close()
            if delta.kind == Kind.CALL:
                self._name = delta.text
            else:
                shown.append(delta)
        return shown + self._close() if is_end else shown

    def _close(self) -> list[Delta | WholeCall]:
        if self._name is None:
            return []
        name, text = self._name, "".join(self._arguments)
        self._name, self._arguments = None, []
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return [Delta(Kind.CONTENT, f"{name}({text})")]
        self.num_calls += 1
        return [WholeCall(name, arguments)]
