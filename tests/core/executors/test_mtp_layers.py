"""method mtp for each family of models with such a layer: drafts are transformers' layer's, and no token changes."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from core.engine import EngineCore
from core.execution.plan import SchedulerOutput
from core.executors.local import LocalExecutor
from core.runner.draft_pause import DraftPause
from core.runner.head_drafter import HeadDrafter
from core.tiers.block_folder import BlockFolder
from core.tiers.block_store import BlockStore, StateContents
from core.tiers.connector import Tier
from core.tiers.portable_names import PortableNames
from ipc.errors import ConfigError
from ipc.tables.arrays import Int32s
from ipc.wire.messages import AddRequest
from tests.core.driving import add_message
from tests.core.executors.test_draft_head import GREEDY, NoPause, config_of, run
from tests.core.models.gguf_checkpoints import GGUF_CASES
from tests.core.mtp_models import FAMILIES, MtpModel
from tests.core.runner.heard import Heard

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 22}
#: Of MtpModel: with it, layers for multi-token prediction are right in about two thirds of the places.
SHARE = 0.01


IN_GGUF = [family for family, own in FAMILIES.items() if own.case in GGUF_CASES]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the model of a family and its folder."""

    @cache
    def of(family: str, share: float | None = None) -> tuple[MtpModel, str]:
        model = MtpModel(FAMILIES[family], share)
        return model, model.write(tmp_path_factory.mktemp(family))

    return of


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_the_layer_and_no_token_changes(models: Any, family: str) -> None:
    reference, folder = models(family)
    plain, _, _ = run(config_of(folder, None, **OPTIONS), num_requests=6)
    assert run(config_of(folder, "mtp", **OPTIONS), num_requests=6)[0] == plain
    _, stats, heard = run(config_of(folder, "mtp", **OPTIONS), GREEDY, 6)
    for tokens, drafts in heard[:: len(heard) // 8]:
        reference.check(tokens, drafts)
    assert len(heard) > 100
    assert stats.num_draft_tokens > 5


@pytest.mark.parametrize("family", IN_GGUF)
def test_layers_of_gguf_files_draft_what_those_of_folders_do(models: Any, family: str, tmp_path: Path) -> None:
    reference, _ = models(family)
    path = reference.write_gguf(tmp_path / "model.gguf")
    plain, _, _ = run(config_of(path, None, **OPTIONS), num_requests=4)
    tokens, stats, heard = run(config_of(path, "mtp", **OPTIONS), GREEDY, 4)
    assert run(config_of(path, "mtp", **OPTIONS), num_requests=4)[0] == plain
    for known, drafts in heard[:: len(heard) // 8]:
        reference.check(known, drafts)
    assert len(heard) > 50
    assert stats.num_draft_tokens > 5
    assert tokens


def test_the_layer_may_be_in_a_file_of_its_own(models: Any, tmp_path: Path) -> None:
    """As some publish GGUF files."""
    reference, _ = models("qwen3.5")
    layer = tmp_path / "mtp.gguf"
    path = reference.write_gguf(tmp_path / "model.gguf", layer)
    config = config_of(path, "mtp", str(layer), **OPTIONS)
    _, _, heard = run(config, GREEDY, 3)
    for known, drafts in heard[:: len(heard) // 8]:
        reference.check(known, drafts)
    with pytest.raises(ConfigError, match="it has no multi-token prediction layer"):
        LocalExecutor(config_of(path, "mtp", **OPTIONS))


# --- a prompt again, among others ------------------------------------------------------------------------------------


class Answer(NamedTuple):
    tokens: list[int]
    logits: str  # of its tokens and of the largest others


def engine_of(folder: str, method: str | None, **options: Any) -> EngineCore:
    return parts_of(folder, method, **options)[0]


def parts_of(folder: str, method: str | None, **options: Any) -> tuple[EngineCore, LocalExecutor]:
    """An engine and its executor."""
    config = config_of(folder, method, logprobs_mode="raw_logits", **OPTIONS, **options)
    if (drafts := config.speculative_config) is not None:
        drafts = msgspec.structs.replace(drafts, prompt_lookup_min=1)
        config = msgspec.structs.replace(config, speculative_config=drafts)
    executor = LocalExecutor(config)
    executor.initialize_cache(config)
    if isinstance(executor.runner.drafter, HeadDrafter):
        executor.runner.drafter._pause = NoPause()
    return EngineCore(config, executor), executor


def answer(engine: EngineCore, asked: AddRequest, others: list[AddRequest]) -> Answer:
    """The answer to a request that starts among others, of which half are there before it."""
    half = len(others) // 2
    heard = Heard(asked.number, len(asked.prompt_token_ids) // 4)
    waves = [others[:half], [asked], others[half:]]
    while waves or engine.has_work:
        heard.take(engine.step([(0, message) for message in (waves.pop(0) if waves else [])], 0))
        engine.scheduler.check_integrity()
    (logits,) = heard.logprobs.values()
    return Answer(heard.tokens[asked.number, 0], repr(vars(logits)))


def probe(folder: str, methods: list[str], num_probes: int, seed: int) -> int:
    """Ask A, others, and A again of an engine that preempts, has a prefix cache and drafts; return preemptions."""
    rng = np.random.default_rng(seed)
    plain = engine_of(folder, None, enable_prefix_caching=False)
    drafting = [engine_of(folder, method, num_blocks_override=34, num_drafts=4) for method in methods]
    longest = config_of(folder, None).max_model_len
    number, known = 0, rng.integers(3, 300, 200).tolist()
    for _ in range(num_probes):
        length, words = int(rng.integers(1, 70)), rng.integers(3, 300, 60)
        prompt = [*known[: rng.integers(0, 60)], *np.resize(words[: rng.integers(2, 60)], length).tolist()]
        prompt = prompt[: longest - 1]  # one that fills the model's length gets no token
        crowd = [[*known[: rng.integers(1, 60)], *rng.integers(3, 300, 9).tolist()] for _ in range(6)]
        options = {"temperature": float(rng.integers(0, 3)) / 2, "seed": int(rng.integers(1000)), "logprobs": 2}
        asked: list[Answer] = []
        for engine in (plain, *drafting):
            for others in ([], crowd) if engine is not plain else ([],):
                messages = [add_message(number + place, each, 24) for place, each in enumerate([*others, prompt])]
                messages[-1] = add_message(number + len(others), prompt, 24, **options)
                asked.append(answer(engine, messages[-1], messages[:-1]))
                number += len(messages)
        assert all(one == asked[0] for one in asked[1:]), (seed, prompt, options)
    for stats in (engine.scheduler.stats for engine in drafting):
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    return sum(engine.scheduler.stats.num_preemptions for engine in drafting)


@pytest.mark.parametrize("family", ["qwen3.5", "deepseek-v3"])
def test_a_prompt_again_has_the_same_tokens_and_logits(models: Any, family: str) -> None:
    assert probe(models(family, SHARE)[1], ["mtp", "ngram"], 5, 1) > 0


# --- blocks in files -------------------------------------------------------------------------------------------------


class Paused(DraftPause):
    def begins(self, plan: SchedulerOutput) -> bool:
        return True


class Turns:
    """An engine with a folder of KV blocks, and its store; what it is asked, it answers alone."""

    def __init__(self, folder: str, kv_dir: Path) -> None:
        self.engine, executor = parts_of(folder, "mtp", kv_dir=str(kv_dir), num_host_blocks=64, max_model_len=200)
        scheduler, shared = self.engine.scheduler, executor.shared_blocks
        assert scheduler.exchange is not None
        self.exchange, kept, blocks = scheduler.exchange, scheduler.batch.kept_states, BlockFolder(str(kv_dir), 2**30)
        names, tiers = PortableNames(blocks.key, shared.layout, 8), [Tier("kv_dir", blocks, is_near=True)]
        contents, beside = scheduler.pool.names.content, None if kept is None else StateContents(kept)
        self.store = BlockStore(tiers, names, shared, contents, self.exchange.evictions, beside=beside)
        self.drafts: list[list[int]] = []
        self.drafter: Any = executor.runner.drafter
        drafter = self.drafter
        propose = drafter.propose

        def heard(*arguments: Any) -> tuple[Int32s, Int32s]:
            counts, token_ids = propose(*arguments)
            self.drafts += [token_ids.tolist()] if len(token_ids) else []
            return counts, token_ids

        drafter.propose = heard

    def ask(self, asked: AddRequest) -> Answer:
        heard, inbox = Heard(asked.number, len(asked.prompt_token_ids) // 4), [(0, asked)]
        while inbox or self.engine.has_work:
            heard.take(self.engine.step(inbox, 0))
            inbox = [(0, one) for one in map(self.store.carry_out, self.engine.take_orders()) if one is not None]
            while self.store.has_unsaved:
                inbox += [(0, one) for one in (self.store.save_one(),) if one is not None]
        (logits,) = heard.logprobs.values()
        return Answer(heard.tokens[asked.number, 0], repr(vars(logits)))


@pytest.mark.parametrize("family", ["qwen3.5", "deepseek-v3"])
def test_blocks_in_files_have_the_layers_k_and_v(models: Any, family: str, tmp_path: Path) -> None:
    """The next turn at an engine that has only the folder: the same drafts as where all is computed."""
    folder, rng = models(family)[1], np.random.default_rng(3)
    prompt = np.resize(rng.integers(3, 300, 60), 100).tolist()
    first = add_message(1, prompt, 8, logprobs=2)
    second = add_message(2, [*prompt, *rng.integers(3, 300, 20).tolist()], 40, logprobs=2)
    alone, giver = Turns(folder, tmp_path / "alone"), Turns(folder, tmp_path / "kv")
    giver.drafter._pause = Paused()  # K and V are not needed for drafts then
    giver.ask(first)
    giver.store.close()
    taker = Turns(folder, tmp_path / "kv")
    assert taker.ask(second) == alone.ask(second)
    assert taker.exchange.num_fetched > 0 == alone.exchange.num_fetched
    assert taker.drafts == alone.drafts
    assert len(alone.drafts) > 20
    for one in (alone, taker):
        one.store.close()


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("family", FAMILIES)
def test_soak_a_prompt_again(models: Any, family: str) -> None:
    for seed in range(10):
        assert probe(models(family, SHARE)[1], ["mtp", "ngram"], 150, 100 + seed) > 0
