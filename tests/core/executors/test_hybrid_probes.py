"""A-B-A probes of every family with recurrent layers: a prompt, others, and the prompt again, with everything on.

The prefix cache, few slots of states, drafts of every source, every kind of preemption, small chunks, adapters, salts,
blocks on the host and in files, and engines that die. All logits must be those of the prompt alone in a plain engine.
"""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from core.adapters.adapter import AdapterWeights, digest_of
from core.adapters.store import Adapters
from core.batch import request
from core.batch.kept_states import KeptStates
from core.engine import EngineCore
from core.execution.plan import SavedStates
from core.executors.local import LocalExecutor
from core.runner.head_drafter import HeadDrafter
from core.runner.state_rows import RowStates
from core.tiers.block_folder import BlockFolder
from core.tiers.block_store import BlockStore, StateContents
from core.tiers.connector import Tier
from core.tiers.portable_names import PortableNames
from ipc.errors import ConfigError
from ipc.options.resolved import ResolvedConfig
from ipc.options.speculation import SpeculativeConfig
from ipc.tables.arrays import Ints, Rows
from ipc.wire.messages import AddRequest
from kernels.low_rank import LowRank
from tests.core.adapters.peft_files import random_matrices
from tests.core.driving import add_message
from tests.core.executors.test_draft_head import NoPause
from tests.core.models.checkpoints import CASES, build
from tests.core.mtp_models import FAMILIES, MtpModel
from tests.core.runner.heard import Heard
from tests.core.runner.invariance import with_adapter
from tests.core.runner.invariance_scenarios import preempt
from tests.resolved import resolved_config

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

#: By model_type of tests/core/models/checkpoints.py.
_RECURRENT = ("lfm2", "lfm2_moe", "lfm3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "granitemoehybrid")
_RECURRENT += ("nemotron_h", "falcon_h1", "olmo_hybrid")
_WITHOUT = ("granite4-dense", "granite4-experts")  # their layers all attend
HYBRIDS = [case for case, (kind, _) in CASES.items() if kind in _RECURRENT and case not in _WITHOUT]
VOCAB = 300
NUM_TOKENS = 7
_PROBES_OF_A_FOLDER = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the folder of a family's tiny model, with its layer for multi-token prediction if it has one."""

    @cache
    def of(family: str) -> str:
        folder = tmp_path_factory.mktemp(family)
        if family in FAMILIES:
            return MtpModel(FAMILIES[family], 0.01).write(folder)
        build(family).save_pretrained(folder)
        return str(folder)

    return of


class Answer(NamedTuple):
    tokens: list[int]
    logits: bytes  # of each token and of the whole vocabulary, in the order of their sizes


class Engine:
    """An engine with a folder of blocks, and its store. To let go of it is its death: only the folder is left."""

    def __init__(self, config: ResolvedConfig, rng: np.random.Generator) -> None:
        self._rng = rng
        executor = LocalExecutor(config)
        executor.initialize_cache(config)
        self.state_bytes = executor.info.state_bytes
        self.adapters = [""] if executor.adapters is None else ["", *_with_adapters(executor.adapters)]
        if isinstance(drafter := executor.runner.drafter, HeadDrafter):
            drafter._pause = NoPause()
        self.core, self._store = EngineCore(config, executor), None
        if config.kv_dir is not None:
            scheduler, shared = self.core.scheduler, executor.shared_blocks
            exchange, kept, blocks = scheduler.exchange, scheduler.batch.kept_states, BlockFolder(config.kv_dir, 2**30)
            assert exchange is not None
            assert kept is not None
            names, tiers = PortableNames(blocks.key, shared.layout, 8), [Tier("kv_dir", blocks, is_near=True)]
            contents = scheduler.pool.names.content
            self._store = BlockStore(tiers, names, shared, contents, exchange.evictions, beside=StateContents(kept))
            self.exchange = exchange

    def ask(self, asked: AddRequest, others: list[AddRequest]) -> Answer:
        """Return the answer to a request of which half of the others come first; preempt some that run."""
        half = len(others) // 2
        heard = Heard(asked.number, len(asked.prompt_token_ids) // 4)
        waves, news = [others[:half], [asked], others[half:]], list[Any]()
        while waves or news or self.core.has_work:
            heard.take(self.core.step([*((0, one) for one in (waves.pop(0) if waves else [])), *news], 0))
            self.core.scheduler.check_integrity()
            news = self._exchanged()
            if others and len(rows := self.core.scheduler.running) and self._rng.random() < 0.1:
                preempt(self.core, int(rows[-1]))
        places = heard.logprobs[0].output
        logits = b"".join(place.token_ids.tobytes() + place.values.tobytes() for place in places)
        assert len(logits) == 8 * (VOCAB + 1) * NUM_TOKENS
        return Answer(heard.tokens[asked.number, 0], logits)

    def _exchanged(self) -> list[Any]:
        if (store := self._store) is None:
            return []
        answers = [store.carry_out(order) for order in self.core.take_orders()]
        while store.has_unsaved:
            answers.append(store.save_one())
        return [(0, one) for one in answers if one is not None]


def _with_adapters(adapters: Adapters) -> list[str]:
    """Give an engine two adapters, of all its matrices and of some, and return their digests."""
    digests, shapes = [], adapters._host.shapes
    for seed in (1, 2):
        names = {name.rsplit(".", 1)[-1] for name in shapes} - ({"in_proj"} if seed == 2 else set())
        made = random_matrices(shapes, 4, seed, targets=names)
        low_rank = {name: LowRank(a, b, 0.75) for name, (a, b) in made.items()}
        digests.append(digest := digest_of(low_rank))
        adapters.put(AdapterWeights(low_rank, digest))
    return digests


def options_of(family: str, state_bytes: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return what is on in one engine: drawn."""
    methods = [None, "ngram", "suffix", *(["mtp"] * 3 if family in FAMILIES else [])]
    mode = str(rng.choice(["recompute", "swap", "auto"]))
    options: dict[str, Any] = {"preemption_mode": mode, "num_blocks_override": int(rng.integers(52, 90))}
    options |= {"num_swap_blocks": 0 if mode == "recompute" else int(rng.integers(20, 60)), "swap_space_bytes": 1 << 18}
    options |= {"max_num_batched_tokens": int(rng.integers(30, 200)), "num_host_blocks": int(rng.integers(40, 120))}
    num_rows, num_states = int(rng.integers(3, 7)), int(rng.integers(8, 60))  # few slots of states, or many
    options |= {"kv_cache_memory_bytes": 2 * (num_rows + num_states) * state_bytes, "max_num_seqs": num_rows}
    if (method := methods[rng.integers(len(methods))]) is not None:
        drafts: dict[str, Any] = {"num_speculative_tokens": 4, "step_ns": (10**6,) * 8, "prompt_lookup_min": 1}
        options["speculative_config"] = SpeculativeConfig(method=method, **drafts)
    return options


def config_of(model: str, **options: Any) -> ResolvedConfig:
    config = resolved_config(
        executor="local",
        model=model,
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=512,
        block_size=8,
        num_blocks_override=200,
        logprobs_mode="raw_logits",
    )
    return msgspec.structs.replace(config, **options)


class Probes:
    """Probes of one family; each engine serves a few of them, and the next one has its folder."""

    def __init__(self, family: str, model: str, folder: Path, seed: int) -> None:
        self._family, self._model, self._folder = family, model, folder
        self._rng = np.random.default_rng(seed)
        self._usual: dict[str, Any] = {"enable_lora": True, "max_loras": 2}
        try:
            self._plain = self._engine(enable_prefix_caching=False)
        except ConfigError:  # experts have no adapters
            self._usual = {}
            self._plain = self._engine(enable_prefix_caching=False)
        self._number = 0
        self._talk = self._rng.integers(3, VOCAB, 150).tolist()  # a beginning of many prompts
        self.num_different = self.num_probes = 0
        self.counts = {"fetched": 0, "swapped": 0, "preempted": 0, "drafted": 0, "accepted": 0, "hits": 0, "deaths": 0}

    def _engine(self, **options: Any) -> Engine:
        return Engine(config_of(self._model, **self._usual, **options), self._rng)

    def _options(self) -> dict[str, Any]:
        return options_of(self._family, self._plain.state_bytes, self._rng)

    def run(self, count: int) -> None:
        """Make so many probes, some with each folder; the first engine with it dies within the second of them."""
        while self.num_probes < count:
            shutil.rmtree(self._folder, ignore_errors=True)
            options = {**self._options(), "kv_dir": str(self._folder)}
            engine = self._engine(**options)
            for number in range(min(_PROBES_OF_A_FOLDER, count - self.num_probes)):
                asked, others = self._prompt(), [self._other() for _ in range(4)]
                engine.ask(*self._messages(asked, []))
                engine.ask(*self._messages(self._prompt(), others))
                if number == 1:  # it dies: the next one has its folder, and other options
                    self._add_counts(engine)
                    self.counts["deaths"] += 1
                    options |= self._options()
                    engine = self._engine(**options)
                alone = self._plain.ask(*self._messages(asked, []))
                again = [engine.ask(*self._messages(asked, crowd)) for crowd in (others, [])]
                self.num_different += any(one != alone for one in again)
                self.num_probes += 1
            self._add_counts(engine)

    def _prompt(self) -> dict[str, Any]:
        rng = self._rng
        own = np.resize(rng.integers(3, VOCAB, int(rng.integers(4, 40))), int(rng.integers(10, 90))).tolist()
        salt = str(rng.choice(["", "", "salt"]))
        options = {"temperature": float(rng.integers(0, 3)) / 2, "seed": int(rng.integers(1000)), "salt": salt}
        options["adapter"] = str(rng.choice(self._plain.adapters))
        return {"prompt": [*self._talk[: rng.integers(0, 140)], *own], "logprobs": VOCAB, **options}

    def _other(self) -> dict[str, Any]:
        return {**self._prompt(), "logprobs": None}

    def _messages(self, asked: dict[str, Any], others: list[dict[str, Any]]) -> tuple[AddRequest, list[AddRequest]]:
        messages = []
        for one in (*others, asked):
            self._number += 1
            digest, rest = one["adapter"], {name: value for name, value in one.items() if name != "adapter"}
            message = add_message(self._number, max_tokens=NUM_TOKENS, **rest)
            messages.append(with_adapter((0, message), digest)[1])
        return messages[-1], messages[:-1]

    def _add_counts(self, engine: Engine) -> None:
        stats = engine.core.scheduler.stats
        self.counts["fetched"] += engine.exchange.num_fetched
        self.counts["swapped"] += stats.num_swapped_out_blocks
        self.counts["preempted"] += stats.num_preemptions
        self.counts["drafted"] += stats.num_draft_tokens
        self.counts["accepted"] += stats.num_accepted_tokens
        self.counts["hits"] += stats.prefix_cache_hits


def kept_one_token_late(patch: pytest.MonkeyPatch) -> None:
    right = KeptStates.save

    def late(self: KeptStates, rows: Rows, counts: Ints) -> SavedStates:
        saved = right(self, rows, counts)
        return saved._replace(after=np.maximum(saved.after - 1, 1))

    patch.setattr(KeptStates, "save", late)


def of_all_drafts(patch: pytest.MonkeyPatch) -> None:
    """The state after the step's last draft is kept, whether it was right or not."""
    right = RowStates.accept

    def accept(self: RowStates, drafted: Any, counts: Any, live: Any = None) -> None:
        right(self, drafted, counts, np.zeros(int(drafted.in_plan.max(initial=-1)) + 1, np.bool_))

    patch.setattr(RowStates, "accept", accept)


def of_another_adapter(patch: pytest.MonkeyPatch) -> None:
    right = request.root_of_message
    patch.setattr(request, "root_of_message", lambda message: right(msgspec.structs.replace(message, adapter=None)))


FAULTS = [kept_one_token_late, of_all_drafts, of_another_adapter]


@pytest.mark.parametrize("plant", FAULTS)
def test_planted_faults_are_seen(
    plant: Callable[[pytest.MonkeyPatch], None], folders: Callable[[str], str], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        probes = probe("qwen3.5", folders, tmp_path, 8)
    assert probes.num_different > 0, probes.counts


def probe(family: str, folders: Callable[[str], str], folder: Path, count: int, seed: int = 1) -> Probes:
    probes = Probes(family, folders(family), folder / "kv", seed)
    probes.run(count)
    return probes


#: Families that differ from another one in a setting.
_VARIED = ("lfm2-biased", "falcon-h1-normed")


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=pytest.mark.soak if one in _VARIED else []) for one in HYBRIDS]
)
def test_a_prompt_again_has_the_bits_of_the_first_time(
    family: str, folders: Callable[[str], str], tmp_path: Path
) -> None:
    probes = probe(family, folders, tmp_path, 2)
    assert probes.num_different == 0, probes.counts
    assert probes.counts["fetched"] > 0


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("family", HYBRIDS)
def test_soak_a_prompt_again(family: str, folders: Callable[[str], str], tmp_path: Path) -> None:
    for seed in range(24):  # 14 families, 10,080 probes
        probes = probe(family, folders, tmp_path, 30, 1000 + seed)
        assert probes.num_different == 0, (seed, probes.counts)
        assert min(probes.counts.values()) > 0 or seed
