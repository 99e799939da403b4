"""Recurrent states in a folder of KV blocks: who finds them there, and that no bit depends on it.

An engine that is killed leaves its folder. The next engine is made of nothing else.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.batch.kept_states import KeptStates
from core.engine import EngineCore
from core.execution.plan import SavedStates
from core.execution.shared_blocks import BlockMemory, SharedBlocks
from core.inputs import EngineInput
from core.models.llama import Llama
from core.tiers.block_folder import BlockFolder
from core.tiers.block_store import BlockStore, StateContents
from core.tiers.connector import Tier
from core.tiers.portable_names import PortableNames
from ipc.tables.arrays import Ints, Rows
from ipc.wire.messages import AddRequest
from kernels.elements import BFLOAT16
from tests.core.runner.invariance import (
    TARGET,
    Between,
    Recorder,
    bits,
    drive,
    recorded_engine,
    request,
    run,
    small_config,
    tiny_model,
)
from tests.core.runner.invariance_scenarios import PROMPT, Preempting
from tests.core.runner.test_swapped_states import NGRAM

RECURRENT = ("short convolution", "gated delta", "state space")
Sent = list[tuple[int, AddRequest]]


class Engine:
    """One engine with a folder. close() is like its death: nothing else is left."""

    def __init__(self, model: Llama, folder: Path, **settings: Any) -> None:
        memory = 2 * 4 * model.config.state_size * (4 + 20)
        config = small_config(**{"rows": 4, "memory": memory, "num_host_blocks": 160, **settings})
        self.engine, self.recorder = recorded_engine(model, msgspec.structs.replace(config, kv_dir=str(folder)))
        scheduler = self.engine.scheduler
        exchange, kept, host, states = (
            scheduler.exchange,
            scheduler.batch.kept_states,
            self.recorder.swap_cache,
            self.recorder.states,
        )
        assert exchange is not None
        assert kept is not None
        assert host is not None
        assert states is not None
        cache = self.recorder.cache
        memories = SharedBlocks(BlockMemory(cache.memory), BlockMemory(host.memory), "", BlockMemory([states.states]))
        blocks = BlockFolder(str(folder), 2**30)
        names, contents = PortableNames(blocks.key, "tiny", 16), scheduler.pool.names.content
        tiers = [Tier("kv_dir", blocks, is_near=True)]
        self.store = BlockStore(tiers, names, memories, contents, exchange.evictions, beside=StateContents(kept))
        self.exchange, self.stores = exchange, True

    def ask(self, inbox: Sent, between: Between | None = None) -> None:
        """Run these requests to their ends, or to that of the target."""

        def exchanged(engine: EngineCore, recorder: Recorder) -> list[tuple[int, EngineInput]]:
            answers = [self.store.carry_out(order) for order in engine.take_orders()]
            while self.stores and self.store.has_unsaved:
                answers.append(self.store.save_one())
            others = between(engine, recorder) if between is not None else []
            return [*((0, one) for one in answers if one is not None), *others]

        drive(self.engine, self.recorder, [*inbox], exchanged)

    def close(self) -> None:
        """End it."""
        self.store.close()


def asked(
    model: Llama, folder: Path, inbox: Sent, between: Between | None = None, *, stores: bool = True, **settings: Any
) -> Engine:
    """Run requests on an engine of their own. stores: whether it writes what they leave."""
    engine = Engine(model, folder, **settings)
    engine.stores = stores
    engine.ask(inbox, between)
    engine.close()
    return engine


def num_different(engine: Engine, model: Llama, prompt: list[int], max_tokens: int) -> int:
    """Return how many of the target's logits are not those of the target alone."""
    alone = run(model, prompt, prefix_caching=False, max_tokens=max_tokens, temperature=0.8)
    got = [engine.recorder.logits[TARGET, 0, place] for place in range(max_tokens)]
    return int((bits(np.stack(got)) != bits(alone.logits[0])).sum())


def turn(prompt: list[int], num_more: int = 40, seed: int = 1) -> list[int]:
    """Return a prompt and the tokens of a next turn."""
    return [*prompt, *np.random.default_rng(seed).integers(1, 500, num_more).tolist()]


@pytest.mark.parametrize("kind", RECURRENT)
def test_the_next_turn_finds_its_state_after_a_restart(kind: str, tmp_path: Path) -> None:
    model, second = tiny_model(BFLOAT16, kind), turn(PROMPT)
    asked(model, tmp_path, [request(1, PROMPT, 4, 0.8)])
    engine = asked(model, tmp_path, [request(TARGET, second, 4, 0.8)])
    assert num_different(engine, model, second, 4) == 0
    assert engine.exchange.num_fetched == 288 // 16 + 1
    assert engine.recorder.scheduler.batch.host_cache.num_hits == 288 // 16


def test_a_state_that_was_damaged_or_is_gone_is_computed_again(tmp_path: Path) -> None:
    """The longest prefix with a state that can be read is used."""
    model, second = tiny_model(BFLOAT16, "gated delta"), turn(PROMPT)
    asked(model, tmp_path, [request(1, PROMPT, 4, 0.8)])
    paths = sorted((tmp_path / "blocks").glob("*.kv"), key=lambda path: path.stat().st_size)
    states = [path for path in paths if path.stat().st_size > paths[0].stat().st_size]
    assert len(states) == 2
    for path, is_found in zip(states, (True, False), strict=True):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        engine = asked(model, tmp_path, [request(TARGET, second, 4, 0.8)], stores=False)
        assert num_different(engine, model, second, 4) == 0
        assert (engine.recorder.scheduler.batch.host_cache.num_hits > 0) == is_found


def test_other_salts_have_other_states(tmp_path: Path) -> None:
    model = tiny_model(BFLOAT16, "gated delta")
    (client, message), more = request(1, PROMPT, 4, 0.8), turn(PROMPT)
    asked(model, tmp_path, [(client, msgspec.structs.replace(message, cache_salt="other"))])
    assert asked(model, tmp_path, [request(TARGET, more, 4, 0.8)]).exchange.num_fetched == 0


@pytest.mark.parametrize("fault", ["late", "of another place"])
def test_a_wrong_state_in_a_file_is_noticed(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, second = tiny_model(BFLOAT16, "gated delta"), turn(PROMPT)
    if fault == "late":
        right = KeptStates.save

        def late(self: KeptStates, rows: Rows, counts: Ints) -> SavedStates | None:
            saved = right(self, rows, counts)
            return None if saved is None else saved._replace(after=saved.after - 1)

        monkeypatch.setattr(KeptStates, "save", late)
    else:
        store = KeptStates.to_store
        monkeypatch.setattr(KeptStates, "to_store", lambda self, contents: np.roll(store(self, contents), 1))
        monkeypatch.setattr(BlockStore, "_is_there", lambda *_: True)
    asked(model, tmp_path, [request(1, PROMPT, 4, 0.8)])
    assert num_different(asked(model, tmp_path, [request(TARGET, second, 4, 0.8)]), model, second, 4) > 0


def probe(kind: str, seed: int, folder: Path) -> int:
    """Ask A, others, and A again with another end, with kills between. Return how many blocks and states were read.

    Drafts, every kind of preemption, chunks, a small cache and few slots of states come in turn.
    """
    model, rng = tiny_model(BFLOAT16, kind), np.random.default_rng(seed)
    cut, end = int(rng.integers(200, 290)), int(rng.integers(100, 200))
    shared = cut if seed % 4 < 2 else end  # the next turn; or a beginning that two prompts have had
    again = turn(PROMPT[:shared], int(rng.integers(1, 60)), seed)
    settings: dict[str, Any] = {"budget": int(rng.integers(40, 400)), "num_blocks": int(rng.integers(40, 90))}
    settings["memory"] = 2 * 4 * model.config.state_size * (4 + int(rng.integers(2, 24)))
    settings["num_swap_blocks"] = 60 * (seed % 2)
    settings["speculative"] = NGRAM if seed % 3 else None
    crowd = [request(n, turn(PROMPT[: int(rng.integers(280))], 40, n), 4, 0.7) for n in range(3, 6)]
    between = Preempting({int(step) for step in rng.integers(1, 9, 3)}, forgets=seed % 3 == 0)
    engine = Engine(model, folder, **settings)
    engine.ask([request(1, PROMPT[:cut], 3, 0.0)])
    engine.ask([request(2, turn(PROMPT[:end], 40, 2), 3, 0.0)])
    if seed % 2:
        engine.ask(crowd[:2])
    engine.close()
    engine = asked(model, folder, [*crowd[2:], request(TARGET, again, 4, 0.8)], between, **settings)
    assert num_different(engine, model, again, 4) == 0, (kind, seed)
    return engine.exchange.num_fetched


@pytest.mark.parametrize("count", [2, pytest.param(3400, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("kind", RECURRENT)
def test_a_prompt_has_the_same_bits_after_a_kill(kind: str, count: int, tmp_path: Path) -> None:
    num_read = [probe(kind, seed, tmp_path / str(seed)) for seed in range(count)]
    assert np.count_nonzero(num_read) >= count * 3 // 4
