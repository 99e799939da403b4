"""llm, the command line of datasette's author: a model declared in its extra-openai-models.yaml."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: {os.environ['MODEL']}\n  api_base: {os.environ['BASE_URL']}\n"
    )
    for extra in ([], ["--no-stream"]):
        command = [sys.executable, "-m", "llm", "-m", "here", "-o", "max_tokens", "16", "-o", "temperature", "0"]
        environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
        answer = subprocess.run(
            [*command, *extra, "Say hello."], env=environment, check=True, capture_output=True, text=True, timeout=100
        )
        assert answer.stdout.strip(), answer.stderr
