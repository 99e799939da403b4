"""Methods of vLLM's classes that are not here are refused with a reason, and hasattr() finds none of them."""

import pytest

from frontend.absent_methods import ABSENT, AbsentMethods
from frontend.async_llm import AsyncLLM
from frontend.llm import LLM
from frontend.llm_engine import LLMEngine


@pytest.mark.parametrize("kind", [LLM, AsyncLLM, LLMEngine])
def test_they_are_refused_by_name(kind: type[AbsentMethods]) -> None:
    one = object.__new__(kind)
    for name, reason in ABSENT.items():
        assert not hasattr(one, name), name
        with pytest.raises(AttributeError) as caught:
            getattr(one, name)
        assert str(caught.value) == f"vLLM's {kind.__name__}.{name} is not supported by this version: {reason}"


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'genrate'"):
        object.__new__(LLM).genrate  # type: ignore[attr-defined]  # noqa: B018
