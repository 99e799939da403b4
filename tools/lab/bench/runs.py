"""Run a workload through the public LLM when the machine is quiet, and repeat a disturbed run."""

import time
from typing import Any, NamedTuple

from frontend.llm import LLM
from ipc.machine.cpus import usable_cpus
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from tools.lab.bench.quiet import (
    cpu_by_process,
    cpu_use,
    foreign_cpu,
    memory_mb,
    seconds_since_process_start,
    wait_until_quiet,
)
from tools.lab.bench.workloads import BenchRequest, Workload, warm_up_workload

#: A run is clean if other processes took less CPU time than this share of its wall time, or than these seconds.
_CLEAN_SHARE, _CLEAN_S = 0.04, 0.03


class RequestTimes(NamedTuple):
    """The times of one request, in monotonic seconds."""

    first_token: float
    last_token: float
    num_tokens: int


class Run(NamedTuple):
    """One run of a workload, and the machine's other work during it. Times: monotonic seconds."""

    workload: Workload
    begin: float  # when all requests are submitted
    end: float
    times: list[RequestTimes]
    foreign_cpu_s: float
    steal_s: float
    cpu_s: dict[str, float]
    peak_rss_mb: int
    pss_mb: int

    @property
    def wall_s(self) -> float:
        """Return the duration of the run in seconds."""
        return self.end - self.begin


class Bench:
    """An engine under measurement, warmed up; a context manager.

    options: of EngineConfig. connect: address of a running engine instead. tries: most runs of a workload until one is
    clean. quiet_seconds: longest wait for a quiet machine before each run. is_first: True = the start-up counts from
    the start of this process; False = from here, because another engine ran in this process.
    Errors: those of LLM.
    """

    def __init__(
        self,
        options: dict[str, Any],
        *,
        connect: str | None,
        tries: int,
        quiet_seconds: float,
        id_span: int,
        is_first: bool,
    ) -> None:
        self._tries = tries
        self._quiet_seconds = quiet_seconds
        self._num_runs = 0
        self.threads = options.get("threads") or usable_cpus()
        self.dtype = options.get("dtype") or "as served"
        begin_s = 0.0 if is_first else seconds_since_process_start()
        self._llm = LLM(connect=connect, skip_tokenizer_init=True, **options)
        self.ready_s = round(seconds_since_process_start() - begin_s, 2)
        warm = warm_up_workload(id_span)
        self.run_once(Workload("first", [BenchRequest(warm.requests[0].prompt, 1)], id_span))
        self.start_to_first_token_s = round(seconds_since_process_start() - begin_s, 2)
        self.run_once(warm)

    def run_once(self, workload: Workload) -> Run:
        """Run the workload once, whatever other work the machine does."""
        prompts: Any = [{"prompt_token_ids": request.prompt} for request in workload.requests]
        params = [request_params(request.max_tokens) for request in workload.requests]
        before, begin = cpu_use(), time.monotonic()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        end, after = time.monotonic(), cpu_use()
        return Run(
            workload=workload,
            begin=begin,
            end=end,
            times=[
                RequestTimes(
                    output.metrics.first_token_time, output.metrics.last_token_time, len(output.outputs[0].token_ids)
                )
                for output in outputs
            ],
            foreign_cpu_s=foreign_cpu(before, after),
            steal_s=after.steal - before.steal,
            cpu_s=cpu_by_process(before, after),
            **memory_mb(),
        )

    def run_cleanly(self, workload: Workload, round_: int) -> Run:
        """Return the cleanest of at most `tries` runs; each has its own token ids."""
        runs: list[Run] = []
        for _ in range(self._tries):
            self._num_runs += 1
            wait_until_quiet(self._quiet_seconds)
            runs.append(self.run_once(workload.shifted(round_ * 64 + self._num_runs)))
            if is_clean(runs[-1].foreign_cpu_s, runs[-1].wall_s):
                break
        return min(runs, key=lambda run: run.foreign_cpu_s / run.wall_s)

    def close(self) -> None:
        """Stop the engine, or close the connection to it."""
        self._llm.close()

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def request_params(max_tokens: int) -> SamplingParams:
    """Return parameters for greedy sampling of exactly max_tokens tokens, without text."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def is_clean(foreign_cpu_s: float, wall_s: float) -> bool:
    """Return whether other processes took so little CPU time that the run counts as undisturbed."""
    return foreign_cpu_s < max(_CLEAN_SHARE * wall_s, _CLEAN_S)
