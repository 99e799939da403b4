"""Random structural tags, and texts that are nearly theirs."""

import json
import random
from typing import Any

Json = dict[str, Any]

BEGINS = ["<a>", "<b>", "<f=x>", "[", ""]
ENDS = ["</a>", "</b>", "]", "aa", "</"]
TRIGGERS = ["<f=", "<a", "<b>", "["]
EXCLUDES = ["</f>", "!", "xx", "a"]
SCHEMAS: dict[str, list[str]] = {
    '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}': [
        '{"a":1}',
        '{ "a": -22}',
        "{}",
    ],
    '{"type":"array","items":{"type":"boolean"},"maxItems":2}': ["[]", "[true]", "[true, false]", "[1]"],
    '{"enum":["</a>","x"]}': ['"</a>"', '"x"', '"y"'],
    '{"type":"integer"}': ["0", "-12", "345", "1.5"],
}
REGEXES = {"[a-z]+": ["a", "foo"], "[0-9]{2,4}": ["12", "1"], "(foo|bar)*": ["", "foobar"], "a.c": ["abc", "a\nc"]}
WORDS = ["a", "x", " ", "<", "</", "hi", "1", "é", "!", "\n", "{", "<f="]


class RandomTags:
    """Formats and texts of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def format(self, depth: int) -> Json:
        """A format whose parts nest this deep."""
        rng = self.rng
        if depth == 0 or rng.random() < 0.2:
            return self._leaf()
        kinds = ("sequence", "or", "tag", "triggered_tags", "triggered_tags", "tags_with_separator", "dispatch")
        kind = rng.choice((*kinds, "optional", "plus", "star", "repeat"))
        if kind in ("sequence", "or"):
            return {"type": kind, "elements": [self.format(depth - 1) for _ in range(rng.randint(1, 3))]}
        if kind == "tag":
            return self._tag(depth)
        if kind == "tags_with_separator":
            tags = [self._tag(depth) for _ in range(rng.randint(1, 2))]
            return {"type": kind, "tags": tags, "separator": rng.choice([",", ""]), **self._flags()}
        if kind == "dispatch":
            rules = [[trigger, self.format(depth - 1)] for trigger in rng.sample(TRIGGERS, rng.randint(1, 2))]
            return {"type": kind, "rules": rules, "loop": rng.random() < 0.6, "excludes": self._excludes()}
        if kind == "triggered_tags":
            triggers = rng.sample(TRIGGERS, rng.randint(1, 2))
            tags = [{**self._tag(depth), "begin": one + rng.choice(["", "x>"])} for one in triggers]
            return {"type": kind, "triggers": triggers, "tags": tags, "excludes": self._excludes(), **self._flags()}
        bounds = {"min": rng.randint(0, 1), "max": rng.choice([-1, 1, 2])} if kind == "repeat" else {}
        return {"type": kind, "content": self.format(depth - 1), **bounds}

    def text(self, node: Json) -> str:
        """A text that may be the format's."""
        rng = self.rng
        match node["type"]:
            case "const_string":
                return str(node["value"])
            case "any_text":
                return self._free()
            case "regex":
                return rng.choice(REGEXES[node["pattern"]])
            case "json_schema":
                return rng.choice(SCHEMAS[json.dumps(node["json_schema"], separators=(",", ":"))])
            case "sequence":
                return "".join(map(self.text, node["elements"]))
            case "or":
                return self.text(rng.choice(node["elements"]))
            case "tag":
                end = node["end"] if isinstance(node["end"], str) else rng.choice(node["end"])
                return f"{node['begin']}{self.text(node['content'])}{end}"
            case "tags_with_separator":
                return str(node["separator"]).join(
                    self.text(rng.choice(node["tags"])) for _ in range(rng.randint(0, 3))
                )
            case "triggered_tags":
                return self._free() + "".join(
                    self.text(rng.choice(node["tags"])) + self._free() for _ in range(rng.randint(0, 3))
                )
            case "dispatch":
                chosen = [rng.choice(node["rules"]) for _ in range(rng.randint(0, 3))]
                return self._free() + "".join(trigger + self.text(one) + self._free() for trigger, one in chosen)
            case _:
                return "".join(self.text(node["content"]) for _ in range(rng.randint(0, 3)))

    def changed(self, text: str) -> str:
        """The text with something left out, repeated or put in."""
        first, second = sorted(self.rng.choices(range(len(text) + 1), k=2))
        return text[:first] + self.rng.choice([self._free(), text[first:second] * 2, ""]) + text[second:]

    def _leaf(self) -> Json:
        match self.rng.choice(("const_string", "any_text", "regex", "json_schema")):
            case "const_string":
                return {"type": "const_string", "value": self.rng.choice(["yes", "no", "", "<a>", "x"])}
            case "any_text":
                limit = {"max_chars": self.rng.randint(0, 4)} if self.rng.random() < 0.2 else {}
                return {"type": "any_text", "excludes": self._excludes(), **limit}
            case "regex":
                return {"type": "regex", "pattern": self.rng.choice(list(REGEXES))}
            case _:
                return {"type": "json_schema", "json_schema": json.loads(self.rng.choice(list(SCHEMAS)))}

    def _tag(self, depth: int) -> Json:
        end: Any = self.rng.sample(ENDS, 2) if self.rng.random() < 0.3 else self.rng.choice(ENDS)
        begin = self.rng.choice(BEGINS)
        return {"type": "tag", "begin": begin, "content": self.format(depth - 1), "end": end}

    def _flags(self) -> Json:
        return {"at_least_one": self.rng.random() < 0.4, "stop_after_first": self.rng.random() < 0.4}

    def _excludes(self) -> list[str]:
        return [self.rng.choice(EXCLUDES)] if self.rng.random() < 0.3 else []

    def _free(self) -> str:
        return "".join(self.rng.choices(WORDS, k=self.rng.choice([0, 0, 1, 2, 4])))
