"""What `make arm` runs with the wheel for ARM64 runs here too, with an engine that makes its tokens up."""

from typing import Any

import pytest

from tests.arm import demo


def test_an_engine_over_the_socket_says_what_an_embedded_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROMPT", {"prompt_token_ids": [1, 2, 3]})
    options = {"executor": "fake", "max_model_len": 128}
    found = demo.over_the_socket(options, 3)
    assert len(found["tokens"]) == 3
    assert found == demo.embedded(options, 3)


@pytest.mark.parametrize(("given", "expected"), [((), "auto"), (("int8",), "int8")])
def test_products_are_exact_unless_8_bits_are_asked_for(
    given: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(demo, "embedded", lambda options, _: asked.append(options))
    demo.main("portable", "bfloat16", "embedded", "1", *given)
    assert [options["quantization"] for options in asked] == [expected]
