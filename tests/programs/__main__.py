"""Run real programs for vLLM, unchanged, on this engine: `make programs`.

requirements.txt is an environment of its own, behind which this one's packages stand (transformers, torch). Each
use_*.py is a program as its users write it, run by `python -m engine_core.as_vllm`, and fails by its exit code.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ipc.files.model_files import resolve_model
from tools.lab.bench.tiny_model import write_tiny_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATIENCE_S = 300


def environment(where: Path) -> Path:
    """Make the environment, unless it is there -> its Python."""
    python = where / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", where], check=True)
        install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        subprocess.run([*install, "-r", HERE / "requirements.txt"], check=True)
        (site,) = where.glob("lib/python*/site-packages")
        (site / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def write_model(folder: Path) -> None:
    """Write a tiny model with a tokenizer of bytes, as a folder that transformers reads too."""
    write_tiny_model(folder)
    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def main() -> int:
    """Run all programs, or those whose names have the given text; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--environment", type=Path, default=ROOT / ".programs", help="folder of the environment")
    parser.add_argument("names", nargs="*", help="only programs whose script's name has one of these texts")
    parsed = parser.parse_args()
    python = environment(parsed.environment)
    num_failed = 0
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        variables = {"MODEL": str(resolve_model(None)), "FOLDER": folder, "PYTHONPATH": str(ROOT)}
        for script in sorted(HERE.glob("use_*.py")):
            if parsed.names and not any(name in script.stem for name in parsed.names):
                continue
            begin = time.monotonic()
            done = subprocess.run(
                [python, "-m", "engine_core.as_vllm", script],
                env={**os.environ, **variables},
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
            num_failed += done.returncode != 0
            result = "passed" if done.returncode == 0 else f"FAILED\n{done.stderr[-3000:]}"
            print(f"{script.stem.removeprefix('use_'):14} {time.monotonic() - begin:5.1f} s  {result}", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
