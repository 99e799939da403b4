"""quoted(): quotes a text in Lark's notation."""

import json


def quoted(text: str) -> str:
    """Return a text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)
