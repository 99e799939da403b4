"""Log lines as text and as JSON."""

import json
import re

from ipc.log_lines import log_line


def test_text_has_the_fields_behind_the_message() -> None:
    assert log_line("text", "engine-core: done", {"tokens": 3, "why": None}) == "engine-core: done tokens=3"


def test_json_is_one_line_whatever_it_says() -> None:
    line = log_line("json", 'engine-core: Traceback:\n  "x"\n', {"tokens": 3, "why": None})
    assert "\n" not in line
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found == {"message": 'Traceback:\n  "x"', "tokens": 3}
