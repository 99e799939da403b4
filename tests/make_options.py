"""Make docs/options.md from the declarations of every engine option in ipc/. `make map` writes it."""

from pathlib import Path

from ipc.options.config import OPTIONS
from ipc.options.option import DeclaredOption
from ipc.options.speculation import SpeculativeConfig
from tools.flags.options import aliases_of, flag_of, help_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
_HEAD = """# Engine options

Flags of `engine-core serve`, `generate` and `bench`; from Python, keywords of `LLM` and `AsyncLLM`:
`--max-num-seqs 8` is `max_num_seqs=8`. A value outside its bounds is refused with a message that says what is allowed.
`make map` makes this page from the declarations in `ipc/options/config.py` and `ipc/options/model_options.py`; a test
compares them.
"""


def made() -> str:
    """Return the page."""
    parts = [_HEAD]
    for group in dict.fromkeys(declared.option.group for declared in OPTIONS.values()):
        parts.append(f"\n## {group[0].upper()}{group[1:]}\n\n| option | values | meaning |\n|---|---|---|\n")
        parts += [_row(declared) for declared in OPTIONS.values() if declared.option.group == group]
    return "".join(parts)


def _row(declared: DeclaredOption) -> str:
    others = "".join(f", `{flag}`" for flag in aliases_of(declared))
    return f"| `{flag_of(declared.name)}`{others} | {_values(declared)} | {help_of(declared)} |\n"


def _values(declared: DeclaredOption) -> str:
    if declared.choices:
        return ", ".join(declared.choices)
    if declared.plain is bool:
        return "yes, no"
    if declared.plain in (int, float):
        return f"{'integer' if declared.plain is int else 'number'} {declared.bounds}"
    if declared.plain is SpeculativeConfig:
        return "JSON object"
    if declared.name == "executor_options":
        return "key and value"
    if declared.name == "limit_mm_per_prompt":
        return "kind and number"
    if declared.name == "override_generation_config":
        return "name and number"
    return "text" if declared.plain is str else "name and weight"


if __name__ == "__main__":
    PAGE.write_text(made())
