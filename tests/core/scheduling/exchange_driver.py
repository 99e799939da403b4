"""Shared by the tests of stores of KV blocks: a Driver whose host pool is exchanged with a real folder.

The store's answers come when the test lets them come, so every order of events can be played.
"""

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from core.execution.shared_blocks import BlockMemory, SharedBlocks
from core.inputs import EngineInput, StoreNews
from core.kv.orders import Fetch, Look, Order
from core.tiers.block_file import HEAD_BYTES
from core.tiers.block_folder import BlockFolder
from core.tiers.block_store import BesideContents, BlockStore, StateContents
from core.tiers.connector import Tier
from core.tiers.portable_names import PortableNames
from ipc.options.config import EngineConfig
from ipc.wire.block_roots import root_of_message
from ipc.wire.messages import AddRequest
from tests.core.driving import Driver, Received, expected_tokens, small_config
from tests.core.stateful_executor import StatefulExecutor
from tools.lab.check_scheduler.paged_executor import MARK, PagedExecutor, prefix_sums

BLOCK = 4


def exchange_config(num_host_blocks: int = 40, num_blocks: int = 12, **options: object) -> EngineConfig:
    return small_config(num_blocks, num_host_blocks=num_host_blocks, kv_dir="given", **options)  # type: ignore[arg-type]


class ExchangeDriver:
    """A Driver and its store. rng: None = the store answers before the next step."""

    def __init__(
        self,
        folder: Path,
        config: EngineConfig | None = None,
        rng: random.Random | None = None,
        max_bytes: int = 2**30,
        executor: type[PagedExecutor] = PagedExecutor,
    ) -> None:
        self.config = config or exchange_config()
        self.driver = Driver(self.config, executor=executor)
        self.engine, self.exchange = self.driver.engine, self.driver.scheduler.exchange
        self.folder = BlockFolder(str(folder), max_bytes)
        cache = self.driver.executor.kv.reshape(-1, BLOCK)
        made, kept = self.driver.executor, self.driver.scheduler.batch.kept_states
        states = BlockMemory([made.states[:, None]]) if isinstance(made, StatefulExecutor) else None
        blocks = SharedBlocks(BlockMemory([cache]), BlockMemory([made.host]), "paged executor", states)
        self._path = folder
        self.names = names = PortableNames(self.folder.key, self.driver.executor.info.fingerprint, BLOCK)
        assert self.exchange is not None
        pool = self.driver.scheduler.pool
        evictions, beside = self.exchange.evictions, None
        if pool.names.beside:
            beside = BesideContents(pool.names)
        elif kept is not None:
            beside = StateContents(kept)
        self.store = BlockStore(
            [Tier("kv_dir", self.folder, is_near=True, retain=self.folder.retain)],
            names,
            blocks,
            pool.names.content,
            evictions,
            beside=beside,
        )
        self.orders: list[Order] = []  # not carried out yet
        self.reads: list[tuple[int, int]] = []  # (ticket, blocks) of each Fetch
        self.num_looks = 0
        self.saves = True  # blocks in the KV cache are written
        self._rng = rng

    def step(self, *messages: AddRequest, now_ns: int = 0, others: list[tuple[int, EngineInput]] | None = None) -> None:
        """Let the store answer, then run a step with the answers and these messages of client 0."""
        inbox: list[tuple[int, EngineInput]] = [(0, answer) for answer in self.answers()]
        self.driver.step([*inbox, *((0, message) for message in messages), *(others or [])], now_ns)
        self.orders += self.engine.take_orders()

    def answers(self) -> list[StoreNews]:
        """Carry out what the store gets around to now."""
        count = len(self.orders) if self._rng is None else self._rng.randrange(len(self.orders) + 1)
        orders, self.orders = self.orders[:count], self.orders[count:]
        answers: list[StoreNews] = []
        for order in orders:
            answer = self.store.carry_out(order)
            if isinstance(order, Look):
                self.num_looks += 1
            if isinstance(order, Fetch):
                self.reads.append((order.ticket, len(order.slots)))
            if answer is not None:
                answers.append(answer)
        while self.saves and self.store.has_unsaved and (self._rng is None or self._rng.random() < 0.8):
            if (saved := self.store.save_one()) is not None:
                answers.append(saved)
        return answers

    def drain(self, limit: int = 5000) -> None:
        """Step until nothing is to be done, neither by the engine nor by the store."""
        for _ in range(limit):
            if not (self.engine.has_unfinished or self.orders or (self.saves and self.store.has_unsaved)):
                return
            self.step()
        raise AssertionError(f"still at work after {limit} steps")

    def run(self, message: AddRequest) -> Received:
        """Run one request and return what its client has."""
        self.step(message)
        self.drain()
        return self.driver.inbox.received[0, message.number]

    def check_files(self, messages: Iterable[AddRequest]) -> int:
        """Compare all files with what the blocks of these requests hold; return how many there are."""
        right: dict[str, bytes] = {}
        for message in messages:
            tokens = expected_tokens(message, self.config.max_model_len or 0)
            ids = np.concatenate([np.frombuffer(message.prompt_token_ids, "<i4"), np.array(tokens, np.int32)])
            sums = prefix_sums(ids)
            for index, name in enumerate(self.names.chain(root_of_message(message), ids)):
                of_block = sums[index * BLOCK : (index + 1) * BLOCK]
                right[f"{name.hex()}.kv"] = of_block.tobytes()
                beside = (of_block ^ MARK).tobytes() * (self.config.kv_page_blocks or 0)
                if isinstance(self.driver.executor, StatefulExecutor):
                    beside = of_block[-1:].tobytes()  # the state after the block
                right[f"{self.names.beside(name).hex()}.kv"] = beside
        paths = sorted((self._path / "blocks").iterdir())
        for path in paths:
            assert right.get(path.name) == path.read_bytes()[HEAD_BYTES:], "a file is not what its name says"
        return len(paths)

    def close(self) -> None:
        """End the engine, with all that is written; a further one may open the folder."""
        self.store.close()
