"""Several growing answers on one terminal at the same time."""

import contextlib
import unicodedata
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

_REFRESHES_PER_SECOND = 12
_PANEL_EDGES = 2  # lines
_PANEL_COLUMNS = 4  # of edges and padding


class Streams(Protocol):
    """Shows answers as they grow. A context manager: at its end every answer has been shown in full."""

    def update(self, index: int, text: str) -> None:
        """Show `text`, the answer of request `index` (from 0) so far; it is never shorter than before."""

    def finish(self, index: int, note: str) -> None:
        """Mark request `index` as complete; `note` describes how it ended."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class OutputConsole(Console):
    """Standard output. If the reader has closed the pipe, it raises BrokenPipeError, not rich's SystemExit."""

    def __init__(self) -> None:
        super().__init__(highlight=False)

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled."""
        self.quiet = True  # output during the unwinding would fail again
        raise


def streams_for(console: Console, titles: Sequence[str]) -> Streams:
    """Return panels, redrawn in place, if the console is a terminal; else whole lines with the request's number."""
    return LiveStreams(console, titles) if console.is_terminal else LineStreams(console, titles)


def printable(text: str) -> str:
    """Return the text with control characters replaced.

    A model's answer must not move the cursor or set the terminal's title.
    """
    return "".join(char if char in "\n\t" or unicodedata.category(char) != "Cc" else "\ufffd" for char in text)


class LiveStreams:
    """One panel for each request, redrawn in place: the last lines while it runs, the whole answer at the end."""

    def __init__(self, console: Console, titles: Sequence[str]) -> None:
        self._console = console
        self._titles = list(titles)
        self._texts = [""] * len(titles)
        self._notes = [""] * len(titles)
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def update(self, index: int, text: str) -> None:
        """See Streams."""
        self._texts[index] = text

    def finish(self, index: int, note: str) -> None:
        """See Streams."""
        self._notes[index] = note

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)
        for index in range(len(self._titles)):
            self._console.print(self._panel(index, None))

    def _render(self) -> Group:
        lines = max(1, self._console.height // max(1, len(self._titles)) - _PANEL_EDGES)
        return Group(*(self._panel(index, lines) for index in range(len(self._titles))))

    def _panel(self, index: int, max_lines: int | None) -> Panel:
        text = self._texts[index]
        if max_lines is None:
            shown = Text(printable(text))
        else:
            width = max(1, self._console.width - _PANEL_COLUMNS)
            # Wrapping all of a long answer many times a second would cost more than computing the answer.
            tail = Text(printable(text[-2 * width * max_lines :]))
            shown = Text("\n").join(tail.wrap(self._console, width)[-max_lines:])
        done = bool(self._notes[index])
        title = Text(f"{index + 1} {printable(self._titles[index])}", overflow="ellipsis", no_wrap=True)
        return Panel(
            shown,
            title=title,
            title_align="left",
            subtitle=self._notes[index] or None,
            subtitle_align="right",
            border_style="green" if done else "dim",
        )


class LineStreams:
    """For pipes and logs: each line once it is complete, behind its request's number; at the end each answer."""

    def __init__(self, console: Console, titles: Sequence[str]) -> None:
        self._console = console
        self._titles = list(titles)
        self._texts = [""] * len(titles)
        self._shown = [0] * len(titles)  # characters
        self._notes = [""] * len(titles)

    def update(self, index: int, text: str) -> None:
        """See Streams."""
        self._texts[index] = text
        end = text.rfind("\n") + 1
        if end > self._shown[index]:
            self._print_lines(index, text[self._shown[index] : end - 1])
            self._shown[index] = end

    def finish(self, index: int, note: str) -> None:
        """See Streams."""
        rest = self._texts[index][self._shown[index] :]
        if rest:
            self._print_lines(index, rest)
            self._shown[index] = len(self._texts[index])
        self._notes[index] = note

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
            for index, title in enumerate(self._titles):
                heading = f"{index + 1} {title}" + (f" ({self._notes[index]})" if self._notes[index] else "")
                self._print(f"\n=== {heading}\n{self._texts[index]}")

    def _print_lines(self, index: int, lines: str) -> None:
        for line in lines.split("\n"):
            self._print(f"[{index + 1}] {line}")

    def _print(self, text: str) -> None:
        # Not through the console: it would wrap at a width, and a pipe has none.
        print(printable(text), file=self._console.file, flush=True)
