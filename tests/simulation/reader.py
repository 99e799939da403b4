"""Reader: the requests of one client as its program sees them; each token is read once and compared at once."""

from frontend.client.client import EngineClient
from frontend.client.received_logprobs import ReceivedLogprobs
from ipc.errors import EngineCoreError
from ipc.wire.messages import FinishReason
from tests.simulation.oracle import Excuse, Stream, check_error, check_logprobs
from tests.simulation.plan import Ask
from tests.simulation.world import MS, World


class Submitted:
    """A request that was submitted, with a stream for each of its choices."""

    def __init__(self, ask: Ask, streams: list[Stream], submitted_ns: int) -> None:
        self.ask = ask
        self.streams = streams
        self.submitted_ns = submitted_ns

    @property
    def is_over(self) -> bool:
        return all(stream.is_over for stream in self.streams)


class Reader:
    """The requests of one client. requests: by number, without those that were discarded."""

    def __init__(self, world: World) -> None:
        self.requests: dict[int, Submitted] = {}
        self._world = world

    @property
    def is_over(self) -> bool:
        """Whether the end of every request is known."""
        return all(one.is_over for one in self.requests.values())

    @property
    def streams(self) -> list[Stream]:
        return [stream for one in self.requests.values() for stream in one.streams]

    def read(self, client: EngineClient, number: int, excuses: set[Excuse]) -> None:
        """Take what is new of a request. Errors: Failure."""
        one = self.requests.get(number)
        if one is None:
            return
        for choice, stream in enumerate(one.streams):
            if stream.is_over:
                continue
            progress = client.read(number, len(stream.tokens), choice)
            stream.extend(progress.token_ids.tolist())
            if progress.error is not None:
                self._fail(one, stream, progress.error, excuses)
            elif progress.finish:
                stream.end(progress.finish, progress.stop_token)
                self._world.note("{} ends: {}", stream.name, progress.finish.name)
                if progress.finish != FinishReason.ABORT and progress.logprobs is not None:
                    self._check_logprobs(one.ask, choice, stream, progress.logprobs, client.welcome.vocab_size)
        if one.is_over and self._world.chance(0.5):
            client.discard([number])

    def _fail(self, one: Submitted, stream: Stream, error: EngineCoreError, excuses: set[Excuse]) -> None:
        stream.is_over = True
        all_excuses = set(excuses)
        if one.ask.deadline_ms and self._world.now_ns >= one.submitted_ns + one.ask.deadline_ms * MS:
            all_excuses.add(Excuse.DEADLINE)
        if any(each.due.finish == FinishReason.NONE for each in one.streams):
            all_excuses |= {Excuse.INVALID, Excuse.POISONED}
        if Excuse.QUEUE_BOUND in excuses and not any(each.tokens for each in one.streams):
            all_excuses.add(Excuse.NOT_BEGUN)
        if any(pin.is_required for pin in one.ask.pins) and not any(each.tokens for each in one.streams):
            all_excuses.add(Excuse.MUST_BE_PINNED)
        self._world.count(check_error(error, all_excuses))
        self._world.note("{} fails: {!r}", stream.name, error)

    def _check_logprobs(self, ask: Ask, choice: int, stream: Stream, found: ReceivedLogprobs, vocab_size: int) -> None:
        num_top = ask.params.prompt_logprobs if choice == 0 else None
        check_logprobs(found.prompt, ask.prompt[1:], 1, num_top, vocab_size)
        check_logprobs(found.output, stream.tokens, len(ask.prompt), ask.params.logprobs, vocab_size)
        self._world.count("log probabilities")
