"""What `make arm` runs with the wheel for ARM64 runs here too, with an engine that makes its tokens up."""

from typing import Any

import pytest

from engine_core import LLM
from tests.arm import demo

HALF_AN_HOUR_MS = 1_800_000


def test_an_engine_over_the_socket_says_what_an_embedded_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may leave a client no time to send, so silence ends its session after half an hour only."""
    said, leases_ms = demo.said, []

    def noted(llm: LLM, num_tokens: int) -> dict[str, Any]:
        leases_ms.append(llm.client.welcome.limits.lease_ms)
        return said(llm, num_tokens)

    monkeypatch.setattr(demo, "said", noted)
    monkeypatch.setattr(demo, "PROMPT", {"prompt_token_ids": [1, 2, 3]})
    options = {"executor": "fake", "max_model_len": 128}
    found = demo.over_the_socket(options, 3)
    assert len(found["tokens"]) == 3
    assert found == demo.embedded(options, 3)
    assert leases_ms == [HALF_AN_HOUR_MS, 0]  # an engine's own process has none


@pytest.mark.parametrize(("given", "expected"), [((), "auto"), (("int8",), "int8")])
def test_products_are_exact_unless_8_bits_are_asked_for(
    given: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(demo, "embedded", lambda options, _: asked.append(options))
    demo.main("portable", "bfloat16", "embedded", "1", *given)
    assert [options["quantization"] for options in asked] == [expected]
