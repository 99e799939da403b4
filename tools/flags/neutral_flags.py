"""without_neutral(): flags of vLLM that change nothing here are accepted, as LLM() accepts them (docs/vllm.md)."""

from collections.abc import Container, Sequence

from ipc.errors import ConfigError
from ipc.options.neutral_options import check_neutral, is_neutral, is_switch, value_of
from tools.flags.hints import FLAGS

_SHORT = {"-dp": "data_parallel_size"}
#: Switches of vLLM and llama.cpp that ask for what is always the case here, or for a more verbose log.
_ALWAYS_SO = (
    "--cont-batching",
    "--enable-prompt-tokens-details",
    "--enable-request-id-headers",
    "--enable-server-load-tracking",
    "--flash-attn",
    "--jinja",
    "--no-webui",
    "--verbose",
)
#: Flags of which one value changes nothing -> that value, and what to do instead of another value.
_ONE_VALUE = {"--seed": ("0", "each request has its own seed; without one it is random")}


def without_neutral(words: Sequence[str], known: Container[str]) -> list[str]:
    """Return the words without other engines' flags that change nothing; underscores in our own flags become dashes.

    known: the command's own flags.
    Errors: ConfigError for a value that asks for a feature that does not exist.
    """
    kept, at = [], 0
    while at < len(words) and words[at] != "--":
        word, at = words[at], at + 1
        flag, has_value, value = word.partition("=")
        if flag.startswith("--") and flag not in known and (dashed := flag.replace("_", "-")) in known:
            word, flag = dashed + word[len(flag) :], dashed
        name = _option(flag)
        if flag in known or name is None:
            lacks_value = flag in _ONE_VALUE and not has_value and list(words[at : at + 1]) in ([], ["--"])
            if flag in known or lacks_value or flag not in (*_ALWAYS_SO, *_ONE_VALUE):
                kept.append(word)
            elif flag in _ONE_VALUE:
                if not has_value:
                    value, at = " ".join(words[at : at + 1]), at + 1
                _check_value(flag, value)
        elif is_switch(name):
            _check(flag, name, not flag.startswith("--no-"))
        else:
            if not has_value:
                value, at = " ".join(words[at : at + 1]), at + 1
            _check(flag, name, value_of(value))
    return kept + list(words[at:])


def _check_value(flag: str, value: str) -> None:
    allowed, instead = _ONE_VALUE[flag]
    if value != allowed:
        raise ConfigError(f"argument {flag}: {value!r:.80} is not supported; only {allowed} is: {instead}")


def _check(flag: str, name: str, value: object) -> None:
    try:
        check_neutral(name, value)
    except ConfigError as error:
        raise ConfigError(f"argument {flag}: {FLAGS.get(flag, error)}") from None


def _option(flag: str) -> str | None:
    """Return the option of this flag, if it is a flag of vLLM and not of ours."""
    if flag in _SHORT:
        return _SHORT[flag]
    name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
    if is_neutral(name):
        return name
    name = name.removeprefix("no_")
    return name if is_neutral(name) and is_switch(name) else None
