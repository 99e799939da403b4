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
    """Shows answers as they grow. A context manager: when it exits, every answer has been shown completely."""

    def update(self, index: int, text: str) -> None:
        """Show `text`, the answer of request `index` (from 0) so far; it never becomes shorter."""

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
        self.quiet = True  # further output while the exception unwinds would fail again
        raise


def streams_for(console: Console, titles: Sequence[str], *, is_plain: bool = False) -> Streams:
    """Return panels, redrawn in place, if the console is a terminal and not is_plain; else each answer once."""
    return LiveStreams(console, titles) if console.is_terminal and not is_plain else PlainStreams(console, titles)


def printable(text: str) -> str:
    """Return the text with control characters replaced.

    A model's answer must not move the cursor or change the terminal's title.
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


class PlainStreams:
    """For pipes and logs: each answer once. A single answer is written as it grows. Several are written under headings,
    in order, each as soon as it and all earlier ones are complete.
    """

    def __init__(self, console: Console, titles: Sequence[str]) -> None:
        self._file = console.file
        self._titles = list(titles)
        self._texts = [""] * len(titles)
        self._notes: list[str | None] = [None] * len(titles)  # None: not complete yet
        self._num_shown = 0  # characters of a single answer, or answers of several

    def update(self, index: int, text: str) -> None:
        """See Streams."""
        self._texts[index] = text
        if len(self._titles) == 1:
            # Not through the console: it would wrap lines, but a pipe has no width.
            self._file.write(printable(text[self._num_shown :]))
            self._file.flush()
            self._num_shown = len(text)

    def finish(self, index: int, note: str) -> None:
        """See Streams."""
        self._notes[index] = note
        while len(self._titles) > 1 and self._num_shown < len(self._titles) and self._is_complete(self._num_shown):
            self._show(self._num_shown)
            self._num_shown += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
            if len(self._titles) == 1:
                print(file=self._file, flush=True)
                return
            for index in range(self._num_shown, len(self._titles)):
                self._show(index)

    def _is_complete(self, index: int) -> bool:
        return self._notes[index] is not None

    def _show(self, index: int) -> None:
        note = f" ({self._notes[index]})" if self._notes[index] else ""
        heading = f"=== {index + 1} {self._titles[index]}{note}\n"
        blank = "\n" if index else ""
        print(printable(f"{blank}{heading}{self._texts[index]}"), file=self._file, flush=True)
