"""keep_numbers(): a JSON schema whose large numbers are enforced exactly, or refused.

llguidance reads numbers as float64, and bounds of integers as int64. Above 2**53 it rounds them: a const of 18 digits
allowed another number, and a bound allowed numbers beyond it. Near -2**63 it fails.
"""

import math
from typing import Any, TypeGuard

from ipc.errors import InvalidRequestError
from ipc.params.json_schemas import rewrite

#: Integers up to here are exact in float64.
_EXACT = 2**53
_MOST = 2**63 - 1  # of integers; float64 rounds it up, and llguidance still reads it as this value
_LEAST = -(2**63) + 1024  # the smallest float64 above -2**63
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def keep_numbers(schema: Any) -> Any:
    """Return a copy of the schema, in which bounds beyond 2**53 are exact in float64 and within the given bounds.

    A lower bound of integers is raised to -2**63 + 1024, so the 1,024 smallest 64-bit integers are not generated if one
    is given. A value that is not a schema is returned unchanged.
    Errors: InvalidRequestError for a const, an enum value, or a bound that cannot be enforced.
    """
    return rewrite(schema, _keep)


def _keep(schema: dict[str, Any]) -> None:
    if "const" in schema:
        _check("const", schema["const"])
    if isinstance(schema.get("enum"), list):
        _check("enum", schema["enum"])
    for name in _LOWER:
        if _is_number(bound := schema.get(name)):
            if bound > _MOST:
                raise InvalidRequestError(f"json: {name} {bound} is not supported: at most {_MOST}")
            schema[name] = _inside(bound, math.inf)
            if _is_of_integers(schema):
                schema[name] = max(schema[name], _LEAST)
    for name in _UPPER:
        if _is_number(bound := schema.get(name)):
            if bound < _LEAST:
                raise InvalidRequestError(f"json: {name} {bound} is not supported: at least {_LEAST}")
            if bound != _MOST or name != "maximum":
                schema[name] = _inside(bound, -math.inf)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_of_integers(schema: dict[str, Any]) -> bool:
    """Return whether the only numbers of the schema are integers."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return "integer" in kinds and "number" not in kinds


def _inside(bound: float, towards: float) -> float:
    """Return the nearest number on this side that is exact in float64."""
    if not isinstance(bound, int) or abs(bound) <= _EXACT:
        return bound
    near = float(bound)
    if near != bound and (near < bound) == (towards > bound):
        near = math.nextafter(near, towards)
    return int(near)


def _check(name: str, value: Any) -> None:
    """Check all integers in a const or enum value, including those written as 1e20. Errors: InvalidRequestError."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check(name, part)
    elif _is_number(value) and abs(value) > _EXACT and not _is_kept(value):
        text = f"json: {name} {value} is not supported: integers beyond 2**53 are rounded; write it as a string"
        raise InvalidRequestError(text)


def _is_kept(value: float) -> bool:
    """Return whether an integer beyond 2**53 is not rounded."""
    return value == _MOST or (_LEAST <= value < _MOST and int(float(value)) == value)
