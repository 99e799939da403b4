"""LocalEngine: an engine in this process that computes requests which others say they have the answers to."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import msgspec

from core.border.feature_shelf import FeatureShelf, NoFeatures, admitted
from core.border.validation import validate_request
from core.engine import EngineCore
from core.execution.executor import ModelInfo
from core.grammars.checker import CheckedGrammars
from core.inputs import EngineInput, EngineReply
from core.process.prepare import features_of, prepare
from core.scheduling.scheduler import Scheduler
from frontend.images.image_prompts import ImagePrompts, image_prompts
from frontend.text.tokenizer import Tokenizer
from ipc.errors import InvalidRequestError, ModelFileError
from ipc.options.config import EngineConfig
from ipc.options.schedulers import BUILT_IN_SCHEDULER
from ipc.wire.feature_messages import FeatureLimits, PutFeature, parts_of
from ipc.wire.messages import AddRequest
from ipc.wire.pooling_messages import AddPooling

#: The client whose requests it computes.
CLIENT = 1
_STEP_NS = 1_000_000
_Message = TypeVar("_Message", AddRequest, AddPooling)


class Difference(NamedTuple):
    """The first token of an answer that differs. None stands for the answer's end."""

    answer: int  # index of the choice
    position: int  # in the answer, from 0
    expected: int | None  # computed here
    got: int | None  # claimed


class Outcome(NamedTuple):
    """What became of a claim. failure: why it cannot be an answer of this engine; "" = no reason was found."""

    difference: Difference | None = None
    failure: str = ""
    has_no_adapter: bool = False  # the failure is that its adapter is not loaded


class LocalEngine:
    """An engine whose steps are calls, until close(). step_tokens: see resolve().

    Errors: those of an engine's start.
    """

    def __init__(self, config: EngineConfig, step_tokens: int = 0) -> None:
        none: dict[str, Any] = {"capture": None, "async_scheduling": False, "request_metrics": False}
        none["scheduler_cls"] = BUILT_IN_SCHEDULER  # no token depends on it
        prepared = prepare(msgspec.structs.replace(config, **none), lambda phase: None, step_tokens=step_tokens)
        self.config, self._executor = prepared.config, prepared.executor
        self.tokenizer_hash, self._files = prepared.tokenizer.tokenizer_hash, prepared.tokenizer.files
        self._engine = EngineCore(self.config, self._executor)
        self._grammars = CheckedGrammars(self._executor.grammars)
        self._features = features_of(self._executor)
        self._now_ns, self.num_steps = 0, 0

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, which is the built-in one."""
        assert isinstance(self._engine.scheduler, Scheduler), "the built-in scheduler was asked for"
        return self._engine.scheduler

    @property
    def info(self) -> ModelInfo:
        """The model's description."""
        return self._executor.info

    @property
    def has_work(self) -> bool:
        """Whether requests are unfinished."""
        return self._engine.has_work

    @property
    def feature_limits(self) -> FeatureLimits | None:
        """The features that the model reads; None = none."""
        return None if self._features is None else self._features.limits

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None = it has none that this version reads. Then no answer was cut by its text."""
        try:
            return Tokenizer.from_files(self._files)
        except ModelFileError:
            return None

    @cached_property
    def images(self) -> ImagePrompts | None:
        """The processor of the model's images; None = it takes none. Errors: ModelFileError, UnsupportedModelError."""
        if self.tokenizer is None:
            return None
        return image_prompts(self._files, self.feature_limits, self.tokenizer.hf.token_to_id)

    def close(self) -> None:
        """Release the engine."""
        self._grammars.close()
        self._executor.close()

    def step(self, inbox: Sequence[tuple[int, EngineInput]]) -> list[EngineReply]:
        """Run a step; return its messages."""
        self._now_ns += _STEP_NS
        self.num_steps += 1
        return [reply for _, reply in self._engine.step(inbox, self._now_ns)]

    def admit(self, message: _Message, features: Sequence[PutFeature] = ()) -> _Message | Outcome:
        """Check and prepare a request as an engine's border does; return it in the engine's form, or why it is refused.

        Its adapter and its features are kept as long as the returned message lives.
        """
        info, adapters = self.info, self._executor.adapters
        sizes = {"vocab_size": info.vocab_size, "max_model_len": self.config.max_model_len}
        shelf: FeatureShelf = NoFeatures() if self._features is None else self._features
        try:
            validate_request(message, **sizes, max_logprobs=0, tasks=info.tasks)
            for feature in features:
                for part in parts_of(feature):
                    shelf.put(CLIENT, part)
            ready = admitted(shelf, CLIENT, message)
            shelf.forget(CLIENT)
            for preparer in (self._grammars, self._features):
                if preparer is not None and preparer.needs(ready):
                    while preparer.prepare(ready):
                        pass
        except InvalidRequestError as error:
            return Outcome(failure=str(error))
        assert isinstance(ready, type(message)), type(ready)
        if ready.adapter is None:
            return ready
        try:
            if adapters is not None:
                adapters.hold(ready.adapter)
                return ready
        except InvalidRequestError:
            pass
        text = f"its adapter, {ready.adapter.digest}, is not loaded: name its files in lora_modules"
        return Outcome(failure=text, has_no_adapter=True)
