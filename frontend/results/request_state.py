"""RequestState: one request from its caller's side. It turns journal progress into RequestOutputs."""

from collections.abc import Iterator, Sequence

from frontend.client.progress import Progress
from frontend.client.received_logprobs import ReceivedLogprobs
from frontend.client.request_events import time_in_queue
from frontend.results.completion_state import CompletionState
from frontend.results.logprobs import each_logprobs
from frontend.results.outputs import RequestMetrics, RequestOutput, Submitted, TokenLogprobs
from frontend.text.prompt_context import prompt_context
from frontend.text.prompts import Prompt
from frontend.text.token_texts import TokenTexts
from frontend.text.tokenizer import Tokenizer
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ipc.wire.messages import FinishReason
from ipc.wire.scheduling_messages import EventKind


class RequestState:
    """The choices of one request, aggregated.

    CUMULATIVE shows all choices at every output, DELTA those with news, FINAL_ONLY all of them once. `finished` becomes
    true with the last output.
    """

    def __init__(
        self, request_id: str, number: int, prompt: Prompt, params: SamplingParams, *, tokenizer: Tokenizer | None
    ) -> None:
        self.request_id = request_id
        self.number = number
        self.finished = False
        self.submitted: Submitted | None = None  # set by who submits it
        self.prompt = prompt
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        context = self._context_of(prompt.token_ids)
        self.completions = [CompletionState(index, params, self._tokenizer, context) for index in range(params.n)]
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._progress: dict[int, Progress] = {}  # the last Progress of each choice
        self._stopped: list[int] = []

    @property
    def wanted(self) -> list[tuple[int, int]]:
        """Return (choice, position from which its Progress must begin) for each Progress that update() takes next."""
        return [(one.index, one.num_tokens) for one in self.completions if not one.finished]

    def update(self, *progress: Progress) -> RequestOutput | None:
        """Take a Progress for each wanted choice; return the output, None if there is nothing to show yet."""
        assert not self.finished, self.number
        going = [one for one in self.completions if not one.finished]
        changed = []
        for completion, one in zip(going, progress, strict=True):
            self._progress[completion.index] = one
            if completion.update(one):
                changed.append(completion)
            if completion.finished and one.finish == FinishReason.NONE:
                self._stopped.append(completion.index)
        self.finished = all(one.finished for one in self.completions)
        kind = self._params.output_kind
        if not changed or (kind == RequestOutputKind.FINAL_ONLY and not self.finished):
            return None
        shown = changed if kind == RequestOutputKind.DELTA else self.completions
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=[one.output() for one in shown],
            finished=self.finished,
            metrics=self._metrics(),
            prompt_logprobs=self._take_prompt_logprobs(),
            num_cached_tokens=self._progress[changed[0].index].num_cached_tokens,
            submitted=self.submitted,
            pins=self._progress[changed[0].index].pins,
        )

    def take_stopped(self) -> list[int]:
        """Return the choices that a stop string has ended since the last call. The engine has not been informed of
        these.
        """
        stopped, self._stopped = self._stopped, []
        return stopped

    def _take_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Return the prompt's log probabilities to show now.

        They come with the first choice and are complete once it has a token. With DELTA they are shown once.
        """
        first = self._progress.get(0)
        if self._params.prompt_logprobs is None or first is None or first.logprobs is None:
            return None
        if self._prompt_logprobs is not None:
            return None if self._params.output_kind == RequestOutputKind.DELTA else self._prompt_logprobs
        if self.completions[0].token_ids:
            self._prompt_logprobs = list(self.each_prompt_logprobs(first.logprobs))
        return self._prompt_logprobs

    def each_prompt_logprobs(self, received: ReceivedLogprobs) -> Iterator[TokenLogprobs | None]:
        """Yield the log probabilities of each token of the prompt, which are complete once there is a token."""
        texts = None
        if self._tokenizer is not None:
            context = self._context_of(self.prompt.token_ids[:1])
            texts = TokenTexts(self._tokenizer, self._params.skip_special_tokens, context)
        yield None
        yield from each_logprobs(received.prompt, texts)

    def _context_of(self, token_ids: Sequence[int]) -> list[int]:
        if self._tokenizer is None:
            return []
        return prompt_context(self._tokenizer, token_ids, self._params.skip_special_tokens)

    def _metrics(self) -> RequestMetrics:
        all_progress = self._progress.values()
        first = [one.first_token_time for one in all_progress if one.first_token_time]
        # A stop string ends a choice here, before the engine is informed.
        ends = [one.finished_time or one.last_token_time for one in all_progress]
        events = max((one.events for one in all_progress), key=len)
        arrival_time, queued_s = min(one.arrival_time for one in all_progress), time_in_queue(events)
        return RequestMetrics(
            arrival_time=arrival_time,
            first_token_time=min(first, default=0.0),
            last_token_time=max(one.last_token_time for one in all_progress),
            finished_time=max(ends) if self.finished else 0.0,
            num_generation_tokens=max(len(one.token_ids) for one in self.completions),
            first_scheduled_time=0.0 if queued_s is None else arrival_time + queued_s,
            time_in_queue=queued_s,
            num_preemptions=sum(event.kind is EventKind.PREEMPTED for event in events),
            num_draft_tokens=sum(one.num_draft_tokens for one in all_progress),
            num_accepted_tokens=sum(one.num_accepted_tokens for one in all_progress),
            events=events,
        )
