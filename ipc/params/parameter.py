"""Parameter: the declaration of a numeric sampling parameter, next to its field, and its check.

Everything else follows from the declaration: the check when parameters are constructed or decoded, the fields of HTTP
bodies and of Ollama's options, the command line flag, the keys of model files, the table in docs/sampling.md, and the
dtype of the column that an option's arithmetic reads (core/sampling/number_options.py).
"""

import numbers
import operator
from collections.abc import Mapping
from itertools import compress
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from ipc.errors import InvalidRequestError


class Parameter(msgspec.Struct, frozen=True):
    """Metadata in a parameter's Annotated type, in addition to its type and its default."""

    text: str  # what it does, for --help and the documentation
    low: float  # bounds, inclusive
    high: float
    is_of_draws: bool = False  # controls how a token is drawn; a beam search ignores its defaults
    names: tuple[str, ...] = ()  # names in Ollama and llama.cpp, accepted in HTTP bodies
    gguf: str = ""  # key after general.sampling. in GGUF files; then also read from generation_config.json


class DeclaredParameter(msgspec.Struct, frozen=True):
    """One number of SamplingParams, with the parts of its type."""

    name: str
    parameter: Parameter
    kind: type[int] | type[float]
    is_optional: bool  # may be None
    default: int | float | None

    @property
    def bounds(self) -> str:
        """Return the range of allowed numbers, as [0, 1]."""
        low, high = self.parameter.low, self.parameter.high
        return f"[{low:g}, {high:g}]" if self.kind is float else f"[{low}, {high}]"

    def check(self, value: object) -> int | float | None:
        """Return the value as Python's own int or float. Errors: InvalidRequestError that names the parameter."""
        if value is None and self.is_optional:
            return None
        if self.kind is int:
            return integer(self.name, value, int(self.parameter.low), int(self.parameter.high))
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise InvalidRequestError(f"{self.name} must be a number in {self.bounds}, got {value!r}")
        plain = value if isinstance(value, (int, float)) else float(value)  # NumPy's scalars
        if not self.parameter.low <= plain <= self.parameter.high:  # also for NaN
            raise InvalidRequestError(f"{self.name} must be in {self.bounds}, got {value!r}")
        return float(plain)


def integer(name: str, value: object, low: int, high: int) -> int:
    """Return the value as an int. Errors: InvalidRequestError unless it is an integer from low to high."""
    if type(value) is int and low <= value <= high:
        return value
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise InvalidRequestError(f"{name} must be an integer in [{low}, {high}], got {value!r}")
    plain = int(value)
    if not low <= plain <= high:
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {value}")
    return plain


def declared_parameters(params: type[msgspec.Struct]) -> Mapping[str, DeclaredParameter]:
    """Return the numbers of a struct of parameters by name, in the order of its fields: those with a Parameter."""
    found = {}
    hints = get_type_hints(params, include_extras=True)
    for field in msgspec.structs.fields(params):
        hint = hints[field.name]
        declared = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Parameter)]
        if get_origin(hint) is not Annotated or not declared:
            continue
        parts = get_args(get_args(hint)[0]) or (get_args(hint)[0],)
        (kind,) = (part for part in parts if part is not type(None))
        found[field.name] = DeclaredParameter(field.name, declared[0], kind, type(None) in parts, field.default)
    return found


class NumberChecks:
    """The checks of all declared numbers. They delay the first token, so valid values cost little."""

    def __init__(self, declared: Mapping[str, DeclaredParameter]) -> None:
        self._read = operator.attrgetter(*declared)
        self._rules = [(one, one.kind, one.parameter.low, one.parameter.high) for one in declared.values()]
        self._defaults = tuple(one.check(one.default) for one in declared.values())

    def __call__(self, params: Any) -> None:
        """Check the numbers of these parameters, and convert them to Python's own ints and floats.

        Errors: InvalidRequestError that names the parameter.
        """
        values = self._read(params)
        given = map(operator.is_not, values, self._defaults)  # few are, and a default is right
        for (one, kind, low, high), value in compress(zip(self._rules, values, strict=True), given):
            if type(value) is not kind or not low <= value <= high:  # a message's are of the kind
                setattr(params, one.name, one.check(value))
