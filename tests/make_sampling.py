"""Make the table of docs/sampling.md from the declarations of sampling parameters. `make map` writes it."""

from pathlib import Path

from ipc.params.parameter import DeclaredParameter
from ipc.params.sampling_params import NUMBERS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "sampling.md"
_BEGIN, _END = "<!-- parameters -->\n", "<!-- end of parameters -->\n"


def made(page: str) -> str:
    """Return the page with the table of today."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    head = "| parameter | values | default | meaning |\n|---|---|---|---|\n"
    return before + _BEGIN + head + "".join(map(_row, NUMBERS.values())) + _END + after


def _row(one: DeclaredParameter) -> str:
    names = "".join(f", also `{name}`" for name in one.parameter.names)
    kind = "integer" if one.kind is int else "number"
    values = f"{kind} from {_spelled(one.parameter.low)} to {_spelled(one.parameter.high)}"
    return f"| `{one.name}`{names} | {values} | {_spelled(one.default)} | {one.parameter.text} |\n"


def _spelled(number: float | None) -> str:
    """Return a number as the page has it: 2**31 - 1, 10000, none."""
    if number is None:
        return "none"
    for bits in (31, 63, 64):
        for power, text in ((2**bits - 1, f"2**{bits} - 1"), (-(2**bits), f"-2**{bits}")):
            if number == power:
                return text
    return f"{number:g}"


if __name__ == "__main__":
    PAGE.write_text(made(PAGE.read_text()))
