"""Code for another interpreter, where this suite's packages are: at the top of a checkout, or in an installed wheel."""

import ipc
from build_wheel.imports import move_imports

#: What comes before "ipc": "" over a checkout, "engine_core." over a wheel (tests/build_wheel/suite.py).
PREFIX = ipc.__name__.removesuffix("ipc")


def placed(code: str) -> str:
    """Return code with the imports that this suite itself has."""
    return move_imports(code) if PREFIX else code
