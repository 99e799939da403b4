"""Neither the caller's process nor the engine's loads torch for an in-tree model on the C kernels."""

import subprocess
import sys
from pathlib import Path

from tests.placed import placed
from tools.lab.bench.tiny_model import write_tiny_model

SCRIPT = """
import sys
from pathlib import Path
from engine_core import LLM, SamplingParams

wanted = [
    SamplingParams(max_tokens=3, temperature=0.0),
    SamplingParams(max_tokens=3, seed=1, top_k=5, top_p=0.9, min_p=0.01, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=3, seed=2, repetition_penalty=1.1, presence_penalty=0.5, logit_bias={3: 1.0}),
    SamplingParams(max_tokens=3, seed=3, allowed_token_ids=[1, 2, 3], min_tokens=2),
]
for mode in ("raw_logprobs", "processed_logits"):
    with LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, threads=1, logprobs_mode=mode,
             kv_cache_memory_bytes=1 << 20, preemption_mode="auto") as llm:
        prompts = [{"prompt_token_ids": [1, 2, 3 + i]} for i in range(len(wanted))]
        assert all(len(answer.outputs[0].token_ids) == 3 for answer in llm.generate(prompts, wanted, use_tqdm=False))
        children = [(task / "children").read_text().split() for task in Path("/proc/self/task").iterdir()]
        maps = [Path(f"/proc/{pid}/maps").read_text() for pids in children for pid in pids]
        assert any("engine-core/kernels" in text or "prebuilt" in text for text in maps), "no engine was found"
        assert not any("torch" in text for text in maps)
print(*sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers", "triton"}))
"""


def test_neither_process_loads_torch(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    command = [sys.executable, "-c", placed(SCRIPT), str(tmp_path / "tiny")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
