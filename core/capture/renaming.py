"""Renaming: renames the tokens, salts, tenants and other content in a capture's requests and results."""

import secrets
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from core.batch.request import Request
from core.batch.table import BatchTable
from core.execution.plan import ModelRunnerOutput
from core.inputs import EngineInput, ExecutorLost
from ipc.errors import CaptureFileError
from ipc.params.pooling_params import PoolingParams
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import AnyInts, Int32s, Ints
from ipc.wire.block_roots import PLAIN_ROOT, root_of_message, root_of_salt
from ipc.wire.feature_messages import FeatureUse
from ipc.wire.lora_messages import AdapterId
from ipc.wire.messages import AddRequest, Submission
from ipc.wire.pin_messages import ForkPin, GetPins, Pin, ReleasePin
from ipc.wire.pooling_messages import AddPooling

#: The parameters that the scheduler reads in addition to stop_token_ids. The rest is left out.
_KEPT = (
    "n",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
)
_DROPPED = 0  # a token for a row that had left when it arrived: it is never read


class Renaming:
    """The names of one redaction.

    stop_token_ids: of all requests. Errors: CaptureFileError if the vocabulary has too few names.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int], stop_token_ids: Iterable[int]) -> None:
        self._eos = set(eos_token_ids)
        stops = sorted(set(stop_token_ids) - self._eos)
        unused = (token for token in range(vocab_size) if token not in self._eos)
        self._stops = {**dict(zip(stops, unused, strict=False)), **{token: token for token in self._eos}}
        self.tokens = TokenNames(vocab_size, {*self._eos, *self._stops.values()})
        if self.tokens.num_names < vocab_size // 2 or len(self._stops) < len(stops):
            raise CaptureFileError(f"{len(stops)} stop tokens in a vocabulary of {vocab_size} leave too few names")
        self._roots = {PLAIN_ROOT: PLAIN_ROOT}
        # by request: (number of tokens, state after them)
        self._states: dict[tuple[int, int, int], tuple[int, bytes]] = {}

    # --- messages ---

    def learn(self, message: Submission) -> None:
        """Record the root of a message's blocks, before any state is renamed."""
        digest = "" if message.adapter is None else message.adapter.digest
        salt, tenant = map(self.tokens.word, (message.cache_salt, message.tenant))
        old, new = root_of_message(message), root_of_salt(salt, tenant, self.digest(digest))
        assert self._roots.setdefault(old, new) == new, f"root {old} was renamed before a message with it was learned"

    def root(self, root: int) -> int:
        """Return the new root for blocks; see ipc/wire/block_roots.py."""
        if root not in self._roots:
            self._roots[root] = root_of_salt(self.tokens.word(f"root {root}"))
        return self._roots[root]

    def begin(self, root: int) -> bytes:
        """Return the state before the first token of a sequence with this new root."""
        return self.tokens.begin(str(root))

    def message(self, message: EngineInput) -> EngineInput:
        """Return the message without content."""
        if isinstance(message, ExecutorLost):
            return msgspec.structs.replace(message, text="")
        if isinstance(message, ReleasePin | ForkPin | GetPins):
            return self._pin_call(message)
        if not isinstance(message, AddRequest | AddPooling):
            return message
        self.learn(message)
        state = self.begin(self.root(root_of_message(message)))
        prompt, state = self.tokens.name_all(state, _int32s(message.prompt_token_ids))
        changes: dict[str, Any] = {
            "prompt_token_ids": prompt.astype("<i4").tobytes(),
            "cache_salt": self.tokens.word(message.cache_salt),
            "tenant": self.tokens.word(message.tenant),
            "adapter": self.adapter(message.adapter),
            "features": self.features(message.features),
        }
        if isinstance(message, AddPooling):
            return msgspec.structs.replace(message, **changes)
        delivered = [self._delivered(state, _int32s(column), message.params) for column in message.delivered]
        params = self.params(message.params)
        changes["pins"] = self.pins(message.pins)
        return msgspec.structs.replace(message, params=params, seed=0, delivered=delivered, **changes)

    def digest(self, digest: str) -> str:
        """Return another digest for an adapter, in the same form; "" for none."""
        return self.tokens.word(digest) * 2

    def features(self, features: Sequence[FeatureUse]) -> list[FeatureUse]:
        """Return what the scheduler reads of a request's features: places of those computed in one step, and images."""
        kept = (use for use in features if use.is_whole or use.is_encoded)
        return [
            msgspec.structs.replace(use, digest=self.feature(use.digest) if use.is_encoded else b"") for use in kept
        ]

    def pins(self, pins: Sequence[Pin]) -> tuple[Pin, ...]:
        """Return the pins of a request under other names."""
        return tuple(msgspec.structs.replace(pin, name=self.tokens.word(pin.name)) for pin in pins)

    def _pin_call(self, message: ReleasePin | ForkPin | GetPins) -> ReleasePin | ForkPin | GetPins:
        """Return a call on pins under other names."""
        names = [name for name in ("name", "new_name", "tenant") if hasattr(message, name)]
        return msgspec.structs.replace(message, **{name: self.tokens.word(getattr(message, name)) for name in names})

    def feature(self, digest: bytes) -> bytes:
        """Return another digest for an image."""
        return bytes.fromhex(self.tokens.word(digest.hex()))

    def adapter(self, adapter: AdapterId | None) -> AdapterId | None:
        """Return another adapter, whose files do not exist."""
        return None if adapter is None else AdapterId(self.digest(adapter.digest))

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters that the scheduler reads."""
        kept = {name: getattr(params, name) for name in _KEPT}
        if params.stop_token_ids:
            kept["stop_token_ids"] = [self._stops[token] for token in params.stop_token_ids]
        if params.prompt_logprobs is not None:
            kept["prompt_logprobs"] = 0
        return SamplingParams(temperature=min(params.temperature, 1.0), **kept)

    def any_params(self, params: SamplingParams | PoolingParams) -> SamplingParams | PoolingParams:
        """Return the parameters that the scheduler reads."""
        return self.params(params) if isinstance(params, SamplingParams) else params

    def stop(self, token: int) -> int:
        """Return the new name of a stop token."""
        return self._stops[token]

    def _delivered(self, state: bytes, tokens: Int32s, params: SamplingParams) -> bytes:
        if not len(tokens):
            return b""
        names, state = self.tokens.name_all(state, tokens[:-1])
        last, is_over = int(tokens[-1]), len(tokens) >= params.min_tokens
        by_eos = last in self._eos and not params.ignore_eos
        ends = is_over and (by_eos or last in (params.stop_token_ids or ()))
        name = self._stops[last] if ends else self.tokens.name(state, last)
        return np.append(names, name).astype("<i4").tobytes()

    # --- results ---

    def result(self, output: ModelRunnerOutput, table: BatchTable, rows: Ints, tenancies: Ints) -> ModelRunnerOutput:
        """Return the result of a plan with these rows, renamed for the requests that are still in them."""
        tokens, at = output.token_ids.copy(), 0
        counts = np.ones(len(rows), np.int64) if output.counts is None else output.counts
        for row, tenancy, count in zip(rows.tolist(), tenancies.tolist(), counts.tolist(), strict=True):
            request = table.request[row]
            run = tokens[at : at + count]
            if request is None or table.tenancy[row] != tenancy:
                run[run >= 0] = _DROPPED
            elif (run >= 0).any():
                self._run(request, table, row, run)
            at += count
        candidates = output.candidates
        if candidates is not None:
            ids, at = candidates.token_ids.copy(), 0
            for index, count in zip(candidates.rows.tolist(), candidates.counts.tolist(), strict=True):
                row = int(rows[index])
                request = table.request[row]
                if request is not None and table.tenancy[row] == tenancies[index]:
                    state = self._state(request, table, row)
                    part = ids[at : at + count]
                    part[:] = [self._candidate(state, request, token) for token in part.tolist()]
                at += count
            candidates = msgspec.structs.replace(candidates, token_ids=ids)
        pooled = output.pooled
        if pooled is not None:
            pooled = msgspec.structs.replace(pooled, values=np.zeros_like(pooled.values))
        changes = {
            "token_ids": tokens,
            "candidates": candidates,
            "pooled": pooled,
            "failures": [(index, "") for index, _ in output.failures],
            "draft_token_ids": np.zeros_like(output.draft_token_ids),  # what a grammar forces is part of its text
        }
        return msgspec.structs.replace(output, **changes)

    def _run(self, request: Request, table: BatchTable, row: int, run: Int32s) -> None:
        """Rename the new tokens of a row."""
        state, length = self._state(request, table, row), int(table.num_tokens[row])
        params, may_stop_at = request.sampling, int(table.min_total_tokens[row])
        assert params is not None, f"a token of request {request.number}, which is a pooling request"
        stops = params.stop_token_ids or ()
        for place, token in enumerate(run.tolist()):
            length += 1
            by_eos = token in self._eos and not params.ignore_eos
            if length >= may_stop_at and (by_eos or self._stops.get(token, -1) in stops):
                run[place] = self._stops[token]
            else:
                run[place] = self.tokens.name(state, token)
            state = self.tokens.follow(state, int(run[place]))
        self._states[request.client, request.number, request.choice] = length, state

    def _candidate(self, state: bytes, request: Request, token: int) -> int:
        assert request.sampling is not None, f"a candidate of request {request.number}, which is a pooling request"
        params = request.sampling
        by_eos = token in self._eos and not params.ignore_eos
        ends = by_eos or self._stops.get(token, -1) in (params.stop_token_ids or ())
        return self._stops[token] if ends else self.tokens.name(state, token)

    def _state(self, request: Request, table: BatchTable, row: int) -> bytes:
        """Return the state after a row's tokens, which are already renamed."""
        known = self._states.get((request.client, request.number, request.choice))
        if known is not None and known[0] == table.num_tokens[row] and not request.searches:
            return known[1]
        return self.tokens.follow_all(self.begin(request.root), table.token_ids(row))


def _int32s(column: bytes) -> Int32s:
    return np.frombuffer(column, "<i4").astype(np.int32, copy=False)


# TokenNames: renames a capture's tokens so that equal beginnings stay equal and nothing else is revealed.
#
# A token's name is a keyed hash of the token and of the names before it. The key is generated for one redaction and
# then discarded. Two sequences have equal names exactly as far as their tokens are equal: after the same beginning,
# different tokens have different names. The same token at two positions has two names, so neither frequencies nor a
# dictionary reveal what it was.


_STATE_BYTES = 16
_TRIES = 64  # tries after which the remaining names are checked


class TokenNames:
    """Names from a vocabulary without the reserved ids, which only name tokens that end requests."""

    def __init__(self, vocab_size: int, reserved: set[int]) -> None:
        self._key = secrets.token_bytes(32)
        self._free = np.setdiff1d(np.arange(vocab_size), np.array(sorted(reserved), np.int64)).tolist()
        self._taken: dict[tuple[bytes, int], int] = {}  # by (state, name): the token that has the name there
        self._num_taken: dict[bytes, int] = {}  # number of names used, by state

    @property
    def num_names(self) -> int:
        """Return the number of names that a token can have."""
        return len(self._free)

    def begin(self, label: str) -> bytes:
        """Return the state before the first token. label: what the sequence belongs to, such as its cache salt."""
        return blake2b(label.encode(), digest_size=_STATE_BYTES, key=self._key).digest()

    def follow(self, state: bytes, name: int) -> bytes:
        """Return the state after a name."""
        return blake2b(state + name.to_bytes(4, "little"), digest_size=_STATE_BYTES, key=self._key).digest()

    def follow_all(self, state: bytes, names: AnyInts) -> bytes:
        """Return the state after these names."""
        for name in names.tolist():
            state = self.follow(state, name)
        return state

    def name(self, state: bytes, token: int) -> int:
        """Return the name of a token in a state.

        Errors: CaptureFileError if more tokens follow than there are names, because prompts may also have reserved ids.
        """
        attempt = 0
        while True:
            text = state + token.to_bytes(4, "little", signed=token < 0) + attempt.to_bytes(4, "little")
            drawn = int.from_bytes(blake2b(text, digest_size=8, key=self._key).digest(), "little")
            name: int = self._free[drawn % len(self._free)]
            owner = self._taken.get((state, name))
            if owner == token:
                return name
            if owner is None:
                self._taken[state, name] = token
                self._num_taken[state] = self._num_taken.get(state, 0) + 1
                return name
            attempt += 1
            if attempt % _TRIES == 0 and self._num_taken[state] >= len(self._free):
                raise CaptureFileError(
                    f"more than {len(self._free)} different tokens follow the same beginning: there are no names for "
                    "them; a capture of so small a vocabulary cannot be redacted"
                )

    def name_all(self, state: bytes, tokens: AnyInts) -> tuple[Int32s, bytes]:
        """Return the names of consecutive tokens, and the state after them."""
        names = []
        for token in tokens.tolist():
            names.append(self.name(state, token))
            state = self.follow(state, names[-1])
        return np.array(names, np.int32), state

    def word(self, text: str) -> str:
        """Return another word for a salt, a tenant or another name; "" for none."""
        return blake2b(text.encode(), digest_size=8, key=self._key, person=b"word").hexdigest() if text else ""
