"""Log lines of the engine process and of the programs: text for people, or one JSON object a line for programs.

counted() is for all texts that people read.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]
_PREFIX = "engine-core: "


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun: 1 request, 2 requests.

    one: the noun after 1; many: after other numbers, None = with an s.
    """
    return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"


def log_line(form: LogFormat, message: str, fields: Mapping[str, object]) -> str:
    """Return a log line, without the newline at its end.

    fields: the line's subject, as values by name. None values are left out. The JSON has them in addition to "time"
    (UTC) and "message".
    """
    known = {name: value for name, value in fields.items() if value is not None}
    if form == "text":
        return " ".join((message, *(f"{name}={value}" for name, value in known.items())))
    time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return msgspec.json.encode({"time": time, "message": message.removeprefix(_PREFIX).rstrip(), **known}).decode()
