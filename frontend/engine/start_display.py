"""StartDisplay: one line on the terminal with the phase of a starting engine, which is cleared when the engine is
ready.
"""

import contextlib
import shutil
import sys
from typing import Self

_CLEAR = "\r\x1b[K"


class StartDisplay:
    """A function for EngineProcess(on_phase=). It shows nothing if standard error is not a terminal, or after its end.

    A context manager: on exit the line is cleared, also after an error.
    """

    def __init__(self, *, is_quiet: bool = False) -> None:
        self._is_on = not is_quiet and sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, phase: str, seconds: float) -> None:
        """Show a phase. seconds: since the engine process began."""
        if self._is_on:
            width = shutil.get_terminal_size().columns - 1
            self._write(_CLEAR + f"engine-core: starting the engine: {phase} ({seconds:.1f} s)"[:width])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_on:
            self._write(_CLEAR)
        self._is_on = False

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed terminal, a closed stream
            sys.stderr.write(text)
            sys.stderr.flush()
