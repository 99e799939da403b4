"""PartExecutor: the local executor with a part of the model, in a worker process."""

import socket
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from core.execution.executor import StepHandle
from core.execution.plan import SchedulerOutput
from core.executors.local import LocalExecutor
from core.models.parts.rank import Rank
from core.models.parts.shard import Shard
from core.models.parts.stage import Stage
from core.models.parts.stage_link import StageLink
from core.models.parts.stage_llama import StageLlama
from core.runner.model_runner import ModelRunner
from core.workers.rank_channel import Followers
from core.workers.rank_runners import FollowingRunner, LeadingRunner
from core.workers.stage_runners import EarlierFollowingRunner, EarlierLeadingRunner, EarlierRunner
from core.workers.wires import Place, Wires
from ipc.options.config import EngineConfig
from ipc.wire.channel import Channel
from kernels.cpu.group import SeparateMemory, SharedMemory


class PartExecutor(LocalExecutor):
    """The executor of a rank of a stage."""

    def __init__(self, config: EngineConfig, place: Place, wires: Wires) -> None:
        """Load the part of the model that belongs to this place. Errors: those of LocalExecutor."""
        peers = [_channel(fd) for fd in wires.peers]
        runner: Callable[..., ModelRunner] = ModelRunner if place.is_last_stage else EarlierRunner
        rank = stage = None
        if place.size > 1:
            shares = SharedMemory(wires.memory) if wires.memory >= 0 else SeparateMemory(place.rank, wires.ranks)
            rank = Rank(Shard(place.rank, place.size), shares)
            leading = LeadingRunner if place.is_last_stage else EarlierLeadingRunner
            following = FollowingRunner if place.is_last_stage else EarlierFollowingRunner
            leader = partial(leading, followers=Followers(peers))
            runner = partial(following, leader=peers[0]) if place.rank else leader
        if place.num_stages > 1:
            before, after = (None if fd < 0 else _channel(fd) for fd in (wires.before, wires.after))
            stage = Stage(place.stage, place.num_stages, StageLink(before, after))
        if not place.answers:  # the one that samples makes all drafts
            config = msgspec.structs.replace(config, speculative_config=None)
        super().__init__(config, rank, runner, stage)

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Run the part's share of one step."""
        if isinstance(self._model, StageLlama):
            self._model.is_linked = True
        return super().execute(plan)

    def learn(self, sampled: list[tuple[bytes, bytes | None]]) -> None:
        """Learn the tokens of steps, the oldest first: token_ids and counts of each, int32. For stages but the last."""
        assert isinstance(self.runner, EarlierRunner), self.runner
        for tokens, counts in sampled:
            self.runner.learn(
                np.frombuffer(tokens, np.int32), None if counts is None else np.frombuffer(counts, np.int32)
            )


def _channel(fd: int) -> Channel:
    return Channel(socket.socket(fileno=fd))
