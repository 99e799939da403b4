"""A second, slow statement of what Residents promises: it checks each action against the rules."""

from math import inf

from frontend.http.many.residents import FAILED_S, PATIENCE_S, Action, Admit, Refuse, Start, Stop


class Gold:
    """Follows one walk. sizes: of all models. Errors: AssertionError for an action that breaks a rule, or that is due
    and does not come.
    """

    def __init__(self, sizes: dict[str, int], keep: dict[str, float], memory: int, max_wait_s: float) -> None:
        self.sizes, self.keep, self.memory, self.max_wait_s = sizes, keep, memory, max_wait_s
        self.place = dict.fromkeys(sizes, "out")
        self.kept = dict(keep)
        self.used_at = dict.fromkeys(sizes, -inf)
        self.failed_at = dict.fromkeys(sizes, -inf)
        self.running: dict[int, str] = {}
        self.waiting: dict[int, tuple[str, float]] = {}  # request -> model, since when; the oldest first
        self.new: set[int] = set()  # requests that must be refused at once
        self.longest_wait_s = 0.0

    def request(self, request: int, name: str, now: float, kept: float | None) -> None:
        if self.sizes[name] > self.memory or (self.place[name] == "out" and now < self.failed_at[name] + FAILED_S):
            self.new.add(request)
            return
        self.kept[name] = self.keep[name] if kept is None else kept
        self.waiting[request] = name, now

    def leave(self, request: int, now: float) -> None:
        if request in self.running:
            self.used_at[self.running.pop(request)] = now
        self.waiting.pop(request, None)

    def on_ready(self, name: str, now: float) -> None:
        self.place[name], self.used_at[name] = "ready", now

    def on_end(self, name: str, now: float) -> None:
        if self.place[name] == "loading":
            self.failed_at[name] = now
            self.new |= {one for one, (wanted, _) in self.waiting.items() if wanted == name}
        self.place[name] = "out"

    def check(self, actions: list[Action], now: float) -> None:
        """Check one batch of actions, then that no other one is due."""
        stopped = [one.name for one in actions if isinstance(one, Stop)]
        for action in actions:
            match action:
                case Start(name):
                    assert self.place[name] == "out", name
                    assert name == self.head(), (name, self.head())
                    self.place[name] = "loading"
                    assert self.used() <= self.memory, action
                case Stop(name):
                    assert name in self.idle(), name
                    if now < self.used_at[name] + self.kept[name]:
                        self._check_victim(name, stopped)
                    self.place[name] = "stopping"
                case Admit(request):
                    name, since = self.waiting.pop(request)
                    assert self.place[name] == "ready", name
                    self.running[request], self.used_at[name] = name, now
                    self.longest_wait_s = max(self.longest_wait_s, now - since)
                case Refuse(request):
                    name, since = self.waiting.pop(request, ("", now))
                    assert request in self.new or now - since >= self.max_wait_s, action
                    self.new.discard(request)
                    self.longest_wait_s = max(self.longest_wait_s, now - since)
        self._check_nothing_is_due(now)

    def used(self) -> int:
        return sum(size for name, size in self.sizes.items() if self.place[name] != "out")

    def idle(self) -> list[str]:
        """The models that answer nothing, the least recently used first."""
        found = [name for name, place in self.place.items() if place == "ready" and name not in self.running.values()]
        return sorted(found, key=self.used_at.__getitem__)

    def head(self) -> str | None:
        """The model that waits longest for memory: that of the oldest request which no engine has or loads."""
        names = [name for name, _ in self.waiting.values()]
        return next((name for name in names if self.place[name] in ("out", "stopping")), None)

    def short(self, name: str) -> int:
        """Bytes that must still be freed for this model, after those that are being freed."""
        leaving = sum(size for one, size in self.sizes.items() if self.place[one] == "stopping")
        return self.used() + self.sizes[name] - self.memory - leaving

    def _check_victim(self, name: str, stopped: list[str]) -> None:
        """A model that has not expired leaves only if that is needed, and not before one that was used earlier."""
        head = self.head()
        assert head is not None, name
        assert self.short(head) > 0, (name, head)
        assert set(self.idle()[: self.idle().index(name)]) <= set(stopped), (name, self.idle(), stopped)

    def _check_nothing_is_due(self, now: float) -> None:
        assert not self.new, self.new
        wanted = {name for name, _ in self.waiting.values()}
        for name in self.idle():
            expired_at = self.used_at[name] + self.kept[name]
            assert name in wanted or now <= expired_at + 1, f"{name} has expired"  # the next tick stops it
        late = [one for one, (_, since) in self.waiting.items() if now - since >= self.max_wait_s + 2]
        assert not late, late
        head = self.head()
        if head is None or self.place[head] == "stopping":
            return
        assert self.used() + self.sizes[head] > self.memory, f"{head} fits and was not started"
        assert self.short(head) <= 0 or sum(map(self.sizes.get, self.idle())) < self.short(head), "idle models stay"  # type: ignore[arg-type]


#: What a walk may wait: for others' patience and answers, and for loads, each model once.
def bound_s(num_models: int, answer_s: float, load_s: float) -> float:
    return num_models * (PATIENCE_S + answer_s + 2 * load_s + 2)
