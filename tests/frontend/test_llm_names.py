"""What LLM and AsyncLLM both have: close(), shutdown() and a repr() that says what they are."""

import pytest

from frontend.async_llm import AsyncLLM
from frontend.llm import LLM
from ipc.errors import EngineDeadError
from tests.frontend.conftest import PlayedEngine


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize("name", ["close", "shutdown"])
def test_both_names_end_both(kind: type[LLM | AsyncLLM], name: str, played_connection: PlayedEngine) -> None:
    llm = kind(connect="ipc:///played", skip_tokenizer_init=True)
    assert repr(llm) == f"{kind.__name__}(model='played', engine='running')"
    for _ in range(2):
        getattr(llm, name)()
    assert played_connection.closed
    assert repr(llm) == f"{kind.__name__}(model='played', engine='this client was closed')"
    with pytest.raises(EngineDeadError, match="this client was closed"):
        llm.client.statistics()


def test_an_engine_that_died_says_how(played_connection: PlayedEngine) -> None:
    with LLM(connect="ipc:///played", skip_tokenizer_init=True) as llm:
        played_connection.die("the engine process (5) was killed by SIGKILL")
        assert repr(llm) == "LLM(model='played', engine='the engine process (5) was killed by SIGKILL')"
