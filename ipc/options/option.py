"""Option: the declaration of an engine option, next to its field (help text, bounds, other names), and its check."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from ipc.errors import ConfigError

#: Units of a number of bytes.
_BYTE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
#: Most digits of such a number; none that is allowed has more.
_MAX_DIGITS = 20
#: How much names without their underscores, or two of their words, have in common if they are the same.
_SAME, _SAME_WORD = 0.93, 0.75
_STEM = 3  # letters that a word and its short form begin with: seqs for sequences


class Option(msgspec.Struct, frozen=True):
    """Metadata in an option's Annotated type, in addition to its type and its default."""

    group: str  # the heading in --help
    help: str
    low: float = 0  # bounds of a number, inclusive
    high: float = 0
    is_above_low: bool = False  # `low` itself is not allowed
    names: tuple[str, ...] = ()  # vLLM's names of the option, accepted as keywords and flags
    flags: tuple[str, ...] = ()  # further flags of other engines; accepted, but not shown
    spellings: dict[str, str] = {}  # vLLM's spelling of a value -> ours
    metavar: str = ""  # what --help shows for a text's value; "" = PATH
    refused: dict[str, str] = {}  # vLLM's value that is not one of ours -> why


class DeclaredOption(msgspec.Struct, frozen=True):
    """One field of a config, with the parts of its type."""

    name: str
    option: Option
    plain: Any  # the type without None: bool, int, float, str, a Literal or a dict
    is_optional: bool
    default: object

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the allowed values of a Literal; empty for other types."""
        return get_args(self.plain) if get_origin(self.plain) is Literal else ()

    @property
    def is_bytes(self) -> bool:
        """Return whether this is a number of bytes, which may also be given as 512M or 2G."""
        return self.plain is int and self.name.endswith("_bytes")

    @property
    def bounds(self) -> str:
        """Return the range of allowed numbers, as text."""
        low, high = self.option.low, self.option.high
        if self.plain is int:
            return f"from {low} to {high}"
        return f"above {low:g} and up to {high:g}" if self.option.is_above_low else f"from {low:g} to {high:g}"

    def check(self, value: object) -> None:
        """Check the value of a choice, a switch or a number; other types are not checked here.

        Errors: ConfigError that names the option, what is allowed and what was given.
        """
        if value is None and self.is_optional:
            return
        if self.plain is bool:
            if not isinstance(value, bool):
                raise ConfigError(f"{self.name} must be true or false; got {value!r}")
        elif self.plain is int:
            self._check_integer(value)
        elif self.plain is float:
            if not self._is_within(value, (int, float)):
                raise ConfigError(f"{self.name} must be a number {self.bounds}; got {value!r}")
        elif (choices := self.choices) and value not in choices:
            reason = self.option.refused.get(value) if isinstance(value, str) else None
            why = f": {reason}" if reason else ""
            raise ConfigError(f"{self.name} must be one of {', '.join(choices)}; got {value!r}{why}")

    def _check_integer(self, value: object) -> None:
        if self._is_within(value, int):
            return
        text = f"{self.name} must be an integer {self.bounds}; got {value!r}"
        if isinstance(value, float) and math.isfinite(value) and value.is_integer():
            raise ConfigError(f"{text}, write {int(value)}")
        raise ConfigError(text)

    def _is_within(self, value: object, kind: type | tuple[type, ...]) -> bool:
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        low, high = self.option.low, self.option.high
        return low <= value <= high and not (self.option.is_above_low and value == low)  # type: ignore[operator]


def json_object(name: str, given: object) -> Mapping[str, Any]:
    """Return an option that is a dict or the text of a JSON object. Errors: ConfigError that names the option."""
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{name} must be a dict or a JSON object; {error} in {given!r:.80}") from None
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} must be a dict or a JSON object; got {given!r:.80}")
    return given


def parse_bytes(text: str) -> int:
    """Return '1048576', '512M' or '2G' (powers of 1024) as a number of bytes. Errors: ValueError."""
    unit = _BYTE_UNITS.get(text[-1:].upper(), 0)
    digits = text[:-1] if unit else text
    if not digits.isascii() or not digits.isdigit() or len(digits) > _MAX_DIGITS:
        raise ValueError(f"expected bytes as 1048576, 512M or 2G, got {text!r:.80}")
    return int(digits) * (unit or 1)


def nearest(name: str, names: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the one of `names` that `name` is a misspelling of; None if there is none.

    Their words are compared too. A name with another word, such as num_gpu_slots against num_swap_slots, has another
    meaning. likeness: from 0 to 1, the least that both must have in common.
    """
    near = difflib.get_close_matches(name, names, n=3, cutoff=likeness)
    return next((one for one in near if _has_its_words(name, one)), None)


def _has_its_words(name: str, other: str) -> bool:
    """Return whether each word of the shorter of two names is in the other one, misspelled or shortened perhaps."""
    fewer, more = sorted(([word for word in re.split("[_-]", text) if word] for text in (name, other)), key=len)
    if len(fewer) == len(more) == 1 or _ratio("".join(fewer), "".join(more)) >= _SAME:
        return True
    for word in fewer:
        found = next((one for one in more if _is_same_word(word, one)), None)
        if found is None:
            return False
        more.remove(found)
    return True


def _is_same_word(word: str, other: str) -> bool:
    return _ratio(word, other) >= _SAME_WORD or word[:_STEM] == other[:_STEM]


def _ratio(text: str, other: str) -> float:
    return difflib.SequenceMatcher(None, text, other).ratio()


def declared_options(config: type[msgspec.Struct]) -> Mapping[str, DeclaredOption]:
    """Return a config's options by name, in the order of its fields.

    Errors: TypeError for a field whose type is not Annotated with one Option.
    """
    options = {}
    hints = get_type_hints(config, include_extras=True)
    for field in msgspec.structs.fields(config):
        hint = hints[field.name]
        declared = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Option)]
        if get_origin(hint) is not Annotated or len(declared) != 1:
            raise TypeError(f"{config.__name__}.{field.name} must be Annotated with one Option; it is {hint}")
        kind = get_args(hint)[0]
        parts = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        (plain,) = (part for part in parts if part is not type(None))
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        options[field.name] = DeclaredOption(field.name, declared[0], plain, type(None) in parts, default)
    return options
