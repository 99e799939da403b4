"""disable_cascade_attn: attention reads blocks that requests have in common for each of them, and no bit changes."""

from pathlib import Path

import numpy as np

from core.engine import EngineCore
from core.executors.local import LocalExecutor
from core.process.resolve import resolve
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, Outputs
from tools.lab.bench.tiny_model import write_tiny_model

NUM_SHARED = 1100  # tokens: two whole tiles of attention
ROWS = 5


def answers(folder: Path, *, off: bool) -> tuple[dict[int, bytes], int]:
    """The log probabilities of each request, and how often an item of attention served several requests."""
    config = EngineConfig(model=str(folder), threads=1, max_num_seqs=ROWS, disable_cascade_attn=off)
    executor = LocalExecutor(config)
    blocks_in = executor.determine_num_available_blocks
    config = resolve(config, executor.info, blocks_in, total_memory_bytes=1 << 28, num_cpus=1)
    executor.initialize_cache(config)
    engine = EngineCore(config, executor)
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0, logprobs=2, detokenize=False)
    shared = np.random.default_rng(0).integers(5, 250, NUM_SHARED)
    prompts = [np.append(shared, [number, 7 + number]).astype("<i4").tobytes() for number in range(ROWS)]
    values: dict[int, bytes] = {}
    num_members = 0
    for arriving in ([0], [], [], [], range(1, ROWS), *[[]] * 8):  # the first prompt is in the cache for the others
        for _, reply in engine.step([(0, AddRequest(number, prompts[number], params, 0)) for number in arriving], 0):
            if isinstance(reply, Outputs) and reply.logprobs is not None:
                numbers = np.frombuffer(reply.logprobs.numbers, "<u4").tolist()
                floats = np.frombuffer(reply.logprobs.values, "<f4").reshape(len(numbers), -1)
                for number, row in zip(numbers, floats, strict=True):
                    values[number] = values.get(number, b"") + row.tobytes()
        operations = executor._loaded.model.operations  # type: ignore[attr-defined]
        plans = [plan for planner in operations._plans.values() for plan in planner._plans.values()]
        num_members += sum(len(plan.members) for plan in plans)
    executor.close()
    return values, num_members


def test_no_bit_depends_on_it(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    shared, num_members = answers(tmp_path, off=False)
    alone, none = answers(tmp_path, off=True)
    assert num_members > 0
    assert none == 0
    assert len(shared) == ROWS
    assert shared == alone
