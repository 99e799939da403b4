"""plain_texts(): a JSON schema whose patterns and dates have the same meaning in llguidance as in JSON Schema.

Patterns of JSON Schema are ECMA 262's. llguidance reads Rust's, in whose classes `[`, `&&`, `--` and `~~` are
operators. Its own date and time formats accept days and seconds that do not exist, so they are patterns here.
"""

from collections.abc import Iterator
from typing import Any

from ipc.errors import InvalidRequestError
from ipc.params.json_schemas import rewrite

_MONTHS = r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"(?:{_YEAR}-(?:{_MONTHS}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_HOUR = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{_HOUR})"
#: RFC 3339's forms: years 1 to 9999, days that exist, no leap seconds.
_FORMATS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
_MAX_HOSTNAME = 253
#: Escapes in a class that mean several characters, so no range begins or ends with them.
_SETS = frozenset("dDwWsSpP")


def plain_texts(schema: Any) -> Any:
    """Return a copy of the schema with these patterns and formats. A value that is not a schema is returned unchanged.

    Errors: InvalidRequestError for a pattern that matches nothing.
    """
    return rewrite(schema, _change)


def rust_pattern(pattern: str) -> str:
    """Return a pattern of ECMA 262 with its classes in Rust's notation. Errors: InvalidRequestError."""
    written, at = list[str](), 0
    while at < len(pattern):
        if pattern[at] == "\\":
            written.append(pattern[at : at + 2])
            at += 2
        elif pattern[at] == "[":
            text, at = _class(pattern, at + 1)
            written.append(text)
        else:
            written.append(pattern[at])
            at += 1
    return "".join(written)


def _change(schema: dict[str, Any]) -> None:
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = rust_pattern(pattern)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {rust_pattern(name): value for name, value in patterns.items()}
    form = schema.get("format")
    if form == "hostname":
        most = schema.get("maxLength")
        schema["maxLength"] = min(most, _MAX_HOSTNAME) if type(most) is int else _MAX_HOSTNAME
    elif isinstance(form, str) and form in _FORMATS:
        del schema["format"]
        own = {"pattern": f"^{_FORMATS[form]}$"}
        others = schema.get("allOf", [])
        if "pattern" in schema and isinstance(others, list):
            schema["allOf"] = [*others, own]
        else:
            schema |= own


def _class(pattern: str, at: int) -> tuple[str, int]:
    """Return the class that begins after this `[`, and the index after its end."""
    is_negated = pattern.startswith("^", at)
    atoms, at = _atoms(pattern, at + is_negated)
    if not atoms:
        if not is_negated:
            raise InvalidRequestError(f"json: the pattern {pattern!r:.80} has a class that matches nothing: []")
        return r"[\s\S]", at
    return f"[{'^' * is_negated}{''.join(_members(atoms))}]", at


def _atoms(pattern: str, at: int) -> tuple[list[str], int]:
    """Return the characters and escapes of a class as written, and the index after its end."""
    atoms = list[str]()
    while at < len(pattern) and pattern[at] != "]":
        size = 1
        if pattern[at] == "\\":
            size = {"x": 4, "u": 6, "c": 3}.get(pattern[at + 1 : at + 2], 2)
            if pattern[at + 1 : at + 3] in ("p{", "P{", "u{"):
                size = pattern.find("}", at) + 1 - at
        atoms.append(pattern[at : at + max(1, size)])
        at += max(1, size)
    return atoms, at + 1


def _members(atoms: list[str]) -> Iterator[str]:
    """Yield the parts of a class: a hyphen between two characters makes a range; any other hyphen is a character."""
    at = 0
    while at < len(atoms):
        first, behind = atoms[at], atoms[at + 1 : at + 3]
        if len(behind) == 2 and behind[0] == "-" and not _is_set(first) and not _is_set(behind[1]):
            yield f"{_written(first)}-{_written(behind[1])}"
            at += 3
        else:
            yield _written(first)
            at += 1


def _is_set(atom: str) -> bool:
    return len(atom) > 1 and atom[1] in _SETS


def _written(atom: str) -> str:
    if atom == r"\b":  # in a class: a backspace
        return r"\x08"
    return f"\\{atom}" if atom in tuple("[]&~-^") else atom
