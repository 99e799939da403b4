"""A server that drains answers the embeddings that it has begun."""

import json
import signal
import threading

from frontend.llm import LLM
from ipc.files.model_files import resolve_model
from tests.frontend.http.caller import Answer, serving, wait_for
from tests.frontend.http.conftest import FAKE


def test_a_drain_waits_for_embeddings() -> None:
    """The steps are slow, so that the signal arrives while requests run and others wait."""
    answers: list[Answer] = []
    options = ("--max-num-seqs", "2", "--executor-option", "step_us=50000")
    with serving(*FAKE, "-m", str(resolve_model(None)), *options) as caller:
        with LLM(connect=caller.connect) as llm:
            body = {"input": [f"text {n}" for n in range(24)]}
            asking = threading.Thread(target=lambda: answers.append(caller.post("/v1/embeddings", body)))
            asking.start()
            wait_for(lambda: llm.statistics().num_waiting > 0)
        caller.process.send_signal(signal.SIGTERM)
        asking.join(30)
        assert [answer.status for answer in answers] == [200], answers
        assert len(json.loads(answers[0].body)["data"]) == 24
        assert caller.process.wait(30) == 0
