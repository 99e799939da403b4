"""OfflineRun: the requests of one LLM.generate() or chat(), from the first submission to the last end."""

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from frontend.pooling import PreparedPooling, submit_pooling
from frontend.results.outputs import IGNORED, CompletionOutput, RequestMetrics, RequestOutput
from frontend.results.pooling_outputs import PoolingRequestOutput
from frontend.results.state import State
from frontend.session import EngineHandle, PreparedRequest, final_only
from frontend.text.prompt_forms import PromptInput
from frontend.text.prompts import text_and_ids
from ipc.errors import (
    DeadlineExceededError,
    EngineCoreError,
    InvalidRequestError,
    PromptTooLongError,
    RequestFailedError,
)

Prepared: TypeAlias = PreparedRequest | PreparedPooling
AnyOutput: TypeAlias = RequestOutput | PoolingRequestOutput

#: Least number of choices of one generate() that the engine has at the same time. The others wait here and cost it
#: nothing.
_MIN_WINDOW = 256


def run_all(
    engine: EngineHandle,
    prepared: Sequence[Prepared | EngineCoreError | RequestOutput],
    use_tqdm: bool | Callable[..., Any],
    *,
    return_exceptions: bool = False,
) -> list[Any]:
    """Run all requests and return their outputs in order; with return_exceptions, errors instead of failed outputs.

    Errors: those of LLM.generate().
    """
    if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
        raise InvalidRequestError(f"use_tqdm must be True, False or a class such as tqdm; got {use_tqdm!r:.80}")
    run = OfflineRun(engine, prepared, _ProgressBar(len(prepared), use_tqdm))
    try:
        run.serve()
    except EngineCoreError as error:
        error.outputs = run.outputs
        raise
    finally:
        run.close()
    if run.errors and not return_exceptions:
        raise _failure(run.errors, run.outputs)
    return [run.errors.get(index, output) for index, output in enumerate(run.outputs)]


def without_too_long(
    prompts: Sequence[PromptInput], prepared: Sequence[PreparedRequest | EngineCoreError], *, keeps_errors: bool
) -> list[PreparedRequest | EngineCoreError | RequestOutput]:
    """Return `prepared` with an output that says "ignored" in the place of each prompt that is too long.

    keeps_errors: other errors stay in their places. Errors: the first of them otherwise.
    """
    found: list[PreparedRequest | EngineCoreError | RequestOutput] = []
    for prompt, one in zip(prompts, prepared, strict=True):
        if isinstance(one, PromptTooLongError):
            text, ids = text_and_ids(prompt)
            ignored = CompletionOutput(0, "", [], finish_reason=IGNORED)
            found.append(RequestOutput("", text, ids, [ignored], True, RequestMetrics(time.monotonic())))
        elif isinstance(one, EngineCoreError) and not keeps_errors:
            raise one
        else:
            found.append(one)
    return found


class OfflineRun:
    """The requests of one call. prepared: a request that is over already has its output, or its error.

    A request that the engine refuses for lack of room is submitted again, after the time that the engine gives.
    """

    def __init__(
        self,
        engine: EngineHandle,
        prepared: Sequence[Prepared | EngineCoreError | RequestOutput],
        progress_bar: "_ProgressBar",
    ) -> None:
        self.outputs: list[AnyOutput | None] = [one if isinstance(one, RequestOutput) else None for one in prepared]
        self.errors: dict[int, EngineCoreError] = {  # by index of the prompt
            index: one for index, one in enumerate(prepared) if isinstance(one, EngineCoreError)
        }
        self._engine, self._client = engine, engine.client
        over = EngineCoreError, RequestOutput
        self._prepared = {index: one for index, one in enumerate(prepared) if not isinstance(one, over)}
        self._progress_bar = progress_bar
        self._window = max(_MIN_WINDOW, 4 * engine.client.welcome.limits.max_num_seqs)  # choices
        self._waiting = deque(self._prepared)
        self._refused: list[tuple[float, int]] = []  # heap of (monotonic time to submit it again, index)
        self._running: dict[int, tuple[int, State[AnyOutput]]] = {}  # by number
        self._num_choices = 0  # of the running ones
        self._first_number: int | None = None

    def serve(self) -> None:
        """Run all requests. Errors: EngineDeadError."""
        client, running = self._client, self._running
        while self._waiting or self._refused or running:
            self._submit(time.monotonic())
            left_s = max(0.0, self._refused[0][0] - time.monotonic()) if self._refused else None
            for number in client.wait(np.fromiter(running, np.int64, len(running)), left_s).tolist():
                self._look_at(number)

    def close(self) -> None:
        """Abort unfinished requests."""
        self._client.discard(self._running)
        self._progress_bar.close()

    def _submit(self, now: float) -> None:
        while self._refused and self._refused[0][0] <= now:
            self._waiting.appendleft(heapq.heappop(self._refused)[1])
        while self._waiting and (not self._running or self._num_choices < self._window):
            index = self._waiting.popleft()
            state = self._begin(self._prepared[index], index)
            if self._first_number is None:
                self._first_number = state.number
            self._running[state.number] = (index, state)
            self._num_choices += self._prepared[index].params.n

    def _begin(self, prepared: Prepared, index: int) -> State[AnyOutput]:
        if isinstance(prepared, PreparedPooling):
            return submit_pooling(self._engine, prepared)
        # The seed is that of an undisturbed run, in which prompts have consecutive numbers.
        seed = None if self._first_number is None else self._engine.derive_seed(self._first_number + index)
        return self._engine.submit(_final_only(prepared), seed=seed)

    def _look_at(self, number: int) -> None:
        """Take the news of a request."""
        index, state = self._running[number]
        output = None
        try:
            output = self._engine.advance(state)
            if output is None:
                return
            self.outputs[index] = output
        except RequestFailedError as error:
            if error.retry_after_ms:
                heapq.heappush(self._refused, (time.monotonic() + error.retry_after_ms / 1000, index))
            else:
                self.errors[index] = error
        except InvalidRequestError as error:
            self.errors[index] = error
        del self._running[number]
        self._num_choices -= self._prepared[index].params.n
        self._client.discard([number])
        if output is not None or index in self.errors:
            self._progress_bar.advance(output)


def _final_only(prepared: PreparedRequest) -> PreparedRequest:
    return prepared._replace(params=final_only(prepared.params))


def _failure(errors: dict[int, EngineCoreError], outputs: Sequence[AnyOutput | None]) -> EngineCoreError:
    """Return one error for all failed requests: it names the first, gives their number, and has the outputs."""
    index, first = min(errors.items())
    kinds = (InvalidRequestError, DeadlineExceededError, RequestFailedError)
    kind = next(kind for kind in kinds if isinstance(first, kind))
    more = f" ({len(errors)} of {len(outputs)} failed)" if len(errors) > 1 else ""
    failure = kind(f"prompt {index} of {len(outputs)}: {first}{more}")
    failure.outputs = outputs
    return failure


def _tqdm() -> Callable[..., Any]:
    """Return tqdm's class. Its import takes 15 ms, which a program without a bar is spared."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm  # type: ignore[no-any-return]


class _ProgressBar:
    """A tqdm bar with the rates of vLLM's bar; shows nothing if it is off."""

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        self._bar: Any = None
        self._num_input = 0
        self._num_output = 0
        self._start = time.monotonic()
        if use_tqdm:
            make = _tqdm() if isinstance(use_tqdm, bool) else use_tqdm
            self._bar = make(
                total=total, desc="Processed prompts", dynamic_ncols=True, postfix=self._rates(self._start + 1.0)
            )

    def advance(self, output: AnyOutput | None) -> None:
        """Count one request that finished with `output`, or failed (None)."""
        if self._bar is None:
            return
        if output is not None:
            self._num_input += len(output.prompt_token_ids)
            if isinstance(output, RequestOutput):
                self._num_output += sum(len(one.token_ids) for one in output.outputs)
            self._bar.postfix = self._rates(time.monotonic())
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _rates(self, now: float) -> str:
        seconds = max(now - self._start, 1e-9)
        input_rate, output_rate = self._num_input / seconds, self._num_output / seconds
        return f"est. speed input: {input_rate:.2f} toks/s, output: {output_rate:.2f} toks/s"
