"""Command line flags of the engine's options, made from their declarations in ipc/options/."""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn

import msgspec

from ipc.errors import ConfigError
from ipc.options.config import OPTIONS
from ipc.options.neutral_options import ELSEWHERE, WITHOUT_EFFECT, is_neutral
from ipc.options.option import DeclaredOption, nearest, parse_bytes
from ipc.options.speculation import SpeculativeConfig
from ipc.params.sampling_params import NUMBERS
from tools.flags.hints import FLAGS, NUMBER_FLAGS
from tools.flags.neutral_flags import without_neutral

_SHORT = re.compile(r"-[A-Za-z]+")


#: A flag that opens the server to other machines is never suggested for a misspelled one.
_NEVER_OFFERED = ("--insecure", "--allow-request-templates")


class _HelpFormatter(argparse.HelpFormatter):
    """argparse's formatter; a usage line that was given is wrapped, too, and texts keep their paragraphs."""

    def _format_usage(self, usage: str | None, *further: Any) -> str:
        text = super()._format_usage(usage, *further)
        if usage is None:  # argparse has wrapped it
            return text
        wrap = partial(textwrap.fill, width=self._width, break_long_words=False, break_on_hyphens=False)
        return wrap(text, subsequent_indent="  ") + "\n\n"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(fill(paragraph, width, indent) for paragraph in text.split("\n\n"))


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser without abbreviated flags; its error for an unknown flag suggests the nearest known one."""

    #: Called with each parser before it parses; tools/commands/completion.py reads the declarations this way.
    before_parsing: "ClassVar[Callable[[ArgumentParser], None] | None]" = None

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=options.pop("formatter_class", _HelpFormatter), **options)
        self.has_engine_options = False  # then they may also come from the environment and a file

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the namespace of the arguments; end the process with a message for an unknown one."""
        if ArgumentParser.before_parsing is not None:
            ArgumentParser.before_parsing(self)
        args = list(sys.argv[1:] if args is None else args)
        if self.has_engine_options:
            try:
                args = without_neutral(args, self._option_string_actions)
            except ConfigError as error:
                self.error(str(error))
        self._refuse_abbreviations(args)
        if self.has_engine_options:
            args = [*words_from_elsewhere(args), *args]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return parsed

    def _refuse_abbreviations(self, words: Sequence[str]) -> None:
        """Refuse -n if only -np exists, and -md: argparse reads them as -np and -m, in spite of allow_abbrev."""
        known = {flag for action in self._actions for flag in action.option_strings}
        for word in words[: words.index("--")] if "--" in words else words:
            if _SHORT.fullmatch(word) and word not in known and (word[:2] not in known or word in FLAGS):
                self._refuse([word])

    def _refuse(self, unknown: list[str]) -> NoReturn:
        shown = [flag for action in self._actions if action.help != argparse.SUPPRESS for flag in action.option_strings]
        name = unknown[0].split("=", 1)[0]
        if (field := _field_of(name)) is not None and flag_of(field) not in shown and self.has_engine_options:
            text = f"requests say {field}; defaults are set by --override-generation-config NAME=X"
            self.error(f"unknown argument {unknown[0]}: {text}")
        if name in FLAGS and name not in shown:
            self.error(f"unknown argument {unknown[0]}: {FLAGS[name]}")
        option = name.lstrip("-").removeprefix("no-").replace("-", "_")
        if is_neutral(option):
            what = "has no effect here" if option in WITHOUT_EFFECT else "is not supported in this version"
            self.error(f"unknown argument {unknown[0]}: it is a flag of vLLM and {what}; leave it out")
        if option in ELSEWHERE and self.has_engine_options:
            self.error(f"unknown argument {unknown[0]}: {ELSEWHERE[option]}")
        near = nearest(name, [flag for flag in shown if flag not in _NEVER_OFFERED])
        self.error(f"unknown argument {unknown[0]}" + (f"; did you mean {near}?" if near else ""))


def _field_of(flag: str) -> str | None:
    """Return the number of SamplingParams that a flag of this or another engine is for; None for another flag."""
    option = flag.removeprefix("--").replace("-", "_")
    named = (one.name for one in NUMBERS.values() if option in (one.name, *one.parameter.names))
    return NUMBER_FLAGS.get(flag) or next(named, None)


def add_engine_options(parser: ArgumentParser) -> None:
    """Add one flag for each field of EngineConfig, in groups; options that are not given are not in the namespace."""
    parser.has_engine_options = True
    parser.add_argument(
        CONFIG_FLAG, metavar="FILE", help="engine options from a TOML file; ENGINE_CORE_MAX_NUM_SEQS=8 works too"
    )
    groups = dict.fromkeys(declared.option.group for declared in OPTIONS.values())
    sections = {group: parser.add_argument_group(f"engine options: {group}") for group in groups}
    for name, declared in OPTIONS.items():
        section, arguments = sections[declared.option.group], _argument(declared)
        section.add_argument(flag_of(name), dest=name, default=argparse.SUPPRESS, help=help_of(declared), **arguments)
        if aliases := aliases_of(declared):
            arguments.pop("metavar", None)
            section.add_argument(*aliases, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **arguments)


def flag_of(name: str) -> str:
    """Return the flag of an option: --max-num-seqs for max_num_seqs."""
    return "--" + name.replace("_", "-")


def aliases_of(declared: DeclaredOption) -> tuple[str, ...]:
    """Return the option's flags in other engines; they are accepted, but not shown."""
    return (*declared.option.flags, *map(flag_of, declared.option.names))


def help_of(declared: DeclaredOption) -> str:
    """Return the option's help text, with its default unless the text already says it."""
    text = declared.option.help
    if "default:" not in text and declared.default is not None and declared.default != {}:
        text += f"; default: {_spell(declared.default)}"
    return text


def engine_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options that were given, by their names in EngineConfig."""
    return {name: getattr(parsed, name) for name in OPTIONS if hasattr(parsed, name)}


def bytes_argument(text: str) -> int:
    """Return '1048576', '512M' or '2G' as a number of bytes, for argparse. Errors: ArgumentTypeError."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _choice(declared: DeclaredOption, text: str) -> str:
    """Return a value in our spelling. Errors: ArgumentTypeError for a value of vLLM that is refused for a stated
    reason.
    """
    option = declared.option
    if text in option.refused:
        allowed = ", ".join(declared.choices)
        raise argparse.ArgumentTypeError(f"{text} is not one of {allowed}: {option.refused[text]}")
    return option.spellings.get(text, text)


def _argument(declared: DeclaredOption) -> dict[str, Any]:
    if declared.choices:
        return {"type": partial(_choice, declared), "choices": declared.choices}
    if declared.name == "classifier_from_token":
        return {"type": str, "metavar": "NO,YES"}
    if declared.name == "client_weights":
        return {"action": _Weights, "metavar": "NAME=W"}
    if declared.name == "limit_mm_per_prompt":
        return {"action": _Counts, "metavar": "KIND=N"}
    if declared.name == "override_generation_config":
        return {"action": _Weights, "metavar": "NAME=X"}
    if declared.name == "executor_options":
        return {"action": _Pairs, "metavar": "KEY=VALUE"}
    if declared.name == "lora_modules":
        return {"action": Modules, "metavar": "NAME=PATH", "nargs": "+"}
    if declared.name == "executor":
        return {"type": str, "metavar": "NAME"}
    if declared.plain is SpeculativeConfig:
        return {"type": str, "metavar": "JSON"}
    if declared.plain is bool:
        return {"action": argparse.BooleanOptionalAction}
    if declared.is_bytes:
        return {"type": bytes_argument, "metavar": "BYTES"}
    if declared.plain is float:
        return {"type": float, "metavar": "X"}
    return (
        {"type": int, "metavar": "N"}
        if declared.plain is int
        else {"type": str, "metavar": declared.option.metavar or "PATH"}
    )


class _Weights(argparse.Action):
    """Parser of NAME=W or a JSON object of numbers; several flags are merged."""

    number: type[int] | type[float] = float

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        weights = dict(getattr(namespace, self.dest, {}))
        try:
            if values.startswith("{"):
                weights |= msgspec.json.decode(values, type=dict[str, self.number])  # type: ignore[name-defined]
            else:
                name, _, weight = values.rpartition("=")
                weights[name] = self.number(weight)
        except ValueError:  # msgspec's errors are ValueErrors too
            parser.error(f"argument {option}: expected {self.metavar} or a JSON object of such, got {values!r}")
        setattr(namespace, self.dest, weights)


class _Counts(_Weights):
    """Parser of KIND=N or a JSON object of integers."""

    number = int


class _Pairs(argparse.Action):
    """Parser of KEY=VALUE; several flags are merged."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        key, is_given, value = values.partition("=")
        if not key or not is_given:
            parser.error(f"argument {option}: expected KEY=VALUE, got {values!r}")
        setattr(namespace, self.dest, getattr(namespace, self.dest, {}) | {key: value})


class Modules(argparse.Action):
    """Parser of NAME=PATH, or vLLM's JSON objects {"name": ..., "path": ...}; several words and flags are merged."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        modules = dict(getattr(namespace, self.dest, {}))
        for value in values:
            try:
                module = msgspec.json.decode(value, type=_Module) if value.startswith("{") else None
            except msgspec.DecodeError as error:
                parser.error(f"argument {option}: {error}: {value!r}")
            name, is_given, path = (module.name, "=", module.path) if module else value.partition("=")
            if not name or not is_given or not path:
                parser.error(f'argument {option}: expected NAME=PATH or {{"name": NAME, "path": PATH}}, got {value!r}')
            modules[name] = path
        setattr(namespace, self.dest, modules)


class _Module(msgspec.Struct):
    """An adapter in the JSON form of vLLM's --lora-modules; other keys are ignored."""

    name: str
    path: str


def _spell(default: object) -> str:
    return {True: "yes", False: "no"}[default] if isinstance(default, bool) else str(default)


def print_error(message: str) -> None:
    """Print a command-line error to stderr."""
    print(f"engine-core: error: {message}", file=sys.stderr, flush=True)


# Engine options from the environment and from a file: they become flags, before the given ones.
#
# A flag takes precedence over the file, and the file over the environment.


CONFIG_FLAG = "--config"
PREFIX = "ENGINE_CORE_"
_CONNECT = "--connect"
#: A variable that begins with PREFIX may belong to another program (Kubernetes sets such for a service of that name):
#: it is refused only if it is at least this similar to an option's.
_LIKENESS = 0.85
_OTHER_VARIABLES = ("ENGINE_CORE_API_KEY", "ENGINE_CORE_USE_MODELSCOPE")
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def words_from_elsewhere(words: Sequence[str]) -> list[str]:
    """Return the flags from the environment and from the file that `words` name, with their values.

    A running engine already has its options, so there are none with --connect. Errors: ConfigError.
    """
    words = words[: words.index("--")] if "--" in words else words
    if any(word.partition("=")[0] == _CONNECT for word in words):
        return []
    found = []
    for variable, value in os.environ.items():
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or variable in _OTHER_VARIABLES:
            continue
        if name in OPTIONS:
            found += _words(name, value, variable) if value else []
        elif near := nearest(name, OPTIONS, _LIKENESS):
            raise ConfigError(f"{variable} is no option; did you mean {PREFIX}{near.upper()}?")
    if (path := _path(words)) is not None:
        found += _words_of_file(path)
    return found


def _path(words: Sequence[str]) -> str | None:
    path = None
    for index, word in enumerate(words):
        flag, is_joined, value = word.partition("=")
        if flag == CONFIG_FLAG:
            path = value if is_joined else next(iter(words[index + 1 : index + 2]), None)
    return path


def _words_of_file(path: str) -> list[str]:
    import tomllib  # most commands read no such file, and its import takes 4 ms

    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{CONFIG_FLAG} {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{CONFIG_FLAG} {path} is not TOML: {error}") from None
    found = []
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in OPTIONS:
            near = nearest(name, OPTIONS)
            hint = f"did you mean {near!r}? " if near else ""
            raise ConfigError(f"{CONFIG_FLAG} {path}: unknown option {key!r}; {hint}docs/options.md lists all")
        parts = [f"{one}={part}" for one, part in value.items()] if isinstance(value, dict) else [value]
        for part in parts:
            text = str(part).lower() if isinstance(part, bool) else str(part)
            found += _words(name, text, f"{CONFIG_FLAG} {path}: {key}")
    return found


def _words(name: str, value: str, where: str) -> list[str]:
    flag, declared = flag_of(name), OPTIONS[name]
    if declared.plain is not bool:
        _check_text(declared, value, where)
        return [f"{flag}={value}"]
    if value.lower() not in (*_YES, *_NO):
        raise ConfigError(f"{where} must be yes or no; got {value!r:.80}")
    return [flag if value.lower() in _YES else "--no-" + flag.removeprefix("--")]


def _check_text(declared: DeclaredOption, text: str, where: str) -> None:
    """Check an option's text that no flag gave, so that an error names where it was. Errors: ConfigError."""
    if (convert := _argument(declared).get("type")) is None:
        return
    try:
        declared.check(convert(text))
    except (argparse.ArgumentTypeError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from None
    except ValueError:
        raise ConfigError(f"{where} must be a number; got {text!r:.80}") from None
