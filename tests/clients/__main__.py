"""Run real HTTP clients against `engine-core serve --models` with two models in turn: `make clients`.

Both have the demo model's files, and only one fits into the memory at a time, so each program loads its model.

Each folder here with a requirements.txt is an environment of its own (litellm needs another openai than the others).
node/ and agents/ are such, too; their clients need Node.js 20 and npm, and are otherwise left out, which the output
says. Each use_*.py and use_*.mjs is a program as the client's users write it, and fails by its exit code. Those of
shapes/ send what programs send that no package index has, or only with all of their own services. The output has each
client with its version, the result, and each distinct request that the client was seen to send.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from ipc.files.model_files import resolve_model
from tests.clients.recorder import Recorder
from tests.clients.service import PATIENCE_S, ROOT, environment, serving

HERE = Path(__file__).resolve().parent
MODELS = ("first:demo", "second:demo")  # Ollama's lists have tags


def node_environment(folder: Path, where: Path) -> Path:
    """Install the packages of this folder, unless they are there -> where its programs run: they import from there."""
    home = where / folder.name
    if not (home / "node_modules").exists():
        home.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "package.json", home)
        subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=home, check=True)
    for script in folder.glob("use_*.mjs"):
        shutil.copy(script, home)
    return home


def options_of(folder: Path) -> list[str | Path]:
    """Write the list of the models -> the server's options. The store of responses and batches is there, too."""
    path, demo = folder / "models.toml", json.dumps(str(resolve_model(None)))
    table = '[models."{}"]\nmodel = {}\nkv_cache_memory_bytes = "512M"\n'
    path.write_text('memory = "1200M"\n' + "".join(table.format(name, demo) for name in MODELS))
    return ["--models", path, "--store", folder / "store.db"]


class Client(NamedTuple):
    """One program: its name and version, and its command."""

    version: str
    command: list[str | Path]


def client_of(script: Path, where: Path) -> Client:
    """Make the environment of a script, and return it as a client."""
    if script.suffix == ".mjs":
        home, (name,) = node_environment(script.parent, where), re.findall(r"^// ([\w@/-]+)", script.read_text())
        package = json.loads((home / "node_modules" / name / "package.json").read_text())
        return Client(f"{name} {package['version']}", ["node", home / script.name])
    python = environment(script.parent, where)
    return Client(version(python, script), [python, script])


def scripts() -> list[Path]:
    """Return all programs that can run here."""
    found = [*HERE.glob("*/use_*.py"), *HERE.glob("*/use_*.mjs")]
    if shutil.which("node") is None or shutil.which("npm") is None:
        print("left out: the clients in JavaScript, which need Node.js and npm")
        found = [script for script in found if script.suffix == ".py"]
    return sorted(found)


def version(python: Path, script: Path) -> str:
    """Return the version of the client that a script names in the first words of its docstring."""
    (name,) = re.findall(r'^"""([\w-]+)', script.read_text())
    ask = f"import importlib.metadata as m; print(m.version({name!r}))"
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    return f"{name} {found.stdout.strip()}"


def main() -> int:
    """Run all clients, or those whose names have the given text; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--environments", type=Path, default=ROOT / ".clients", help="folder of the environments")
    parser.add_argument("names", nargs="*", help="only clients whose script's name has one of these texts")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(*options_of(Path(folder))) as port:
        num_failed = run_all(port, parsed.names, parsed.environments)
    print(f"engine-core {importlib.metadata.version('llm-engine-core')}: {num_failed} failed")
    return 1 if num_failed else 0


def run_all(port: int, names: list[str], environments: Path) -> int:
    """Run the clients whose names have one of these texts, against the server at a port -> how many failed."""
    recorder, num_failed = Recorder(port), 0
    base = f"http://127.0.0.1:{recorder.port}"
    variables = {**os.environ, "BASE_URL": f"{base}/v1", "SERVER": base}
    variables |= {"ENGINE_PYTHON": sys.executable, "ROOT": str(ROOT)}
    for index, script in enumerate(scripts()):
        variables["MODEL"] = MODELS[index % len(MODELS)]
        if names and not any(name in script.name for name in names):
            continue
        client = client_of(script, environments)
        begin = time.monotonic()
        try:
            run = subprocess.run(client.command, env=variables, capture_output=True, text=True, timeout=PATIENCE_S)
            failed, errors = run.returncode != 0, run.stderr
        except subprocess.TimeoutExpired:
            failed, errors = True, f"not done after {PATIENCE_S} s"
        num_failed += failed
        result = "failed" if failed else "ok"
        print(f"{result:7}{script.stem:30}{client.version:34}{time.monotonic() - begin:6.1f} s", flush=True)
        for line in recorder.requests():
            print(f"       {line}", flush=True)
        if failed:
            print(errors[-3000:], flush=True)
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
