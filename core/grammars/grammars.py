"""Grammars: the compiled grammars of structured outputs, and the vocabulary that they are compiled for.

llguidance is imported when the first request needs it, or earlier when the engine is idle. The preparation thread
compiles a grammar after another process has test-compiled it (core/grammars/checker.py) and before the engine receives
its request. It is kept as long as the request lives. A replay has no such thread; there it is compiled when the
request's row is added. In both cases, what a matcher allows is a function of grammar, vocabulary and tokens.
"""

import contextlib
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from core.grammars.compilation import check_library, compile_grammar
from core.grammars.vocabulary import Divide, Vocabulary, build_vocabulary
from ipc.errors import ModelFileError, UnsupportedParameterError
from ipc.options.config import EngineConfig
from ipc.options.tokenizer_files import tokenizer_files_of
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.wire.messages import AddRequest, Submission

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: Compiled grammars kept although no request uses them, about 100 KB each.
MAX_CACHED = 256
#: Seconds that the GIL is held while the vocabulary is built, except for calls that hold it until they return.
_SWITCH_S = 0.0001

GrammarKey = tuple[object, ...]


class _Compiled:
    """A compiled grammar. Its copies share a lexer, whose states and expressions are limited in total."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher
        self.num_copies = 0

    def copy(self) -> "LLMatcher":
        """Return a matcher at the start of its text."""
        self.num_copies += 1
        return self._matcher.deep_copy()


class Grammars:
    """One engine's grammars. All methods may be called from any thread.

    read_files: returns the model's tokenizer files; called on first use.
    """

    def __init__(
        self, read_files: Callable[[], Mapping[str, bytes]], vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._read_files, self._vocab_size, self._eos_token_ids = read_files, vocab_size, eos_token_ids
        self._read: tuple[Vocabulary, Callable[[], Divide]] | None = None  # set until load()
        self._failure = ""  # why the model has no vocabulary
        self._vocabulary: LLTokenizer | None = None
        self._compiling = threading.Lock()  # one grammar at a time
        self._lock = threading.Lock()  # for both maps
        self._cache: OrderedDict[GrammarKey, _Compiled] = OrderedDict()  # most recently used last
        self._held: dict[int, _Compiled] = {}  # by id() of the params of live requests

    def use_files(self, files: Mapping[str, bytes]) -> None:
        """Use the model's tokenizer from these files, which have already been read."""
        self._read_files = lambda: files

    def needs(self, message: Submission) -> bool:
        """Return whether the request's grammar still has to be compiled."""
        params = constraint_of(message)
        return params is not None and self._hold(params) is None

    def prepare(self, message: Submission) -> None:
        """Compile the request's grammar. Errors: InvalidRequestError."""
        params = constraint_of(message)
        if params is not None:
            self._compiled(params)

    def check_usable(self) -> None:
        """Check whether this engine can use grammars, as far as that is known. Errors: UnsupportedParameterError."""
        if not self._eos_token_ids:
            raise UnsupportedParameterError("structured_outputs need a model with an EOS token, which ends the text")
        if self._failure:
            raise UnsupportedParameterError(self._failure)
        check_library()

    def vocabulary(self) -> Vocabulary:
        """Return the model's vocabulary. Errors: UnsupportedParameterError."""
        with self._compiling, _switching_often():
            read = self._read or self._read_files_now()
            if self._vocabulary is None:
                self._read = read  # for load()
            return read[0]

    def load(self) -> None:
        """Build the vocabulary for grammars, unless it exists. Errors: UnsupportedParameterError."""
        with self._compiling:
            self._tokenizer()

    def matcher(self, params: StructuredOutputsParams) -> "LLMatcher":
        """Return a matcher at the start of its text. Errors: InvalidRequestError."""
        return (self._hold(params) or self._compiled(params)).copy()

    def is_shared(self, params: StructuredOutputsParams) -> bool:
        """Return whether the compiled grammar of these params has given more than one matcher."""
        compiled = self._hold(params)
        return compiled is None or compiled.num_copies > 1

    def renew(self, params: StructuredOutputsParams) -> "LLMatcher":
        """Compile an already compiled grammar again, and return a matcher. Later requests get copies of it.

        A step may need it, so it does not wait for a grammar that is being compiled.
        """
        fresh = self._compile(params)
        self._keep(params, fresh)
        with self._lock:
            self._held[id(params)] = fresh
        return fresh.copy()

    @property
    def eos_token_id(self) -> int:
        """Return the token that ends an output."""
        return self._eos_token_ids[0]

    @property
    def num_words(self) -> int:
        """Return the number of 32-bit words in a mask. Bit i of word w is token 32 * w + i."""
        return -(-self.num_tokens // 32)

    @property
    def num_tokens(self) -> int:
        """Return the number of ids in the vocabulary. A model may have more, which no grammar allows."""
        return self._tokenizer().vocab_size

    def _compiled(self, params: StructuredOutputsParams) -> _Compiled:
        with self._compiling:
            found = self._hold(params)
            if found is None:
                found = self._compile(params)
                self._keep(params, found)
                self._hold(params)
        return found

    def _keep(self, params: StructuredOutputsParams, compiled: _Compiled) -> None:
        """Keep a compiled grammar for later requests, as the most recently used one."""
        with self._lock:
            self._cache[key := key_of(params)] = compiled
            self._cache.move_to_end(key)
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)

    def _hold(self, params: StructuredOutputsParams) -> _Compiled | None:
        """Return the compiled grammar of these params and keep it while they live; None if it is not compiled."""
        with self._lock:
            found = self._held.get(id(params))
            if found is None and (found := self._cache.get(key := key_of(params))) is not None:
                self._cache.move_to_end(key)
                self._held[id(params)] = found
                weakref.finalize(params, self._held.pop, id(params), None).atexit = False
            return found

    def _compile(self, params: StructuredOutputsParams) -> _Compiled:
        return _Compiled(compile_grammar(self._tokenizer(), params))

    def _tokenizer(self) -> "LLTokenizer":
        if self._vocabulary is None:
            self.check_usable()
            with _switching_often():
                vocabulary, build = self._read or self._read_files_now()
                self._read = None
                try:
                    divide = build()
                except ModelFileError as error:
                    raise self._unusable(error) from None
                del build  # with what it was made of: llguidance needs as much memory
                self._vocabulary = build_vocabulary(vocabulary, divide)
        return self._vocabulary

    def _read_files_now(self) -> tuple[Vocabulary, Callable[[], Divide]]:
        from core.grammars.token_files import read_vocabulary

        try:
            return read_vocabulary(self._read_files(), self._vocab_size, self._eos_token_ids)
        except ModelFileError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: ModelFileError) -> UnsupportedParameterError:
        """Remember that the model has no vocabulary, and return the error that says why."""
        self._failure = f"structured_outputs need the model's tokenizer: {error}"
        return UnsupportedParameterError(self._failure)


@contextlib.contextmanager
def _switching_often() -> Iterator[None]:
    """Make this thread give up the GIL often.

    With Python's default of 5 ms, several times in each step, it would be noticed.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def model_grammars(config: EngineConfig, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars:
    """Return the grammars of the config's model."""
    return Grammars(lambda: tokenizer_files_of(config), vocab_size, eos_token_ids)


def key_of(params: StructuredOutputsParams) -> GrammarKey:
    """Return the key that identifies a grammar."""
    return tuple(tuple(value) if isinstance(value, list) else value for value in _fields(params))


def _fields(params: StructuredOutputsParams) -> list[object]:
    return [getattr(params, name) for name in params.__struct_fields__]


def constraint_of(message: Submission) -> StructuredOutputsParams | None:
    """Return the constraint of a request, or None."""
    return message.params.structured_outputs if isinstance(message, AddRequest) else None
