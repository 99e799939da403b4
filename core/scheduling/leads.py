"""Leads: a prompt with several choices is computed once, by the first choice; the others start when it is computed.

The choice that computes is the lead, and the others follow it (Request.follows). When the prompt is computed, they are
queued and start as forks of it (core/batch/forks.py); with recurrent layers, from a state that it leaves behind
(core/batch/kept_states.py). If a lead ends with its first token, its prompt is kept for them. If it is aborted before
that, the next choice becomes the lead.
"""

from core.batch.forks import Forks
from core.batch.request import NO_ROW, Request
from core.batch.table import BatchTable, RequestStart
from core.scheduling.waiting_queue import WaitingQueue


class Leads:
    """The running leads whose followers wait for the prompt. Steps without such rows cost nothing."""

    def __init__(self, table: BatchTable, forks: Forks, waiting: WaitingQueue) -> None:
        self._table = table
        self._forks = forks
        self._waiting = waiting
        self._running: list[Request] = []
        self._num_live = 0  # live messages with several choices or beams

    def __bool__(self) -> bool:
        """Return whether any live message has several choices or beams."""
        return self._num_live > 0

    def enter(self, choices: list[Request]) -> None:
        """Make all choices or beams of a new message follow the first one. They are in no queue yet.

        For a prompt of one token there is nothing to share, so each choice computes it. The same holds for prompts that
        are too short to be worth sharing, or that cannot be shared.
        """
        self._num_live += 1
        for request in choices:
            request.choices = choices
            may_follow = request.num_prompt_tokens > self._forks.least_shared
            request.follows = may_follow and request is not choices[0]

    def start(self, starts: list[RequestStart]) -> None:
        """Record the leads among the requests that start."""
        for lead in [start.request for start in starts if start.request.choices]:
            if any(choice.follows for choice in lead.choices):
                self._running.append(lead)

    def release_followers(self) -> None:
        """Queue the followers of leads whose prompts are computed. Forget leads that have lost their row."""
        running, self._running = self._running, []
        for lead in running:
            if lead.row == NO_ROW:
                continue  # preempted: it is recorded again when it resumes
            if self._table.num_computed_tokens[lead.row] >= lead.num_prompt_tokens - 1:
                self._release(lead.choices)
            else:
                self._running.append(lead)

    def finish(self, request: Request) -> None:
        """Queue the followers of a lead that has just produced its last token, and keep the prompt for them."""
        if any(choice.follows and not choice.is_finished for choice in request.choices):
            self._forks.keep(request)
            self._release(request.choices)

    def end(self, request: Request) -> None:
        """Choose another lead in place of one that has ended."""
        if not request.follows:
            following = [choice for choice in request.choices if choice.follows and not choice.is_finished]
            self._release(following[:1])
        if all(choice.is_finished for choice in request.choices):
            self._forks.drop(request.choices)
            self._num_live -= 1

    def _release(self, choices: list[Request]) -> None:
        for choice in choices:
            if choice.follows and not choice.is_finished:
                self._waiting.follow(choice, False)
