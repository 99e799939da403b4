"""The wall clock may jump: only what people read has its time. All that waits or measures uses the monotonic clock."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout  # all folders of the checkout

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("core", "engine_core", "frontend", "ipc", "kernels", "tools")
_CALLS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}
#: Who reads it, and for what.
ALLOWED = {
    "core/capture/engine.py": "when a recording was made",
    "core/capture/flight_file.py": "a file's name",
    "core/capture/flight_recorder.py": "when a recording was made",
    "core/capture/writer.py": "when a recording was made",
    "core/workers/nodes.py": "until when a start waits, in the log",
    "frontend/http/wire/server.py": "the header Date",
    "frontend/http/ollama/ollama.py": "created_at",
    "frontend/http/openai/openai_answer.py": "created",
    "frontend/http/openai/responses.py": "created_at",
    "frontend/http/pooling.py": "created",
    "frontend/http/service.py": "created",
    "frontend/http/callers/spans.py": "a span's end",
    "frontend/text/chat_template.py": "today's date in a prompt",
    "ipc/log_lines.py": "a line's time",
    "ipc/wire/sockets.py": "the age of a folder that nobody holds, as files have wall times",
}


def wall_times(path: Path) -> list[int]:
    """Return the lines in which the wall clock is read."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    return [node.lineno for node in nodes if isinstance(node.value, ast.Name) and (node.value.id, node.attr) in _CALLS]


def test_only_what_people_read_has_the_wall_clocks_time() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (lines := wall_times(path))
    }
    assert {path: lines for path, lines in found.items() if path not in ALLOWED} == {}, "use time.monotonic()"
    assert sorted(ALLOWED) == sorted(found), "an entry that is not needed any more"


def test_a_read_of_the_wall_clock_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import time\nx = time.monotonic()\ny = time.time()\nz = later(time.time)\n")
    assert wall_times(path) == [3, 4]
