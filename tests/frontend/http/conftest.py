"""One server with made-up tokens and the demo model's tokenizer, for all tests of HTTP."""

from collections.abc import Iterator

import pytest

from frontend.llm import LLM
from ipc.files.model_files import resolve_model
from tests.frontend.http.caller import Caller, serving

FAKE = (
    "--executor",
    "fake",
    "--executor-option",
    "vocab_size=49152",
    "--executor-option",
    "max_model_len=4096",
    "--max-num-seqs",
    "64",
)


@pytest.fixture(scope="session")
def served() -> Iterator[Caller]:
    with serving(*FAKE, "-m", str(resolve_model(None)), "--served-model-name", "demo", "other/name") as caller:
        yield caller


@pytest.fixture(scope="session")
def llm(served: Caller) -> Iterator[LLM]:
    """The same engine through its Python client."""
    with LLM(connect=served.connect) as llm:
        yield llm
