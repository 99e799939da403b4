"""The wall clock may jump: only what people read has its time. All that waits or measures uses the monotonic clock."""

import ast

import pytest

from tests.house.source import nodes, product_trees

pytestmark = pytest.mark.checkout  # all folders of the checkout

FOLDERS = ("core", "engine_core", "frontend", "ipc", "kernels", "tools")
_CALLS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}
#: Who reads it, and for what.
ALLOWED = {
    "core/capture/engine.py": "when a recording was made",
    "core/capture/flight_file.py": "a file's name",
    "core/capture/flight_recorder.py": "when a recording was made",
    "core/capture/writer.py": "when a recording was made",
    "core/tiers/block_folder.py": "until when a file is kept, as files have wall times",
    "core/workers/nodes.py": "until when a start waits, in the log",
    "frontend/http/wire/server.py": "the header Date",
    "frontend/http/ollama/ollama.py": "created_at",
    "frontend/http/openai/openai_answer.py": "created",
    "frontend/http/openai/responses.py": "created_at",
    "frontend/http/pooling.py": "created",
    "frontend/http/shared.py": "created",
    "frontend/http/many/pages.py": "created_at, and when a model leaves the memory",
    "frontend/http/stored/responses.py": "created_at",
    "frontend/http/stored/batch_pages.py": "created_at",
    "frontend/http/stored/batch_runs.py": "expires_at, and the other times of a batch",
    "frontend/http/stored/conversation_pages.py": "created_at",
    "frontend/http/stored/conversations.py": "when one was last changed",
    "frontend/http/stored/database.py": "the age of what is stored",
    "frontend/http/stored/file_pages.py": "created_at",
    "frontend/http/stored/files.py": "expires_at",
    "frontend/http/callers/spans.py": "a span's end",
    "frontend/text/chat_template.py": "today's date in a prompt",
    "ipc/records/receipt.py": "created",
    "ipc/log_lines.py": "a line's time",
    "ipc/wire/sockets.py": "the age of a folder that nobody holds, as files have wall times",
}


def wall_times(tree: ast.Module) -> list[int]:
    """Return the lines in which the wall clock is read."""
    found = [node for node in nodes(tree) if isinstance(node, ast.Attribute)]
    return [node.lineno for node in found if isinstance(node.value, ast.Name) and (node.value.id, node.attr) in _CALLS]


def test_only_what_people_read_has_the_wall_clocks_time() -> None:
    of_product = {str(path): tree for path, tree in product_trees().items() if path.parts[0] in FOLDERS}
    found = {path: lines for path, tree in of_product.items() if (lines := wall_times(tree))}
    assert {path: lines for path, lines in found.items() if path not in ALLOWED} == {}, "use time.monotonic()"
    assert sorted(ALLOWED) == sorted(found), "an entry that is not needed any more"


def test_a_read_of_the_wall_clock_is_seen() -> None:
    tree = ast.parse("import time\nx = time.monotonic()\ny = time.time()\nz = later(time.time)\n")
    assert wall_times(tree) == [3, 4]
