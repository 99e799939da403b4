"""Executor: the interface that the engine uses to run its plans."""

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import msgspec

from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.inputs import ExecutorNews
from ipc.errors import ConfigError
from ipc.options.resolved import ResolvedConfig
from ipc.wire.weights_messages import WeightsMark

if TYPE_CHECKING:
    from core.adapters.store import Adapters
    from core.grammars.grammars import Grammars


#: Version (major, minor) of the interface for executors: this file, core/execution/plan.py and
#: core/execution/runner_table.py. A plug-in must have the same major version, and at most this minor version.
EXECUTOR_API = (1, 0)


class ModelInfo(msgspec.Struct, frozen=True):
    """Facts about an executor's model, known once it is loaded."""

    name: str
    # hex digest of config, weights, dtype and kernels, prefixed with "dummy-" if the weights are made up; at L2, equal
    # fingerprints mean equal tokens
    fingerprint: str
    dtype: str  # of the weights and the KV cache; if EngineConfig.dtype is "auto", the resolved one
    vocab_size: int
    max_model_len: int  # longest sequence of the model, in tokens
    eos_token_ids: tuple[int, ...]
    numerics: str  # "L0" | "L1" | "L2"
    tasks: dict[str, int] = {}  # see Welcome
    #: Pooling tasks that need the hidden states of the whole prompt, not only of its last token.
    whole_prompt_tasks: tuple[str, ...] = ()
    #: Every token sees the whole prompt, so one step computes all of it, and no K or V is kept after the step.
    is_encoder: bool = False
    num_token_kinds: int = 1  # ids of tokens of kind k are offset by k * vocab_size
    #: A token's K and V are read by this many tokens, itself included, and never again. 0: by all later ones.
    kv_window: int = 0
    #: The most tokens that see each other, such as those of an image, and are computed in one step.
    max_whole_tokens: int = 0
    #: Tokens of an image whose embeddings the executor makes from pixels, and bytes of a token's. 0: it makes none.
    image_tokens: int = 0
    image_token_bytes: int = 0
    #: Bytes of a row's recurrent state, which covers exactly the tokens that the row has computed. 0: there is none.
    #: Those of all workers that compute the model together.
    state_bytes: int = 0
    #: Memory of the device that computes the model, if it has its own. 0: it computes in the host's memory.
    device_memory_bytes: int = 0
    state_tokens: int = 0  # K and V of this many tokens have as many bytes
    #: If only some layers have kv_window, they have their own KV blocks: this many in a page. 0: all layers have it.
    kv_page_blocks: int = 0
    #: Parts of the fingerprint: hex digest of config and weights ("dummy-" before it if made up), and the name of every
    #: kernel and summation order. "": not known.
    weights: str = ""
    variant: str = ""
    cpu_kernels: str = ""  # the value of this option that selects these kernels


class StepHandle(Protocol):
    """A step in flight."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its output. Called once per step, in step order."""


class FinishedStep(NamedTuple):
    """Handle of a step that has finished within execute()."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        """Return the step's output at once."""
        return self.output


class Costs(NamedTuple):
    """Costs of restoring a preempted request, at least 1 each."""

    recompute_ns_per_token: int
    swap_ns_per_block: int  # one way


class StepCosts(NamedTuple):
    """Durations in ns that decide how many drafts a step verifies."""

    step_ns: tuple[int, ...] = ()  # of steps of 1, 2, 4, 8, ... tokens, all with logits
    draft_ns: int = 0  # time for the executor's own draft model to make the drafts of one row
    alone_ns: tuple[int, ...] = ()  # like step_ns, for steps that do not overlap with others; empty: the same


#: Tokens of the step before the first one: enough to measure the cost of a prompt token.
WARM_UP_TOKENS = 16


class Executor(Protocol):
    """Runs plans. It learns of requests only from plans, in step order. Its constructor loads the model."""

    info: ModelInfo
    grammars: "Grammars"  # grammars of requests with structured_outputs

    @property
    def adapters(self) -> "Adapters | None":
        """The adapters that requests may use; None: adapters are not supported."""

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """Return how many KV blocks of block_size tokens, including the null block, fit in memory_bytes."""

    def cache_memory_bytes(self) -> int | None:
        """Return the bytes that are free for the KV cache on the executor's own device; None: it uses host memory.

        Errors: OutOfMemoryError.
        """

    def initialize_cache(self, config: ResolvedConfig) -> None:
        """Allocate the KV cache and the host's blocks. Errors: OutOfMemoryError."""

    def measure_costs(self) -> Costs:
        """Measure the costs of restoring requests.

        Called once, before the first step, because it writes into free blocks.
        """

    def measure_steps(self) -> StepCosts:
        """Measure steps of some sizes, and drafts. Called together with measure_costs().

        The executor chooses the number of sizes. Only speculation needs this.
        """

    def warm_up(self) -> int:
        """Run a step before the first one. Return the duration in ns of one of WARM_UP_TOKENS tokens, or more.

        0: the duration of steps is unknown. It writes into free blocks.
        """

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Start a step and return its handle. The plan is not empty."""

    def prepare_ahead(self) -> bool:
        """Use a few idle milliseconds to prepare later steps. Return whether another call could be useful."""

    def close(self) -> None:
        """Release all resources. The executor must not be used afterwards."""


@runtime_checkable
class UpdatesWeights(Protocol):
    """Additional methods of an Executor whose model can get other weights while requests live, and sleep."""

    @property
    def why_fixed(self) -> str:
        """Return why this model's weights cannot change; "" if they can."""

    def prepare_weights(self, path: str, version: int) -> WeightsMark:
        """Read other weights next to the steps, and keep them until use_weights(). path: "" = those of the start.

        Called by another thread than the steps', one call at a time. Errors: those of the model's files; ConfigError
        for a model that cannot change its weights.
        """

    @property
    def expects_weights(self) -> bool:
        """Return whether take_memory_ahead() may have something to do."""

    def take_memory_ahead(self) -> bool:
        """Make the system assign a piece of the memory that the next weights need, if others are expected.

        Return whether there is more to take. Called by the thread of prepare_weights(), while it waits for a call.
        """

    def pack_second_form(self) -> bool:
        """Pack one matrix of the weights in use in a further form, with which its products take less time.

        No bit depends on it. Return whether there is more to pack. Called by that thread, as take_memory_ahead().
        Errors: MemoryError; then the others stay in one form.
        """

    def use_weights(self, mark: WeightsMark) -> None:
        """Compute with these weights from the next plan on, which adds all rows from scratch. No step is in flight.

        Errors: ModelFileError if they were not prepared.
        """

    def sleep(self, level: int) -> None:
        """Free the memory of the KV cache, and from level 2 on of the weights. No step is in flight.

        After level 2 the next plan comes after use_weights().
        """

    def wake_up(self) -> None:
        """Note that plans come again after sleep()."""


class ExecutorEndedError(Exception):
    """The executor's processes are gone and will not be restarted, which ends the engine. The text says why."""


@runtime_checkable
class MortalExecutor(Protocol):
    """Additional methods of an Executor whose processes may die while the engine goes on.

    The output of a lost step has NO_TOKEN for each row; the loss is reported before result() returns it. After that
    every step is lost, until go_on().
    """

    def follow(self, tell: Callable[[ExecutorNews], None]) -> None:
        """Call `tell`, from any thread, on each loss, and when plans can be taken again. Called before the first step.

        Without it a loss raises ExecutorEndedError.
        """

    def go_on(self) -> None:
        """Take plans again.

        The first one adds all rows from scratch. Called once for each ExecutorRestored, in order.
        """


def check_triton() -> None:
    """Raise ConfigError if device=cuda has no Triton to run its kernels."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "device=cuda needs triton, which is not installed: pip install triton, or engine-core with its extra [cuda]"
        )
