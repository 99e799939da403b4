"""pattern_of(): many choices as one regular expression."""

import re
from collections.abc import Sequence

#: Choices above which they are one regular expression: llguidance fails with 2,000 rules that begin at one position.
MANY_CHOICES = 1000
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")


def pattern_of(texts: Sequence[str]) -> str:
    """Return the regular expression, in Rust's syntax, that matches these texts."""
    return "|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in texts)
