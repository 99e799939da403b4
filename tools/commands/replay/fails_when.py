"""FailsWhen: a condition on a simulated run, as text: `ttft_p99 > 2000 or "blocks" in error`."""

import ast
import operator
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

from ipc.errors import ConfigError

Value: TypeAlias = bool | float | str | None

#: What a condition may name, with what it means.
NAMES = {
    "crashed": "a step of the engine raised an exception",
    "broken": "the scheduler's own counts do not agree after a step",
    "stuck": "there are live requests and nothing runs",
    "misread": "a row reads KV blocks with other content",
    "error": "the text of the first of these; empty if there is none",
    "unfinished": "requests that did not end, and were not aborted",
    "ttft_mean": "milliseconds",
    "ttft_p99": "milliseconds",
    "tpot_mean": "milliseconds",
    "e2e_mean": "milliseconds",
    "e2e_p99": "milliseconds",
    "tokens_per_s": "output tokens of all requests",
    "steps": "steps that ran a plan",
    "preemptions": "of all requests",
    "most_preemptions": "of one request",
    "cached_tokens": "found in the prefix cache",
}
#: Names whose values depend on how long steps take.
TIMES = frozenset({"ttft_mean", "ttft_p99", "tpot_mean", "e2e_mean", "e2e_p99", "tokens_per_s"})

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda part, whole: part in whole,
    ast.NotIn: lambda part, whole: part not in whole,
}
_NODES = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare),
    *(ast.Name, ast.Load, ast.Constant),
    *_COMPARISONS,
)


class FailsWhen:
    """A condition. Errors: ConfigError for a text that is not a condition."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            tree = ast.parse(text, mode="eval")
        except (SyntaxError, ValueError):
            raise _no_condition(text, "it is not an expression") from None
        for node in ast.walk(tree):
            if not isinstance(node, _NODES):
                raise _no_condition(text, f"{type(node).__name__} is not allowed in it")
            if isinstance(node, ast.Name) and node.id not in NAMES:
                raise _no_condition(text, f"it names {node.id!r}")
        self.names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if not self.names:
            raise _no_condition(text, "it names no value of a run")
        self._body = tree.body

    def holds(self, values: Mapping[str, Value]) -> bool:
        """Return whether a run with these values fails; a comparison with a missing value is false."""
        try:
            return bool(_value(self._body, values))
        except TypeError:
            return False


def _value(node: ast.expr, values: Mapping[str, Value]) -> Any:
    """Return the value of an expression of _NODES. Errors: TypeError for values that cannot be compared."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return values.get(name)
        case ast.UnaryOp(ast.Not(), operand):
            return not _value(operand, values)
        case ast.UnaryOp(_, operand):
            return -_value(operand, values)
        case ast.BoolOp(ast.And(), parts):
            return all(_value(part, values) for part in parts)
        case ast.BoolOp(_, parts):
            return any(_value(part, values) for part in parts)
        case ast.Compare(left, kinds, others):
            sides = [_value(one, values) for one in (left, *others)]
            return all(_COMPARISONS[type(kind)](*pair) for kind, pair in zip(kinds, pairwise(sides), strict=True))
        case _:
            raise AssertionError(f"{type(node).__name__} has passed the check")


def _no_condition(text: str, why: str) -> ConfigError:
    return ConfigError(f"--fails-when {text!r:.80}: {why}. It compares names with and, or, not, in: {', '.join(NAMES)}")
