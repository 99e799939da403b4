"""The local executor: runs one model on this machine's CPU, in the engine process, one step at a time."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core.adapters.store import Adapters
from core.execution.executor import WARM_UP_TOKENS, Costs, FinishedStep, StepCosts, StepHandle
from core.execution.plan import SchedulerOutput
from core.execution.shared_blocks import BlockMemory, SharedBlocks
from core.execution.state_slots import num_draft_states, num_states
from core.executors.features import features_for
from core.executors.load import Head, Loaded, load, load_drafting_model, load_new_weights
from core.executors.run import RunnerSizes, caches_that_fit, num_blocks_in, runner_sizes
from core.features.store import Features
from core.grammars.grammars import model_grammars
from core.model_files.loading import EncoderFacts, why_not_updated
from core.model_files.model_config import read_model_config
from core.model_files.tensors.adapted_layers import gguf_layers, peft_layers
from core.models.assistant import Assistant
from core.models.draft_head import DraftHead
from core.models.interface import Model
from core.models.layers.adapted import AdaptedMatrices, AdaptedPart, takes_adapters
from core.models.layers.adapted_tables import table_shapes
from core.models.llama import Llama
from core.models.operations.cpu_operations import CpuOperations
from core.models.operations.operations import AdaptingOperations
from core.models.operations.second_forms import SecondForms
from core.models.operations.weight_form import fits
from core.models.parts.rank import Rank
from core.models.parts.shard import Shard
from core.models.parts.stage import Stage
from core.runner.assistant_drafter import AssistantDrafter
from core.runner.draft_blocks import num_spare_blocks
from core.runner.drafter import Drafter
from core.runner.feature_rows import EncoderShape, KeptFeatures
from core.runner.head_drafter import HeadDrafter, with_head
from core.runner.model_drafter import ModelDrafter
from core.runner.model_runner import ModelRunner
from core.runner.state_rows import RowStates
from ipc.errors import ConfigError, ModelFileError
from ipc.files.model_files import resolve_model
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from ipc.options.step_sizes import with_rows
from ipc.tables.rounding import ceil_div
from ipc.wire.weights_messages import WeightsMark
from kernels.elements import BFLOAT16, FLOAT32, Dtype
from kernels.memory.blocks_ahead import BlocksAhead


class NewModel(NamedTuple):
    """A model with other weights, ready to be used, and its draft head if the model has one."""

    mark: WeightsMark
    loaded: Loaded
    head: Head | None


#: Weights of products of the largest model whose warm-up has more than one token.
_MOST_WARM_WEIGHTS = 1 << 30
#: Of the layers of a larger one, that step computes one in so many, and at least so many. They may be of several kinds,
#: which take turns.
_WARM_SHARE, _LEAST_WARM_LAYERS = 4, 8


class LocalExecutor:
    """An Executor on the CPU."""

    def __init__(
        self,
        config: EngineConfig,
        rank: Rank | None = None,
        make_runner: Callable[..., ModelRunner] = ModelRunner,
        stage: Stage | None = None,
    ) -> None:
        """Load the config's model.

        rank: of this process in a group whose processes compute the model together; None = there is no group.
        make_runner: the runner's class, or a function with the same arguments. stage: see load(). Errors:
        ModelFileError, UnsupportedModelError, ConfigError.
        """
        self._make_runner = make_runner
        self._loaded = load(config, usual_dtype, rank, stage)
        self._model, self.info = self._loaded.model, self._loaded.info
        library = self._model.library if rank is None and isinstance(self._model, Llama) else None
        #: The caller is one of the kernels' threads, and its CPU time does not count time spent waiting for a core.
        #: Ranks sleep while they wait for one another, and torch's threads cannot be counted, so these use wall time.
        self._step_clock = time.perf_counter_ns if library is None else time.thread_time_ns
        self._drafting, self._max_num_seqs = self._load_drafting(config), with_rows(config).max_num_seqs
        #: The start's, whose model is dropped when the weights change; and those that are ready to be used.
        self._first, self._new_weights = self._loaded.source, dict[int, NewModel]()
        self._second_forms = SecondForms()  # of the weights in use
        #: Why this model's weights cannot change; "" if they can.
        self.why_fixed = why_not_updated(self._loaded.source, config)
        #: Others are expected while these are in memory: because the option says so, or because that was so before.
        self.expects_weights = False
        self._reserves = config.reserve_weights and not self.why_fixed
        self.wake_up()
        settings = config.speculative_config
        self._num_drafts = 0 if settings is None or self._drafting is None else settings.num_speculative_tokens
        self.adapters = model_adapters(config, self._loaded, None if rank is None else rank.shard, stage)
        self.features = model_features(config, self._loaded, self._drafting)
        self._kept_features: KeptFeatures | None = self.features
        self.grammars = model_grammars(config, self.info.vocab_size, self.info.eos_token_ids)

    def take_features(self, features: KeptFeatures) -> EncoderShape | None:
        """Read features that another process makes, before initialize_cache(); the encoder's weights are freed.

        Return what is still known of the encoder; None: the model has none.
        """
        self.features, self._kept_features = None, features
        self._first = self._loaded.source.without_encoder()
        self._loaded = self._loaded._replace(source=self._first)
        return self._first.vision

    def _load_drafting(self, config: EngineConfig) -> Model | Head | None:
        """Return what makes drafts in this process; None: nothing does."""
        return load_drafting_model(config, self._loaded)

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """Return the number of blocks in memory_bytes, or of pages if the cache has pages.

        On a CPU the whole budget is for the cache, because a step's working memory is bounded and comparatively small.
        A draft model or head has as many blocks, and some extra ones.
        """
        each = self._model.bytes_per_block(block_size) * max(1, self.info.kv_page_blocks)
        of_draft = 0 if self._drafting is None else self._drafting.bytes_per_block(block_size)
        num_spare = num_spare_blocks(self._max_num_seqs, self._num_drafts, block_size)
        return num_blocks_in(memory_bytes, each, of_draft, num_spare)

    def cache_memory_bytes(self) -> int | None:
        """Return None: there is no device with its own memory."""
        return None

    def initialize_cache(self, config: ResolvedConfig) -> None:
        """Allocate the KV cache of the resolved config. Errors: OutOfMemoryError."""
        self._config, self.info = config, self._loaded.settle_length(config.max_model_len)
        sizes, pooler = runner_sizes(config, self.info, self.grammars), self._loaded.source.pooler
        with caches_that_fit():
            drafter = self._make_drafter(config.max_model_len, sizes)
            others: dict[str, Any] = {"adapters": self.adapters, "features": self._kept_features}
            others["states"] = self._make_states(config)
            others["num_page_blocks"] = config.kv_page_blocks
            self.runner = self._make_runner(self._model, **sizes, drafter=drafter, pooler=pooler, **others)
        if isinstance(drafter, AssistantDrafter):
            drafter.cache = self.runner.cache
        self._run = self.runner.execute
        self._ahead = BlocksAhead(self.runner.cache)

    def _make_states(self, config: ResolvedConfig) -> RowStates | None:
        """Return the recurrent states of the rows, and additional ones. Errors: MemoryError."""
        num_spare, count = (of(config, self.info.state_bytes) for of in (num_draft_states, num_states))
        states = self._model.allocate_states(count) if isinstance(self._model, Llama) else None
        return None if states is None else RowStates(states, num_spare)

    @property
    def shared_blocks(self) -> SharedBlocks | None:
        """Return the KV cache, the host pool and kept states; None: there is no host pool."""
        cache, host, states = self.runner.cache, self.runner.swap_cache, self.runner.states
        if host is None:
            return None
        own, on_host, layout = [*cache.memory], [*host.memory], host.layout
        if isinstance(head := self.runner.drafter, HeadDrafter):  # then blocks have its K and V, too
            assert head.swap_cache is not None, "there is a host pool"
            own, on_host = [*own, *head.cache.memory], [*on_host, *head.swap_cache.memory]
            layout = with_head(layout, head.cache)
        of_states = None if states is None else BlockMemory([states.states])
        return SharedBlocks(BlockMemory(own), BlockMemory(on_host), layout, of_states)

    def _make_drafter(self, max_model_len: int, sizes: RunnerSizes) -> Drafter | None:
        """Return the drafter for this executor's draft model or head. Errors: MemoryError."""
        if (drafting := self._drafting) is None:
            return None
        if isinstance(drafting, Assistant):
            return AssistantDrafter(drafting, num_drafts=self._num_drafts)
        num_rows, num_blocks, block_size = sizes["num_rows"], sizes["num_blocks"], sizes["block_size"]
        own = {"num_rows": num_rows, "num_blocks": num_blocks, "block_size": block_size, "num_drafts": self._num_drafts}
        if isinstance(drafting, DraftHead):
            is_late = not self._config.kv_stores  # which read blocks between steps
            return HeadDrafter(drafting, **own, num_swap_blocks=sizes["num_swap_blocks"], is_late=is_late)
        drafting.settle_length(min(max_model_len, drafting.max_model_len))
        return ModelDrafter(drafting, **own)

    def measure_costs(self) -> Costs:
        """Return the measured costs of restoring a preempted request."""
        return self.runner.measure_costs()

    def measure_steps(self) -> StepCosts:
        """Return the measured durations of steps and drafts."""
        return StepCosts(self.runner.measure_steps(self._step_clock), self.runner.measure_drafts(self._step_clock))

    def warm_up(self) -> int:
        """Run a short step and return the duration of one of WARM_UP_TOKENS tokens in ns, or more.

        The first request may be waiting for it. So a large model computes one token, since a step of several takes no
        longer than all of them alone, and that token in some of its layers. The last of these counts as none, since it
        computes little for a token without logits.
        """
        model = self._model
        if not isinstance(model, Llama) or model.config.num_matrix_weights <= _MOST_WARM_WEIGHTS:
            return self.runner.warm_up(WARM_UP_TOKENS)
        if (decoder := model.decoder) is None:
            return WARM_UP_TOKENS * self.runner.warm_up(1)
        num_layers = len(model.layers)
        count = min(num_layers, max(_LEAST_WARM_LAYERS, ceil_div(num_layers, _WARM_SHARE)))
        with decoder.first_layers(count):
            return WARM_UP_TOKENS * ceil_div(num_layers * self.runner.warm_up(1), max(1, count - 1))

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Run one step. The returned step is finished."""
        self._second_forms.take_up()
        self._ahead.use(
            np.concatenate([plan.block_ids, *(new.ids for new in plan.others), *(new.block_ids for new in plan.starts)])
        )
        return FinishedStep(self._run(plan))

    def prepare_weights(self, path: str, version: int) -> WeightsMark:
        """Read other weights, next to the steps; see UpdatesWeights."""
        self._new_weights.clear()  # of an update that was never used
        library = self._model.library if isinstance(self._model, Llama) else None
        with contextlib.nullcontext() if library is None else library.beside_steps():
            loaded = load_new_weights(Path(path) if path else None, self._loaded, self._config, self._first)
            head = load_drafting_model(self._config, loaded) if isinstance(self._drafting, Head) else None
        info = loaded.info
        mark = WeightsMark(version, info.fingerprint, info.weights, info.variant)
        self._new_weights[version] = NewModel(mark, loaded, head if isinstance(head, Head) else None)
        return mark

    def pack_second_form(self) -> bool:
        """Pack the second form of one more matrix of the weights in use; see UpdatesWeights."""
        if self._sleeps:
            return False
        library = self._model.library if isinstance(self._model, Llama) else None
        with contextlib.nullcontext() if library is None else library.alone():
            return self._second_forms.pack_next()

    def take_memory_ahead(self) -> bool:
        """Take memory for the next weights after an update, when those before it are gone; see UpdatesWeights."""
        model = self._model
        if not self.expects_weights or self._sleeps or self._new_weights or not isinstance(model, Llama):
            return False
        own = model.operations
        return isinstance(own, CpuOperations) and own.library.memory.take_ahead(own.num_packed_bytes)

    def sleep(self, level: int) -> None:
        """Free the memory of the KV cache, and from level 2 on of the weights; see UpdatesWeights."""
        for cache in filter(None, (self.runner.cache, self.runner.swap_cache)):
            cache.release()
        self._ahead = BlocksAhead(self.runner.cache)
        self.expects_weights, self._sleeps = False, True
        if self.features is not None:
            self.features.drop_all()
        if isinstance(self._model, Llama) and self._model.library is not None:
            self._model.library.memory.keep(False)
        if level > 1 and isinstance(self._model, Llama):
            self._model.drop_weights()
            self._second_forms.drop()

    def wake_up(self) -> None:
        """Expect other weights if the option says so; see UpdatesWeights."""
        model, self._sleeps = self._model, False
        if self._reserves and isinstance(model, Llama) and isinstance(model.operations, CpuOperations):
            model.operations.library.memory.keep(True)
            self.expects_weights = True

    def use_weights(self, mark: WeightsMark) -> None:
        """Compute with these weights from the next plan on; see UpdatesWeights."""
        new = self._new_weights.pop(mark.version, None)
        if new is None or new.mark != mark:
            raise ModelFileError(
                f"the weights of version {mark.version}, digest {mark.weights:.16}, are not there: give their file"
            )
        assert isinstance(self._model, Llama), type(self._model)
        self.expects_weights = bool(self._model.layers)
        self._model.drop_weights()  # others may still have the object
        self._loaded, self._model, self.info = new.loaded, new.loaded.model, new.loaded.info
        self._second_forms.drop()
        own = self._model.operations if isinstance(self._model, Llama) else None
        self._second_forms = (own.second_forms if isinstance(own, CpuOperations) else None) or SecondForms()
        self.runner.model = self._model
        if new.head is not None:
            drafter: Any = self.runner.drafter
            self._drafting = drafter.head = new.head

    def prepare_ahead(self) -> bool:
        """Allocate memory for blocks of later steps. Return False if no more is needed for now, or while it sleeps."""
        return not self._sleeps and self._ahead.take()

    def close(self) -> None:
        """Do nothing: the memory is freed when the process ends."""


def create(config: EngineConfig) -> LocalExecutor:
    """Create the executor for this config."""
    return LocalExecutor(config)


def usual_dtype(path: Path, mmproj: str | None = None) -> Dtype:
    """Return the dtype that suits this machine for a model folder or .gguf file. mmproj: path of its projector.

    It is bfloat16 if that is fast, or if the model is one of ours and takes too much memory in float32.
    """
    if _is_fast_in_bfloat16():
        return BFLOAT16
    try:
        model = read_model_config(path, mmproj)
    except ModelFileError:  # one of transformers' models; or loading will say what is wrong
        return FLOAT32
    return FLOAT32 if fits(model, FLOAT32) else BFLOAT16


def _is_fast_in_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16, or reads it faster than float32 (with AVX2).

    With one request, products are limited by memory, so half the bytes take half the time. With many rows both take
    about as long (docs/performance/engines.md).
    """
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return bool(set(flags.split()) & {"avx2", "avx512_bf16", "amx_bf16", "bf16"})  # bf16 is aarch64's name


# model_adapters: the adapters for a loaded model; a part of the executors that run a model.


def model_adapters(
    config: EngineConfig, loaded: Loaded, shard: Shard | None = None, stage: Stage | None = None
) -> Adapters | None:
    """Return the model's adapters, with the config's lora_modules loaded; None without enable_lora.

    shard, stage: the part of the model that is loaded.

    Errors: ConfigError for a model without adapter support; ModelFileError, UnsupportedModelError for the modules'
    files.
    """
    matrices = adapted_matrices(config, loaded, shard, stage)
    return None if matrices is None else Adapters(config, matrices)


def adapted_matrices(
    config: EngineConfig, loaded: Loaded, shard: Shard | None = None, stage: Stage | None = None
) -> AdaptedMatrices | None:
    """Return the model's matrices that adapters may change. Parameters, result and errors: see model_adapters()."""
    if not config.enable_lora:
        return None
    model = loaded.model
    if not isinstance(model, Llama):
        what = "is run by transformers' code, which has no adapter support"
        raise ConfigError(f"enable_lora: {loaded.info.name} {what}: leave it out")
    if not isinstance(model.operations, AdaptingOperations) or not takes_adapters(model.layers):
        raise ConfigError(f"enable_lora: layers of {loaded.info.name} do not support adapters: leave it out")
    sizes, part = model.config, None
    if shard is not None or stage is not None:
        sizes = read_model_config(resolve_model(config.model), config.mmproj)
        layers = range(sizes.num_hidden_layers) if stage is None else range(*stage.layers(sizes))
        part = AdaptedPart(layers, () if shard is None else shard.adapted_rows(sizes))
    known = peft_layers(sizes)
    if model.library is None:  # only steps of the C kernels are given embeddings that adapters have changed
        tables = table_shapes(sizes)
        known = {name: layer for name, layer in known.items() if all(one.name not in tables for one in layer.parts)}
    return AdaptedMatrices(sizes, model.operations, known, gguf_layers(sizes), part=part)


# model_features: the features for a loaded model; a part of the executors that run a model.


def model_features(config: EngineConfig, loaded: Loaded, drafting: Model | Head | None) -> Features | None:
    """Return the model's features; None for a model that reads none.

    drafting: what makes drafts. An assistant reads sampled tokens only.
    """
    model, encoder = loaded.model, loaded.source.vision
    if not isinstance(model, Llama) or not model.reads_features:
        return None
    assert not isinstance(encoder, EncoderFacts), "an encoder without its weights"
    drafts = drafting is not None and not isinstance(drafting, Assistant)
    return features_for(config, model.config, encoder, drafts=drafts, pools=loaded.source.pooler is not None)
