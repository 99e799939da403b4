"""aider-chat: a question, and a change of a file that it is asked for; it streams over /v1/chat/completions."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BASE, MODEL = os.environ["BASE_URL"], os.environ["MODEL"]
OPTIONS = (
    *("--openai-api-base", BASE, "--openai-api-key", "none", "--model", f"openai/{MODEL}"),
    *("--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--analytics-disable"),
    *("--no-show-release-notes", "--map-tokens", "0", "--no-pretty", "--no-detect-urls"),
)


def run(folder: Path, *words: str) -> str:
    """Run aider once in a folder -> what it printed."""
    variables = {**os.environ, "HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [str(Path(sys.executable).with_name("aider")), *OPTIONS, *words]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    # The second is printed for an answer that was ended by its length, which aider wants to be complete.
    assert re.search(r"Tokens: .* received|Output tokens: ~[1-9]", done.stdout), done.stdout + done.stderr
    return done.stdout


with tempfile.TemporaryDirectory() as name:
    home = Path(name)
    settings = home / "settings.yml"
    settings.write_text(f"- name: openai/{MODEL}\n  extra_params:\n    max_tokens: 200\n")
    (home / "hello.py").write_text('print("hello")\n')
    run(home, "--model-settings-file", str(settings), "--chat-mode", "ask", "--message", "Say hello.")
    asked = ("--edit-format", "whole", "--message", "Print goodbye.", "hello.py")
    run(home, "--model-settings-file", str(settings), *asked)
