"""MirroredOracle: an OracleExecutor that tracks its rows from plans alone, as a runner does, and checks each plan."""

from collections.abc import Mapping, Sequence

import numpy as np

from core.execution.executor import ModelInfo, StepHandle
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.execution.runner_table import RunnerTable
from ipc.options.resolved import ResolvedConfig
from tools.commands.replay.what_if.oracle_executor import Candidates, ChoiceKey, Offers, OracleExecutor


class MirroredOracle(OracleExecutor):
    """An OracleExecutor with its own runner table, in which a plan of a faulty scheduler does not fit.

    Errors of execute(): AssertionError with the numbers.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        info: ModelInfo,
        tokens: Mapping[ChoiceKey, Sequence[int]],
        candidates: Candidates | None = None,
        *,
        offers: Offers | None = None,
    ) -> None:
        super().__init__(config, info, tokens, candidates, offers=offers)
        self.mirror = RunnerTable(config.max_num_seqs, config.block_size)

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Run one step."""
        self.mirror.apply(plan)
        samples = self.mirror.advance(plan)
        step = super().execute(plan)
        output: ModelRunnerOutput = step.result()
        if output.counts is not None:
            yields = output.counts > 0
            self.mirror.append_tokens(plan.rows[yields], output.token_ids, output.counts[yields].astype(np.int64))
            self.mirror.accept(plan, output.counts)
        else:
            tokens = output.token_ids[samples]
            self.mirror.append_tokens(plan.rows[samples][tokens >= 0], tokens[tokens >= 0])
        return step
