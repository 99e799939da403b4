"""PartExecutor: the local executor for a part of the model, in a worker process."""

import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from core.execution.executor import WARM_UP_TOKENS, StepHandle
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.executors.load import Head, load_drafting_model, tap_for_head
from core.executors.local import LocalExecutor
from core.model_files.assistant import has_assistant
from core.models.interface import Model
from core.models.llama import Llama
from core.models.parts.rank import Rank
from core.models.parts.shard import Shard
from core.models.parts.stage import Stage
from core.models.parts.stage_link import StageLink
from core.models.parts.stage_llama import StageLlama
from core.runner.model_runner import ModelRunner
from core.runner.state_rows import DraftStates
from core.workers.rank_channel import Followers
from core.workers.rank_runners import FollowingRunner, FollowsTrials, LeadingRunner, LeadsTrials
from core.workers.wires import Place, Wires
from ipc.machine.channel import Channel
from ipc.options.config import EngineConfig
from ipc.tables.arrays import NO_INT32S, NO_INTS, Bools, Int32s, Ints
from kernels.cpu.group import SeparateMemory, SharedMemory


class PartExecutor(LocalExecutor):
    """The executor for one rank of a stage."""

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
        self._place, self._rank = place, rank
        super().__init__(config, rank, runner, stage)

    def _load_drafting(self, config: EngineConfig) -> Model | Head | None:
        """Return what makes drafts, in the process that samples. A head there reads states of all ranks and stages.

        The other ranks of the last stage have parts of an assistant.
        """
        if self._place.answers or (self._place.is_last_stage and has_assistant(config)):
            return load_drafting_model(config, self._loaded, is_part=True, rank=self._rank)
        if isinstance(self._model, Llama):
            tap_for_head(config, self._model)
        return None

    def warm_up(self) -> int:
        """Run the same short step as all other parts, and return its duration in ns."""
        return self.runner.warm_up(WARM_UP_TOKENS)

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Run this part of one step."""
        if isinstance(self._model, StageLlama):
            self._model.is_linked = True
        return super().execute(plan)

    def learn(self, sampled: list[tuple[bytes, bytes | None]]) -> None:
        """Learn the tokens of steps, oldest first: token_ids and counts of each, int32. For all stages but the last."""
        assert isinstance(self.runner, EarlierRunner), self.runner
        for tokens, counts in sampled:
            self.runner.learn(
                np.frombuffer(tokens, np.int32), None if counts is None else np.frombuffer(counts, np.int32)
            )


def _channel(fd: int) -> Channel:
    return Channel(socket.socket(fileno=fd))


# The model runners of all stages but the last: mirrors of the batch that learn tokens after their step.


@dataclass
class _Awaited:
    """A step whose tokens are not known here yet."""

    plan: SchedulerOutput
    rows: Ints  # [R]
    live: Bools  # [R] whether the row still belongs to the same request
    drafted: DraftStates | None  # where its recurrent states before drafts are


class EarlierRunner(ModelRunner):
    """The runner of any stage but the last. It samples nothing.

    The engine plans a row's next token once it knows the previous one, and sends that first. A row may have been
    removed since, and belong to another request; then its token is not needed here.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        none = dict.fromkeys(("grammars", "drafter", "pooler"))
        super().__init__(*arguments, **{**options, **none})
        self._awaited: deque[_Awaited] = deque()

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run this stage's part of one step. The output is not used."""
        self.apply_blocks(plan)
        self._feature_rows.apply(plan)
        if len(plan.removed_rows):
            for one in self._awaited:
                one.live &= ~np.isin(one.rows, plan.removed_rows)
        if not len(plan.rows):  # it encodes or drops images only
            self._awaited.append(_Awaited(plan, NO_INTS, np.ones(0, np.bool_), None))
            return ModelRunnerOutput(plan.step, NO_INT32S)
        self.model.wake()
        inputs = self.prepare(plan)
        self.forward(inputs)
        has_drafts = self.states is not None and inputs.sample_offsets is not None
        drafted = self.states.drafted if has_drafts and self.states is not None else None
        self._awaited.append(_Awaited(plan, inputs.rows, np.ones(len(inputs.rows), np.bool_), drafted))
        return ModelRunnerOutput(plan.step, NO_INT32S)

    def learn(self, tokens: Int32s, counts: Int32s | None) -> None:
        """Append the tokens of the oldest step whose tokens are unknown: columns of ModelRunnerOutput."""
        step = self._awaited.popleft()
        if not len(step.rows):  # it had a part of an image only
            return
        if counts is not None:
            self._learn_runs(step, tokens, counts)
            return
        known = step.live & (tokens >= 0)
        if not self._awaited and known.all():  # the newest inputs are of this step
            self._inputs.append(step.rows, tokens)
        else:
            self.table.append_tokens(step.rows[known], tokens[known])

    def _learn_runs(self, step: _Awaited, tokens: Int32s, counts: Int32s) -> None:
        owners = np.arange(len(counts)).repeat(counts)
        finite = (tokens >= 0) & step.live[owners]
        known = np.bincount(owners[finite], minlength=len(counts))
        going = known > 0
        self.table.append_tokens(step.rows[going], tokens[finite], known[going])
        self.table.accept(step.plan, np.where(step.live, counts, 0))
        if self.states is not None and step.drafted is not None:
            self.states.accept(step.drafted, counts, step.live)

    def _trial_step(self, num_tokens: int) -> None:
        self.forward(self._trial_inputs(num_tokens, num_tokens))


class EarlierLeadingRunner(LeadsTrials, EarlierRunner):
    """The runner for the first rank of such a stage."""


class EarlierFollowingRunner(FollowsTrials, EarlierRunner):
    """The runner for the other ranks of such a stage."""
