"""convert(): plain data to a body's type. Whole numbers may be written as floats, as some programs do."""

from typing import Any, TypeVar

import msgspec
import msgspec.inspect

_T = TypeVar("_T")


def convert(value: Any, kind: type[_T]) -> _T:
    """Return decoded JSON as `kind`. A number such as 4.0 is taken for an integer. Errors: msgspec.ValidationError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if not is_of_a_float(error):
            raise
        return msgspec.convert(_converted(value, msgspec.inspect.type_info(kind)), kind)


def is_of_a_float(error: msgspec.ValidationError) -> bool:
    """Return whether the error's cause is a float in place of another type."""
    return "got `float`" in str(error)


def _converted(value: Any, kind: msgspec.inspect.Type) -> Any:
    """Return a value with 4.0 as 4 wherever the type has an integer and no float; the rest is unchanged.

    The recursion follows the type, so its depth is bounded by the code.
    """
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    if isinstance(value, float):
        takes = {type(one) for one in kinds}
        is_wanted = msgspec.inspect.IntType in takes and msgspec.inspect.FloatType not in takes
        return int(value) if is_wanted and value.is_integer() else value
    for one in kinds:
        if isinstance(value, list) and isinstance(one, msgspec.inspect.ListType):
            return [_converted(element, one.item_type) for element in value]
        if isinstance(value, dict) and isinstance(one, msgspec.inspect.StructType):
            fields = {field.encode_name: field.type for field in one.fields}
            return {name: _converted(given, fields[name]) if name in fields else given for name, given in value.items()}
    return value
