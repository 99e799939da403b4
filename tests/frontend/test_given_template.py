"""chat_template: a template of the operator's own, for an engine and all its clients, or for one client alone."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from frontend.llm import LLM
from ipc.errors import ConfigError, ModelFileError
from ipc.files.model_files import resolve_model
from ipc.params.sampling_params import SamplingParams
from tests.frontend.http.caller import environment, serving

CHAT: Any = [{"role": "user", "content": "Hi"}]


def prompt_of(llm: LLM, **arguments: Any) -> str | None:
    (output,) = llm.chat(CHAT, SamplingParams(max_tokens=2), use_tqdm=False, **arguments)
    return output.prompt


def test_of_an_engine_and_of_a_client(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    options: dict[str, Any] = {"executor": "fake"}
    with LLM(str(resolve_model(None)), chat_template=str(tmp_path / "own.jinja"), **options) as llm:
        assert prompt_of(llm) == "[Hi]"
        assert prompt_of(llm, chat_template="({{ messages[0].content }})") == "(Hi)"  # of one call
        process = llm._engine._process
        assert process is not None
        address = process.address
        with LLM(connect=address) as other:
            assert prompt_of(other) == "[Hi]"
        with LLM(connect=address, chat_template="<{{ messages[0].content }}>") as third:
            assert prompt_of(third) == "<Hi>"
        with pytest.raises(ConfigError, match="leave out max_num_seqs"):
            LLM(connect=address, chat_template="{{ 1 }}", max_num_seqs=3)


@pytest.mark.parametrize(
    ("given", "text"), [("no/file", "is not a file on this machine"), ("{% for", "is not valid Jinja")]
)
def test_what_is_no_template_is_refused_at_the_start(given: str, text: str) -> None:
    with pytest.raises(ModelFileError, match=text):
        LLM(str(resolve_model(None)), executor="fake", chat_template=given)


def test_over_http_and_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("[{{ messages[0].content }}]")
    options = ["-m", str(resolve_model(None)), "--executor", "fake", "--chat-template", str(tmp_path / "own.jinja")]
    with serving(*options, "--listen", f"ipc://{tmp_path}/engine.sock") as caller:
        body = {"messages": CHAT, "return_token_strs": True}
        assert "".join(caller.post("/tokenize", body).json["token_strs"]) == "[Hi]"
        command = [sys.executable, "-m", "engine_core", "generate", "--connect", f"ipc://{tmp_path}/engine.sock"]
        command += ["--chat-template", "{{ nothing() }}", "--max-tokens", "2", "Hi"]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
        assert "'nothing' is undefined" in done.stdout + done.stderr
