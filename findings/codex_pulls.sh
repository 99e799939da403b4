#!/usr/bin/env bash
# Codex pulls a model from Ollama again if its name has no tag.
#
# Ollama lists models with a tag, and takes `demo` for `demo:latest`. Codex with `--oss --local-provider ollama -m demo`
# looks for exactly `demo` in that list and then asks /api/pull for it, although `demo:latest` is there. It goes on only
# after a line with the status `success`. It also requires Ollama 0.13.4 or newer, by /api/version.
#
# What follows: a server with Ollama's API has to answer /api/pull for what it serves, even if it can pull nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" @openai/codex@0.171.0 > /dev/null
cat > "$folder/program.py" <<'PROGRAM'
import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

seen, version = [], "0.13.4"


class Ollama(BaseHTTPRequestHandler):
    def answer(self, body: object, status: int = 200) -> None:
        text = json.dumps(body).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        known = {"/api/version": {"version": version}, "/api/tags": {"models": [{"name": "demo:latest", "model": "demo:latest"}]}}
        self.answer(known.get(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/api/pull":
            seen.append(f"asked to pull {body['model']}")
        self.answer({"status": "success"} if self.path == "/api/pull" else {"error": "no"}, 200 if self.path == "/api/pull" else 400)

    def log_message(self, *_: object) -> None:
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Ollama)
threading.Thread(target=server.serve_forever, daemon=True).start()
base = f"http://127.0.0.1:{server.server_port}/v1"
env = {**os.environ, "HOME": os.getcwd(), "CODEX_HOME": os.getcwd(), "CODEX_OSS_BASE_URL": base}


def run(model: str) -> str:
    words = ["node_modules/.bin/codex", "exec", "--skip-git-repo-check", "--oss", "--local-provider", "ollama", "-m", model, "hi"]
    return subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120).stderr


for model in ("demo:latest", "demo"):
    run(model)
    print(f"{model}:", *(seen or ["nothing pulled"]))
    seen.clear()
version = "0.13.3"
print(next(line for line in run("demo:latest").splitlines() if line.startswith("Error")))
PROGRAM
cat > "$folder/expected" <<'EXPECTED'
demo:latest: nothing pulled
demo: asked to pull demo
Error: OSS setup failed: Ollama 0.13.3 is too old. Codex requires Ollama 0.13.4 or newer.
EXPECTED
cd "$folder"
python3 -s program.py > seen
cat seen
diff expected seen > /dev/null || { echo "CHANGED; it was:"; cat expected; exit 1; }
