"""compile_grammar(): a matcher at the start of a request's grammar."""

import importlib
from typing import TYPE_CHECKING

from core.grammars.grammar_text import grammar_text
from core.grammars.vocabulary import MAX_FORCED_CHARS
from ipc.errors import InvalidRequestError, UnsupportedParameterError
from ipc.params.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_ERROR_CHARS = 500
# the parser's state depends only on the text, whatever is shared between copies
_OF_PARSER = ("Parser Error", "parser error")
TOO_LONG = f"it forces a text of more than {MAX_FORCED_CHARS:,} characters at once"
_NO_TOKENS = "NoExtensionBias"  # what llguidance says about a forced text without tokens (core/grammars/vocabulary.py)


def check_library() -> None:
    """Import llguidance. Errors: UnsupportedParameterError if it is missing."""
    try:
        importlib.import_module("llguidance")
    except ImportError:
        raise UnsupportedParameterError(
            "structured_outputs need llguidance, which is not installed where the engine runs: "
            "pip install llguidance, or engine-core with its extra [structured]"
        ) from None


def compile_grammar(tokenizer: "LLTokenizer", params: StructuredOutputsParams) -> "LLMatcher":
    """Return a matcher that has computed its first mask. Errors: InvalidRequestError."""
    from llguidance import LLMatcher, LLParserLimits

    # They limit a mask to about 2 ms, because it is computed between two steps. Letters of all scripts in JSON need
    # 30,000 of fuel.
    limits = LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=40_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, grammar_text(params), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first mask builds the lexer's states, which copies share
    is_long = not matcher.is_error() and is_too_long(matcher.compute_ff_bytes())
    if is_long or matcher.is_error():
        why = TOO_LONG if is_long else why_failed(matcher)
        text = f"the grammar of structured_outputs ({params.kind}) cannot be used: {why}"
        raise InvalidRequestError(text[:_MAX_ERROR_CHARS])
    return matcher


def is_too_long(forced: bytes) -> bool:
    """Return whether a forced text has no tokens. A mask may then allow what follows it."""
    return len(forced) > MAX_FORCED_CHARS and len(forced.decode(errors="ignore")) > MAX_FORCED_CHARS


def is_of_lexer(matcher: "LLMatcher") -> bool:
    """Return whether a matcher failed at a limit of its lexer, rather than one that its own text has reached."""
    return not matcher.get_error().startswith(_OF_PARSER)


def why_failed(matcher: "LLMatcher") -> str:
    """Return why a matcher has failed."""
    why = matcher.get_error()
    if why.startswith(_NO_TOKENS):
        return TOO_LONG
    if "coerce_one_of" in why:  # a library option that would make it ignore what oneOf says
        return "branches of oneOf must exclude one another by a property that each requires, or by type: or use anyOf"
    if "too many" in why.partition("\n")[0].lower():
        return f"the work of one token is bounded: simplify it, or bound its repetitions ({why})"
    return why
