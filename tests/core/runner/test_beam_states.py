"""Beam search with recurrent layers: transformers' sequences, and the same bits where states make room for others."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest
from tests.core.runner.beam_runs import MAX_TOKENS, message, our_model, run

KINDS = ["lfm2", "qwen3.5", "granite4-hybrid"]
PROMPTS = [np.random.default_rng(4).integers(3, 100, length).tolist() for length in (5, 40, 96)]
EOS = 2


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a checkpoint, and transformers' model."""
    pytest.importorskip("transformers")
    from tests.core.models.checkpoints import build

    model, folder = build(request.param), tmp_path_factory.mktemp("states")
    model.config.eos_token_id = EOS
    model.save_pretrained(folder)
    return folder, model


def state_memory(folder: Path, num_states: int) -> int:
    return 2 * 4 * our_model(folder).config.state_size * num_states


def test_sequences_are_those_of_transformers(made: tuple[Path, Any]) -> None:
    torch = pytest.importorskip("torch")
    folder, model = made
    searches = [message(n, prompt, beams) for n, (prompt, beams) in enumerate(zip(PROMPTS, (2, 4, 3), strict=True))]
    found, _ = run(folder, searches, budget=64, max_num_seqs=12, kv_cache_memory_bytes=state_memory(folder, 30))
    for one, prompt in zip(searches, PROMPTS, strict=True):
        with torch.no_grad():
            wanted = model.generate(
                torch.tensor([prompt]),
                num_beams=one.params.n,
                num_return_sequences=one.params.n,
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                eos_token_id=EOS,
                pad_token_id=0,
            )
        for choice in range(one.params.n):
            tokens = found[one.number, choice].tokens
            sequence = wanted[choice, len(prompt) :].tolist()
            assert sequence[: len(tokens)] == tokens, (one.number, choice)
            assert set(sequence[len(tokens) :]) <= {0, EOS}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "options",
    [{"prefix_caching": False}, {"num_blocks": 90, "preemption_mode": "recompute"}, {"budget": 24, "max_num_seqs": 14}],
    ids=str,
)
def test_bits_do_not_depend_on_the_company(made: tuple[Path, Any], options: dict[str, Any]) -> None:
    """Searches alone have the log probabilities, bit for bit, that they have among others."""
    folder, _ = made
    options = {"max_num_seqs": 24, "kv_cache_memory_bytes": state_memory(folder, 30), **options}
    searches = [message(n, PROMPTS[n % 3], 3 + n % 2, repetition_penalty=1.2) for n in range(5)]
    plain = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    crowd = [AddRequest(n, np.arange(n, n + 40, dtype="<i4").tobytes(), plain, n) for n in range(10, 15)]
    together, core = run(folder, [*crowd, *searches], **options)
    for one in searches:
        alone, _ = run(folder, [one], prefix_caching=False)
        for key, sequence in alone.items():
            assert (together[key].tokens, together[key].values) == (sequence.tokens, sequence.values)
    assert (core.scheduler.stats.num_preemptions > 0) == (options.get("num_blocks") == 90)


def test_each_beam_may_need_room_for_the_whole_prompt(made: tuple[Path, Any]) -> None:
    """The blocks of a prompt are shared only where the state behind them is kept."""
    folder, _ = made
    with pytest.raises(AssertionError, match="3 beams may need 87 KV blocks together, and there are 85"):
        run(folder, [message(0, PROMPTS[2], 3)], num_blocks=86, prefix_caching=False)
