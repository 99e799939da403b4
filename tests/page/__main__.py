"""Walk through the chat page in a headless Chromium, as a user does: `make page`.

The browser is Debian's `chromium`, driven by Playwright in an environment of its own. walk.py has the steps; two
servers answer them: one with many models behind a key, and one with one model. `--pictures FOLDER` also writes pictures
of the page, and those of docs/http.md.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ipc.files.model_files import resolve_model
from tests.clients.service import ROOT, environment, serving
from tests.core.adapters.peft_files import random_matrices, write_peft
from tests.core.models.idefics3_checkpoint import write_checkpoint

HERE = Path(__file__).resolve().parent
NAMES = ("chromium", "chromium-browser", "google-chrome")
KEY = "a key of this test"
_TABLE = """
memory = "1500M"

[models.chat]
model = {demo}
kv_cache_memory_bytes = "128M"

[models.made-up]
model = {demo}
executor = "fake"
executor_options = {{vocab_size = "49152", max_model_len = "4096", step_us = "4000"}}
kv_cache_memory_bytes = "64M"
adapters = {{polite = {adapter}}}

[models.eyes]
model = {eyes}
kv_cache_memory_bytes = "16M"

[models.vectors]
model = {demo}
executor = "fake"
executor_options = {{vocab_size = "49152", max_model_len = "4096"}}
kv_cache_memory_bytes = "16M"
runner = "pooling"

[models.absent]
model = "org/absent"
"""


def write_models(folder: Path) -> Path:
    """Write a list of models: for chats, with an adapter, with eyes (random weights), for embeddings, not there."""
    adapter, eyes = folder / "polite", folder / "eyes"
    write_peft(adapter, random_matrices({"model.layers.0.self_attn.q_proj": (16, 16)}, 2, 1), rank=2, alpha=4)
    write_checkpoint(eyes)
    names = {"demo": resolve_model(None), "adapter": adapter, "eyes": eyes}
    path = folder / "models.toml"
    path.write_text(_TABLE.format(**{name: json.dumps(str(one)) for name, one in names.items()}))
    return path


def main() -> int:
    """Walk, and return the exit status: 1 if a step failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.page", description=__doc__)
    parser.add_argument("--environments", type=Path, default=ROOT / ".clients", help="folder of the environment")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the page")
    parser.add_argument("names", nargs="*", help="only steps whose name has one of these texts")
    parsed = parser.parse_args()
    browser = next((path for name in NAMES if (path := shutil.which(name)) is not None), None)
    if browser is None:
        raise SystemExit("this needs a Chromium: apt-get install chromium")
    python = environment(HERE, parsed.environments)
    with tempfile.TemporaryDirectory() as folder:
        models = write_models(Path(folder))
        one = ("-m", resolve_model(None), "--served-model-name", "SmolLM2-135M-Instruct", "--max-num-seqs", "64")
        with serving("--models", models, ENGINE_CORE_API_KEY=KEY) as many, serving(*one) as single:
            settings = {"browser": browser, "many": many, "single": single, "key": KEY, "names": parsed.names}
            settings["pictures"] = parsed.pictures and str(parsed.pictures.resolve())
            return subprocess.run([python, HERE / "walk.py", json.dumps(settings)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
