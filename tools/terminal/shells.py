"""Completion scripts of bash, zsh and fish for declared commands."""

from collections.abc import Sequence
from typing import NamedTuple

#: Prints the names of the models in the cache, one a line.
_MODELS = "engine-core list --quiet 2>/dev/null"


class Values(NamedTuple):
    """What may stand behind a flag, or as an argument. All empty: a value that cannot be listed."""

    choices: tuple[str, ...] = ()
    has_models: bool = False
    has_files: bool = False


class Flag(NamedTuple):
    """An option with all its names; values None = it takes none."""

    names: tuple[str, ...]
    help: str
    values: Values | None


class Command(NamedTuple):
    """A command with its options; positional: what its arguments may be."""

    name: str
    help: str
    flags: tuple[Flag, ...]
    positional: Values


def bash(commands: Sequence[Command]) -> str:
    """Return the script of bash. It reads the line, since bash divides --dtype=auto and org/name:Q4_K_M into words."""
    cases = "".join(_bash_case(command) for command in commands)
    return f"""# Completion of engine-core for bash, made by `engine-core completion bash`.
_engine_core() {{
    local line=${{COMP_LINE:0:COMP_POINT}} words= models= files= before name
    local word=${{line##*[[:space:]]}}
    read -ra before <<< "${{line%"$word"}}"
    local command=${{before[1]}} flag=${{before[-1]}}
    COMPREPLY=()
    if ((${{#before[@]}} == 1)); then
        COMPREPLY=($(compgen -W "{" ".join(command.name for command in commands)}" -- "$word"))
        return
    fi
    [[ $word == --*=* ]] && flag=${{word%%=*}} word=${{word#*=}}
    case $command in
{cases}    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    # Not as words of compgen, which expands them: a model's file may have any name, also that of a command.
    [[ $models ]] && while IFS= read -r name; do
        [[ $name == "$word"* ]] && printf -v name %q "$name" && COMPREPLY+=("$name")
    done < <({_MODELS})
    [[ $files ]] && COMPREPLY+=($(compgen -f -- "$word"))
    [[ $files && ! $models ]] && compopt -o filenames 2>/dev/null
    [[ $word == *:* && $COMP_WORDBREAKS == *:* ]] && COMPREPLY=("${{COMPREPLY[@]#"${{word%:*}}:"}}")
    return 0
}}
complete -o bashdefault -F _engine_core engine-core
"""


def _bash_case(command: Command) -> str:
    groups: dict[Values, list[str]] = {}
    for flag in command.flags:
        if flag.values is not None:
            groups.setdefault(flag.values, []).extend(flag.names)
    cases = "".join(f"        {'|'.join(names)}) {_bash_values(values)};;\n" for values, names in groups.items())
    flags = " ".join(name for flag in command.flags for name in flag.names)
    return (
        f"    {command.name})\n        case $flag in\n{cases}"
        f'        *) if [[ $word == -* ]]; then words="{flags}"; else {_bash_values(command.positional)}; fi;;\n'
        "        esac;;\n"
    )


def _bash_values(values: Values) -> str:
    parts = [f'words="{" ".join(values.choices)}"'] if values.choices else []
    parts += ["models=1"] * values.has_models + ["files=1"] * values.has_files
    return "; ".join(parts) or ":"


def zsh(commands: Sequence[Command]) -> str:
    """Return the script of zsh."""
    names = "\n".join(f"        {_quoted(f'{command.name}:{_line(command.help)}')}" for command in commands)
    cases = "".join(_zsh_case(command) for command in commands)
    return f"""#compdef engine-core
# Completion of engine-core for zsh, made by `engine-core completion zsh`.
_engine_core_models() {{
    local -a models=(${{(f)"$({_MODELS})"}})
    compadd -a models
    _files
}}
_engine_core() {{
    local -a commands=(
{names}
    )
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    ((CURRENT--))
    case $command in
{cases}    esac
}}
compdef _engine_core engine-core
"""


def _zsh_case(command: Command) -> str:
    specifications = []
    for flag in command.flags:
        text = _line(flag.help).replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
        action = "" if flag.values is None else f":value:{_zsh_action(flag.values)}"
        specifications += [_quoted(f"*{name}[{text}]{action}") for name in flag.names]
    specifications.append(_quoted(f"*:argument:{_zsh_action(command.positional)}"))
    return f"    {command.name}) _arguments -S {' '.join(specifications)};;\n"


def _zsh_action(values: Values) -> str:
    if values.choices:
        return f"({' '.join(values.choices)})"
    return "_engine_core_models" if values.has_models else "_files" if values.has_files else " "


def fish(commands: Sequence[Command]) -> str:
    """Return the script of fish."""
    lines = [
        "# Completion of engine-core for fish, made by `engine-core completion fish`.",
        "complete -c engine-core -f",
    ]
    first = "-n __fish_use_subcommand"
    for command in commands:
        lines.append(f"complete -c engine-core {first} -a {command.name} -d {_fish_quoted(_line(command.help))}")
        where = f"complete -c engine-core -n '__fish_seen_subcommand_from {command.name}'"
        for flag in command.flags:
            names = " ".join(map(_fish_name, flag.names))
            values = "" if flag.values is None else f" {_fish_values(flag.values)}"
            lines.append(f"{where} {names}{values} -d {_fish_quoted(_line(flag.help))}")
        if any(command.positional):
            lines.append(f"{where} {_fish_values(command.positional).replace('-x ', '').replace('-r ', '')}")
    return "\n".join(lines) + "\n"


def _fish_name(name: str) -> str:
    if name.startswith("--"):
        return f"-l {name[2:]}"
    return f"-{'s' if len(name) == 2 else 'o'} {name[1:]}"


def _fish_values(values: Values) -> str:
    if values.choices:
        return f"-x -a {_fish_quoted(' '.join(values.choices))}"
    if values.has_models:
        return f"-r -F -a '({_MODELS})'"
    return "-r -F" if values.has_files else "-x"


def _line(text: str) -> str:
    return text.partition(";")[0]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
