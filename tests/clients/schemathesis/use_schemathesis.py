"""schemathesis: all routes of /openapi.json, with bodies that fit it and bodies that do not; made-up tokens.

A server of its own, whose answers are short and which has a key. No answer may be 5xx, but for 501, and each must be of
a status and a type that the description has. A body that does not fit it must be refused.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEY = "schemathesis"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "negative_data_rejection",
    "ignored_auth",
)
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
python, root = os.environ["ENGINE_PYTHON"], os.environ["ROOT"]
find = "from ipc.files.model_files import resolve_model; print(resolve_model(None))"
model = subprocess.run([python, "-c", find], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
fake = ("--executor", "fake", "--executor-option", "vocab_size=49152", "--executor-option", "max_model_len=256")
serve = [python, "-m", "tools.cli", "serve", "--http", url.removeprefix("http://"), "-m", model, *fake]
server = subprocess.Popen(serve, cwd=root, env={**os.environ, "ENGINE_CORE_API_KEY": KEY}, stderr=subprocess.DEVNULL)
try:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
            break
        except OSError:
            time.sleep(0.1)
    seen = subprocess.run(
        [
            *(Path(sys.executable).parent / "st", "--config-file", HERE / "schemathesis.toml"),
            *("run", f"{url}/openapi.json", "--header", f"Authorization: Bearer {KEY}", "--seed", "1"),
            *("--max-examples", "8", "--max-time", "60", "--no-shrink", "--continue-on-failure", "--warnings", "off"),
            *("--phases", "examples,coverage,fuzzing", "--checks", ",".join(CHECKS), "--request-timeout", "30"),
        ],
        capture_output=True,
        text=True,
    )
finally:
    server.terminate()
    status = server.wait(60)
print(seen.stdout[-3000:])
assert seen.returncode == 0, seen.stdout[-6000:]
assert status == 0, f"the server ended with {status}"
