"""Executor: the interface through which the engine runs its plans."""

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import msgspec

from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.inputs import ExecutorNews
from ipc.errors import ConfigError
from ipc.options.resolved import ResolvedConfig

if TYPE_CHECKING:
    from core.adapters.store import Adapters
    from core.grammars.grammars import Grammars


#: Version (major, minor) of what executors are written against: this file, core/execution/plan.py and
#: core/execution/runner_table.py. A plug-in has the major that it was written for, and a minor up to this one.
EXECUTOR_API = (1, 0)


class ModelInfo(msgspec.Struct, frozen=True):
    """Facts about an executor's model, known once it is loaded."""

    name: str
    fingerprint: str  # hex: config, weights ("dummy-" before it if made up), dtype, kernels; equal at L2 = equal tokens
    dtype: str  # of the weights and the KV cache; where EngineConfig.dtype is "auto", the resolved one
    vocab_size: int
    max_model_len: int  # longest sequence of the model, tokens
    eos_token_ids: tuple[int, ...]
    numerics: str  # "L0" | "L1" | "L2"
    tasks: dict[str, int] = {}  # see Welcome
    #: Pooling tasks that need the hidden states of the whole prompt, not only of its last token.
    whole_prompt_tasks: tuple[str, ...] = ()
    #: The model's tokens see the whole prompt, so a step computes all of it, and no K or V is kept after the step.
    is_encoder: bool = False
    num_token_kinds: int = 1  # ids of tokens of kind k are k * vocab_size higher than those of kind 0
    #: A token's K and V are read by so many tokens, its own included, and never again. 0: by all that follow.
    kv_window: int = 0
    #: Tokens that see each other, as an image's may, and are computed in one step: so many at most.
    max_whole_tokens: int = 0
    #: Bytes of a row's recurrent state, which is of exactly the tokens that the row has computed. 0: there is none.
    state_bytes: int = 0
    #: kv_window is that of some layers only, which have KV blocks of their own: a page's of so many blocks. 0: of all.
    kv_page_blocks: int = 0


class StepHandle(Protocol):
    """A step in flight."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its output. Called in the order of the steps, once for each."""


class FinishedStep(NamedTuple):
    """Handle of a step that execute() has run to its end."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        """Return the step's output at once."""
        return self.output


class Costs(NamedTuple):
    """Costs of restoring a preempted request, at least 1 each."""

    recompute_ns_per_token: int
    swap_ns_per_block: int  # one way


class StepCosts(NamedTuple):
    """Durations that decide how many drafts a step verifies, in ns."""

    step_ns: tuple[int, ...] = ()  # of steps of 1, 2, 4, 8, ... tokens with logits each
    draft_ns: int = 0  # of the drafts for one row by the executor's own draft model
    alone_ns: tuple[int, ...] = ()  # as step_ns, of steps that no other step overlaps with; empty: no others


#: Tokens of the step before the first: enough to show what a token of a prompt costs.
WARM_UP_TOKENS = 16


class Executor(Protocol):
    """Runner of plans. It learns of requests only from plans, in step order. Its constructor loads the model."""

    info: ModelInfo
    grammars: "Grammars"  # of requests with structured_outputs

    @property
    def adapters(self) -> "Adapters | None":
        """The adapters that requests may have; None: it runs none."""

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """Return the number of KV blocks of block_size tokens, null block included, that fit memory_bytes."""

    def cache_memory_bytes(self) -> int | None:
        """Return the bytes free for the KV cache on the executor's own device; None: it uses the machine's memory.

        Errors: OutOfMemoryError.
        """

    def initialize_cache(self, config: ResolvedConfig) -> None:
        """Allocate the KV cache and the host's blocks. Errors: OutOfMemoryError."""

    def measure_costs(self) -> Costs:
        """Measure the costs of restoring requests: once, before the first step, because it writes into free blocks."""

    def measure_steps(self) -> StepCosts:
        """Measure steps of some sizes, and drafts; at the same time as measure_costs().

        The number of sizes is the executor's choice. Only speculation needs it.
        """

    def warm_up(self) -> int:
        """Run a step of WARM_UP_TOKENS tokens, or as many as fit, before the first; return its duration in ns.

        0: it is not known how long steps take. It writes into free blocks.
        """

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Begin a step and return its handle. The plan is not empty."""

    def prepare_ahead(self) -> bool:
        """Use some idle milliseconds to prepare later steps. Return whether another call could be of use."""

    def close(self) -> None:
        """Release all resources. The executor is not used afterwards."""


class ExecutorEndedError(Exception):
    """The executor's processes are gone and are not started again, which ends the engine. The text says why."""


@runtime_checkable
class MortalExecutor(Protocol):
    """What an Executor has besides, if it runs in processes that may die while the engine lives.

    The output of a step that is lost has NO_TOKEN for each row; the loss is told before result() returns it. From then
    on every step is lost, until go_on().
    """

    def follow(self, tell: Callable[[ExecutorNews], None]) -> None:
        """Call `tell`, from any thread, for each loss, and when plans can be taken again. Called before the first step.

        Without it a loss is an ExecutorEndedError.
        """

    def go_on(self) -> None:
        """Take plans again, the first of which adds all rows anew. Called once for each ExecutorRestored, in order."""


def check_triton() -> None:
    """Raise a ConfigError where device=cuda has no Triton to run its kernels with."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("device=cuda needs triton, which is not installed: pip install 'llm-engine-core[cuda]'")
