"""What /api/create makes of its fields and of a Modelfile."""

import json
from typing import Any

import pytest

from frontend.http.errors import HttpError
from frontend.http.many.created import read_create


def read(**fields: Any) -> tuple[str, dict[str, Any]]:
    return read_create(json.dumps({"model": "made", **fields}).encode())


def test_fields_and_a_modelfile_say_the_same() -> None:
    modelfile = """# a comment
FROM org/base
PARAMETER temperature 0.5
PARAMETER num_predict 7
PARAMETER num_ctx 512
SYSTEM \"\"\"Be kind.
And brief.\"\"\"
TEMPLATE {{ messages }}
ADAPTER /tone
LICENSE free
"""
    fields = {
        "from": "org/base",
        "parameters": {"temperature": 0.5, "num_predict": 7, "num_ctx": 512},
        "system": "Be kind.\nAnd brief.",
        "template": "{{ messages }}",
        "adapters": {"file": "/tone"},
    }
    found = read(**fields)
    assert found == read(modelfile=modelfile)
    assert found == (
        "org/base",
        {
            "system": "Be kind.\nAnd brief.",
            "chat_template": "{{ messages }}",
            "adapters": {"made": "/tone"},
            "max_model_len": 512,
            "override_generation_config": {"temperature": 0.5, "max_new_tokens": 7},
        },
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "say what the model is made from"),
        ({"from": "a", "template": "{{ .Prompt }}"}, "Jinja's language"),
        ({"from": "a", "template": "/etc/hostname"}, "must be the text of a template"),
        ({"from": "a", "parameters": {"stop": "x"}}, "no default of the parameter 'stop'"),
        ({"from": "a", "parameters": {"top_k": "many"}}, "top_k is a number"),
        ({"from": "a", "quantize": "q4"}, "quantize is not supported"),
        ({"from": "a", "adapters": {"x": "1", "y": "2"}}, "at most one adapter"),
        ({"modelfile": "FROM a\nMESSAGE user x"}, "MESSAGE is not supported"),
        ({"modelfile": "FROM a\n!"}, "no instruction at '!'"),
        ({"from": 1}, "the body cannot be read"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HttpError, match=message):
        read(**fields)
