"""Leads: a prompt with several choices is computed once, by the first of them; the others start when it is there.

The choice that computes is the lead, and the others follow it (Request.follows). When it has the prompt, they queue up
and start as forks of it (core/batch/forks.py); with recurrent layers they start from a state that it has left
(core/batch/kept_states.py). A lead that ends with its first token keeps the prompt for them. When it is aborted before,
the next one leads.
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
        self._num_live = 0  # messages with several choices or beams of which one is live

    def __bool__(self) -> bool:
        """Return whether any live message has several choices or beams."""
        return self._num_live > 0

    def enter(self, choices: list[Request]) -> None:
        """Let all choices or beams of a new message but the first follow that. They are in no queue yet.

        A prompt of one token is computed by each choice: there is nothing to share. So are others that it does not pay
        to share, or that cannot be.
        """
        self._num_live += 1
        for request in choices:
            request.choices = choices
            may_follow = request.num_prompt_tokens > self._forks.least_shared
            request.follows = may_follow and request is not choices[0]

    def start(self, starts: list[RequestStart]) -> None:
        """Note the leads among the requests that start."""
        for lead in [start.request for start in starts if start.request.choices]:
            if any(choice.follows for choice in lead.choices):
                self._running.append(lead)

    def release_followers(self) -> None:
        """Let the followers of leads that have their prompt queue up. Forget leads that have lost their row."""
        running, self._running = self._running, []
        for lead in running:
            if lead.row == NO_ROW:
                continue  # preempted: it is noted again when it resumes
            if self._table.num_computed_tokens[lead.row] >= lead.num_prompt_tokens - 1:
                self._release(lead.choices)
            else:
                self._running.append(lead)

    def finish(self, request: Request) -> None:
        """Let all followers of a lead queue up that has its last token, and keep the prompt for them."""
        if any(choice.follows and not choice.is_finished for choice in request.choices):
            self._forks.keep(request)
            self._release(request.choices)

    def end(self, request: Request) -> None:
        """Let another choice lead in place of one that has ended."""
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
