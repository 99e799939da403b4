"""Every source of drafts with every option of a request, and with all that can happen to a request on its way: tokens,
ends and log probabilities are those of the same requests in a roomy engine without drafts.
"""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.engine import EngineCore
from core.executors.local import LocalExecutor
from core.inputs import EngineInput, HoldClient, ReleaseClient
from core.scheduling.stats import SchedulerStats
from ipc.options.resolved import ResolvedConfig
from ipc.options.speculation import SpeculativeConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import Abort, AddRequest, FinishReason, Outputs
from ipc.wire.scheduling_messages import Explain
from tests.columns import pack_numbers
from tests.core.assistants import AssistedModel
from tests.core.draft_heads import (
    EAGLE3,
    LLAMA,
    MIMO,
    model_shapes,
    random_weights,
    write,
    write_eagle3,
)
from tests.core.mtp_models import FAMILIES, MtpModel
from tests.core.runner.heard import Heard
from tests.grammar_vocabulary import EOS, VOCAB_SIZE, schema, structured, tokenizer_files
from tests.resolved import resolved_config

SIZES = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS}
TARGET = 4  # the request whose log probabilities are compared
NAMES = schema(name={"type": "string", "maxLength": 6}, age={"type": "integer", "minimum": 0, "maximum": 99})
GREEDY: dict[str, Any] = {"temperature": 0.0}
OPTIONS: list[dict[str, Any]] = [
    GREEDY,
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"bad_words_token_ids": [[4], [7, 8], [9, 10, 11]], "temperature": 0.5},
    {"min_tokens": 9, "ignore_eos": False, "stop_token_ids": list(range(0, VOCAB_SIZE, 6))},
    {"logprobs": 3, "prompt_logprobs": 1, "top_p": 0.9, "n": 2},
    {"n": 3, "seed": 5, "top_k": 30, "xtc_probability": 0.5, "xtc_threshold": 0.02},
    {"structured_outputs": structured(json=NAMES, disable_any_whitespace=True), "ignore_eos": False},
    {
        "structured_outputs": structured(regex="[a-e]{3,9}(00)?"),
        "ignore_eos": False,
        "n": 2,
        "xtc_probability": 0.5,
        "top_n_sigma": 1.5,
    },
    {"use_beam_search": True, "best_of": 3, "n": 2, "ignore_eos": False, **GREEDY},
    {
        "use_beam_search": True,
        "best_of": 2,
        "structured_outputs": structured(regex="[a-c]{4}"),
        "ignore_eos": False,
        **GREEDY,
    },
    {"logit_bias": {5: 4.0, 9: -100.0}, "allowed_token_ids": list(range(3, 200)), "min_p": 0.02},
    GREEDY,
]
SHORT = {"num_blocks_override": 26}
CROWDED: dict[str, dict[str, Any]] = {
    "preempted": {**SHORT, "preemption_mode": "recompute"},
    "swapped": {**SHORT, "preemption_mode": "swap", "num_swap_blocks": 60},
    "in small chunks": {"max_num_batched_tokens": 20, "enable_prefix_caching": False},
    "held and explained": {},
    "aborted": {},
}
METHODS = ("ngram", "suffix", "draft_model", "eagle3", "mtp")


def requests() -> list[AddRequest]:
    rng = np.random.default_rng(3)
    return [
        AddRequest(
            number,
            np.tile(rng.integers(1, 200, 5 + 3 * number, np.int32), 2).tobytes(),  # n-grams come again
            SamplingParams(**{"max_tokens": 24, "temperature": 1.0, "ignore_eos": True, **options}),
            seed=number,
        )
        for number, options in enumerate(OPTIONS)
    ]


class Folders:
    """The files of the models and the head."""

    def __init__(self, folder: Path) -> None:
        llama, mimo, small = LLAMA | SIZES, MIMO | SIZES, LLAMA | SIZES | {"num_hidden_layers": 2}
        self.llama, self.mimo, self.small = (
            write(folder / name, settings, random_weights(model_shapes(settings), 1))
            for name, settings in (("llama", llama), ("mimo", mimo), ("small", small))
        )
        self.eagle3 = write_eagle3(folder / "eagle3", EAGLE3 | SIZES)

    def config(self, method: str | None, model: str, **options: Any) -> ResolvedConfig:
        named = {"draft_model": self.small, "eagle3": self.eagle3}.get(method or "")
        drafts: dict[str, Any] = {
            "num_speculative_tokens": 4,
            "step_ns": (10**8,) * 8,
            "model": named,
            "prompt_lookup_min": 1,
        }
        config = resolved_config(
            executor="local",
            model=model,
            dtype="float32",
            max_model_len=120,
            max_num_seqs=12,
            max_num_batched_tokens=64,
            block_size=8,
            num_blocks_override=300,
            preemption_mode="recompute",
            speculative_config=None if method is None else SpeculativeConfig(method=method, **drafts),
        )
        return msgspec.structs.replace(config, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "mimo", "small", "eagle3"):
        (folder / name).mkdir()
    return Folders(folder)


def run(config: ResolvedConfig, crowd: str = "") -> tuple[Heard, EngineCore]:
    executor = LocalExecutor(config)
    executor.grammars.use_files(tokenizer_files())
    executor.initialize_cache(config)
    added = requests()
    engine, heard, step = EngineCore(config, executor), Heard(TARGET, len(added[TARGET].prompt_token_ids) // 4), 0
    while added or engine.has_work:
        inbox: list[tuple[int, EngineInput]] = [(0, message) for message in added[:3]]
        added, step = added[3:], step + 1
        if crowd == "held and explained" and step % 5 == 0:
            replies = engine.step([(0, HoldClient()), (0, Explain(step, -1, 0, 100))], 0)
            heard.take([one for one in replies if isinstance(one[1], Outputs)])
            inbox.append((0, ReleaseClient()))
        if crowd == "aborted" and step in (7, 9, 12):
            inbox.append((0, Abort(pack_numbers([{7: 1, 9: 8, 12: 5}[step]]))))
        heard.take(engine.step(inbox, 0))
        engine.scheduler.check_integrity()
    return heard, engine


@cache
def plain(folders: Folders, model: str) -> Heard:
    return run(folders.config(None, model))[0]


#: Every method and every crowd, each with half of the others; the other pairs are the soak's.
PAIRS = [
    pytest.param(method, crowd, marks=[pytest.mark.soak] if (row + column) % 2 else [])
    for row, method in enumerate(METHODS)
    for column, crowd in enumerate(CROWDED)
]


@pytest.mark.parametrize(("method", "crowd"), PAIRS)
def test_nothing_differs(folders: Folders, method: str, crowd: str) -> None:
    compare(folders, folders.mimo if method == "mtp" else folders.llama, method, crowd)


@pytest.mark.filterwarnings("ignore")  # of transformers and what it imports
@pytest.mark.parametrize(
    "crowd",
    [pytest.param(crowd, marks=[] if crowd == "swapped" else pytest.mark.soak) for crowd in CROWDED],
)
def test_nothing_differs_with_recurrent_layers(folders: Folders, crowd: str, tmp_path: Path) -> None:
    model = MtpModel(FAMILIES["qwen3.5"], 0.01, vocab_size=VOCAB_SIZE, eos_token_id=EOS).write(tmp_path)
    blocks = (
        {"num_blocks_override": 36} if "num_blocks_override" in CROWDED[crowd] else {}
    )  # beams share no blocks here
    stats = compare(folders, model, "mtp", crowd, **blocks)
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.filterwarnings("ignore")  # of transformers and what it imports
@pytest.mark.parametrize(
    "crowd",
    [pytest.param(crowd, marks=[] if crowd in ("swapped", "aborted") else pytest.mark.soak) for crowd in CROWDED],
)
def test_nothing_differs_with_an_assistant(folders: Folders, crowd: str, tmp_path: Path) -> None:
    pair = AssistedModel("gemma4-31b", 0.7, vocab_size=VOCAB_SIZE, eos_token_id=EOS)
    model, assistant = pair.write(tmp_path)
    assert compare(folders, model, "mtp", crowd, assistant).num_accepted_tokens > 0


def compare(
    folders: Folders, model: str, method: str, crowd: str, named: str | None = None, **options: Any
) -> SchedulerStats:
    """Compare all answers with those without drafts and crowd; return the statistics with both.

    named: the model that drafts, if it is not the method's.
    """
    wanted = plain(folders, model)
    config = folders.config(method, model, **{**CROWDED[crowd], **options})
    if named is not None:
        assert config.speculative_config is not None
        drafts = msgspec.structs.replace(config.speculative_config, model=named)
        config = msgspec.structs.replace(config, speculative_config=drafts)
    got, engine = run(config, crowd)
    stats = engine.scheduler.stats
    assert stats.num_draft_tokens > 0
    assert (stats.num_preemptions > 0) == (crowd in ("preempted", "swapped"))
    assert got.finish.keys() == wanted.finish.keys()
    aborted = {key for key, finish in got.finish.items() if finish is FinishReason.ABORT}
    assert bool(aborted) == (crowd == "aborted")
    for key, finish in got.finish.items():
        tokens = got.tokens.get(key, [])
        if key in aborted:
            assert tokens == wanted.tokens[key][: len(tokens)]
        else:
            assert (key, finish, tokens) == (key, wanted.finish[key], wanted.tokens[key])
    assert len(wanted.logprobs) == 2
    for choice, logprobs in wanted.logprobs.items():
        other = got.logprobs[choice]
        for name in vars(logprobs):
            assert repr(getattr(other, name)) == repr(getattr(logprobs, name)), name
    return stats
