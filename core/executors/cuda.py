"""The CUDA executor: runs one model, or a rank's part of it, on one GPU. Results are read after the launch."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import torch

from core.adapters.store import Adapters
from core.device import cuda_device, num_threads
from core.execution.executor import Costs, StepCosts, StepHandle
from core.execution.plan import SchedulerOutput
from core.execution.shared_blocks import SharedBlocks
from core.execution.state_slots import num_draft_states, num_states, num_swap_states
from core.execution.token_budget import token_budget
from core.executors.load import load, load_drafting_model
from core.executors.local import adapted_matrices, model_features
from core.executors.run import RunnerSizes, caches_that_fit, num_blocks_in, runner_sizes
from core.grammars.grammars import model_grammars
from core.models.draft_head import DraftHead
from core.models.llama import Llama
from core.models.operations.triton_operations import TritonOperations
from core.models.parts.rank import Rank
from core.models.step import GivenRows, ModelInputs
from core.runner.cuda_model_runner import CudaModelRunner, tapped_states
from core.runner.decode_graphs import padded_rows
from core.runner.device_blocks import shared_device_blocks
from core.runner.device_features import AXES
from core.runner.draft_blocks import num_spare_blocks
from core.runner.drafter import Drafter
from core.runner.feature_rows import EncoderShape, KeptFeatures
from core.runner.head_drafter import HeadDrafter, with_head
from core.runner.hosted_model import HostedModel
from core.runner.mixed_graphs import most_work
from core.runner.model_drafter import ModelDrafter
from core.runner.state_rows import RowStates
from core.runner.step_durations import Clock
from core.runner.trial_loop import loop_costs
from core.scheduling.draft_rule import MAX_STEP_DRAFTS
from ipc.errors import OutOfMemoryError
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from ipc.options.step_sizes import SizedConfig, with_rows
from ipc.options.workers import overlaps
from kernels.elements import BFLOAT16, FLOAT32
from kernels.rounding import ceil_div
from kernels.triton.attention_work import SPLIT, TritonWork, triton_work, whole_prompts
from kernels.triton.lora import adapter_bytes, compile_adapters
from kernels.triton.recurrence import DeviceStates, no_states
from kernels.triton.sampling import Kinds, pack_columns, sample_tokens


class CudaExecutor:
    """An Executor on a GPU."""

    def __init__(self, config: EngineConfig, rank: Rank | None = None, clock: Clock = time.perf_counter_ns) -> None:
        """Load the config's model.

        rank: of this process in a group whose processes compute the model together; None = there is no group. clock: of
        measurements; the ranks of a group have one in common, so that they run the same trial steps.

        Errors: ModelFileError, UnsupportedModelError, OutOfMemoryError; ConfigError if there is no device or the model
        is not an in-tree one.
        """
        device = cuda_device()
        torch.set_num_threads(num_threads(config))
        # float32 without a GPU, because bfloat16 is slow in Triton's interpreter.
        loaded = load(config, lambda *_: BFLOAT16 if device.type == "cuda" else FLOAT32, rank)
        self._clock = clock
        model = loaded.model
        assert isinstance(model, Llama), type(model)
        assert isinstance(model.operations, TritonOperations), type(model.operations)
        self._model, self._operations = model, model.operations
        self.memory = CudaMemory(model, model.operations, config, loaded.source.vision)
        self.info = msgspec.structs.replace(loaded.info, device_memory_bytes=self.memory.device_bytes)
        self._loaded = loaded._replace(info=self.info)
        self.grammars = model_grammars(config, self.info.vocab_size, self.info.eos_token_ids)
        self._overlaps = overlaps(config)
        self._drafting = self._load_draft_model(config, rank)
        settings = config.speculative_config
        self._num_drafts = 0 if settings is None or self._drafting is None else settings.num_speculative_tokens
        self._adapted = adapted_matrices(config, self._loaded, None if rank is None else rank.shard)
        self.adapters = None if self._adapted is None else Adapters(config, self._adapted)
        if self._adapted is not None and rank is not None:  # they come later, and an error would end the worker
            each = adapter_bytes(self._adapted.product_shapes, config.max_lora_rank, model.dtype)
            self.memory.kept_bytes = config.max_loras * each
        self.features = model_features(config, self._loaded, self._drafting)
        self._kept_features: KeptFeatures | None = self.features

    def take_features(self, features: KeptFeatures) -> EncoderShape | None:
        """Read features that another process makes; see LocalExecutor."""
        self.features, self._kept_features = None, features
        source = self._loaded.source.without_encoder()
        self._loaded = self._loaded._replace(source=source)
        return source.vision

    def _load_draft_model(self, config: EngineConfig, rank: Rank | None) -> HostedModel | DraftHead | None:
        """Return what makes drafts: each rank has all of it, and makes the same."""
        model = load_drafting_model(config, self._loaded, is_part=rank is not None)
        if model is None or isinstance(model, DraftHead):
            return model
        assert isinstance(model, Llama), type(model)
        assert isinstance(model.operations, TritonOperations), type(model.operations)
        self._draft_memory = CudaMemory(model, model.operations, config)
        return HostedModel(model, model.operations)

    def determine_num_available_blocks(self, memory_bytes: int, block_size: int) -> int:
        """Return the number of blocks in memory_bytes. A draft model has as many blocks, and some extra ones."""
        each = self._model.bytes_per_block(block_size)
        of_draft = 0 if self._drafting is None else self._drafting.bytes_per_block(block_size)
        num_spare = num_spare_blocks(self.memory.num_rows, self._num_drafts, block_size)
        return num_blocks_in(memory_bytes, each, of_draft, num_spare)

    def cache_memory_bytes(self) -> int | None:
        """Return the bytes of GPU memory left for the KV cache; see CudaMemory. Errors: OutOfMemoryError."""
        return self.memory.cache_bytes()

    def initialize_cache(self, config: ResolvedConfig) -> None:
        """Allocate the KV cache of the resolved config. Errors: OutOfMemoryError."""
        self.info = self._loaded.settle_length(config.max_model_len)
        sizes = runner_sizes(config, self.info, self.grammars)
        with caches_that_fit():
            self.runner = CudaModelRunner(
                self._model,
                self._operations,
                max_model_len=config.max_model_len,
                use_graphs=not config.enforce_eager and self._model.config.is_causal,
                most_alone=most_alone(config),
                shares_blocks=not config.disable_cascade_attn,
                adapters=self.adapters,
                features=self._kept_features,
                pooler=self._loaded.source.pooler,
                drafter=self._make_drafter(config, sizes),
                states=self._make_states(config),
                **sizes,
            )
        if self._adapted is not None:
            compile_adapters(self._adapted.product_shapes, self._model.dtype, self._operations.device)
        if self._operations.device.type != "cuda":
            return
        with self.memory.fits():
            self.memory.compile_steps()
            if isinstance(self._drafting, HostedModel):
                self._draft_memory.compile_steps()
            drafts = config.speculative_config is not None
            self.runner.capture_graphs(drafts=drafts, num_tokens=config.max_num_batched_tokens)

    @property
    def shared_blocks(self) -> SharedBlocks | None:
        """Return the KV cache, the host pool and kept states; None: there is no host pool."""
        if (pool := self.runner.swap_cache) is None:
            return None
        caches, pools, layout = [self.runner.cache], [pool], pool.layout
        if isinstance(head := self.runner.drafter, HeadDrafter):  # then blocks have its K and V, too
            assert head.swap_cache is not None, "there is a host pool"
            caches, pools = [*caches, head.cache], [*pools, head.swap_cache]
            layout = with_head(layout, head.cache)
        states = None if self.runner.states is None else self.runner.states.states
        return shared_device_blocks(caches, pools, layout, states)

    def measure_costs(self) -> Costs:
        """Return the measured costs of restoring a preempted request."""
        return self.runner.measure_costs(self._clock)

    def measure_steps(self) -> StepCosts:
        """Return the measured durations of steps, and the additional cost of drafts.

        If steps overlap, a step takes as long as the longer of the host's and the device's work. A step whose rows all
        have drafts takes the sum of both, because nothing overlaps with it.
        """
        durations, draft_ns = self.runner.measure_steps(self._clock), self.runner.measure_drafts(self._clock)
        loop = self.runner.measure_loop() if self._overlaps else None
        if loop is None:
            return StepCosts(durations, draft_ns)
        return loop_costs(loop, durations, self.runner.measure_overlapping(durations))

    def _make_drafter(self, config: ResolvedConfig, sizes: RunnerSizes) -> Drafter | None:
        """Return the drafter for the draft model or head. Errors: MemoryError."""
        if (drafting := self._drafting) is None:
            return None
        num_rows, num_blocks, block_size = sizes["num_rows"], sizes["num_blocks"], sizes["block_size"]
        if isinstance(drafting, DraftHead):
            return HeadDrafter(
                drafting,
                num_rows=num_rows,
                num_blocks=num_blocks,
                block_size=block_size,
                num_drafts=self._num_drafts,
                num_swap_blocks=sizes["num_swap_blocks"],
                is_late=not config.kv_stores,  # which read blocks between steps
            )
        drafting.settle_length(min(config.max_model_len, drafting.max_model_len))
        return ModelDrafter(
            drafting, num_rows=num_rows, num_blocks=num_blocks, block_size=block_size, num_drafts=self._num_drafts
        )

    def _make_states(self, config: ResolvedConfig) -> RowStates | None:
        """Return the recurrent states of the rows, those that are kept, and those before drafts; None: there are none.

        Those of swapped requests are in the host's memory. Errors: MemoryError.
        """
        if not self.info.state_bytes:
            return None
        size, device = self._model.config.state_size, self._operations.device
        num_swapped = num_swap_states(config, self.info.state_bytes)
        count = num_states(config, self.info.state_bytes) - num_swapped
        try:
            states = torch.empty(count, size, device=device)
            swapped = torch.empty(num_swapped, size, pin_memory=device.type == "cuda" and num_swapped > 0)
        except RuntimeError as error:
            raise MemoryError(f"{count + num_swapped} recurrent states of {4 * size} bytes: {error}") from error
        return RowStates(states, num_draft_states(config, self.info.state_bytes), swapped=swapped)

    def warm_up(self) -> int:
        """Return 0: the first launch of a kernel may compile it, so the time of one short step predicts nothing."""
        return 0

    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Launch one step and return its handle."""
        return self.runner.begin(plan)

    def prepare_ahead(self) -> bool:
        """Return False: all of the device's memory is allocated at the start."""
        return False

    def close(self) -> None:
        """Do nothing: the memory is freed when the process ends."""


def create(config: EngineConfig) -> CudaExecutor:
    """Create the executor for this config."""
    return CudaExecutor(config)


# CudaMemory: measures the GPU memory available for the KV cache; a part of the CUDA executor.


def most_alone(config: SizedConfig) -> int:
    """Return the most tokens of a step that attention computes one by one: one per row, and its drafts.

    Memory for the partial results of their contexts is kept free. Drafts from grammars alone need none: without
    speculation, a step with more tokens than rows computes those of a row together.
    """
    if (settings := config.speculative_config) is None:
        return config.max_num_seqs
    return config.max_num_seqs + min(MAX_STEP_DRAFTS, config.max_num_seqs * settings.num_speculative_tokens)


class CudaMemory:
    """Measures free GPU memory after the model is loaded and before the KV cache is allocated."""

    def __init__(
        self,
        model: Llama,
        operations: TritonOperations,
        config: EngineConfig,
        encoder: EncoderShape | None = None,
    ) -> None:
        """operations: the model's. config: sizes that it does not give are chosen. encoder: of images; None = none."""
        self._encoder_width, self._is_causal = None if encoder is None else encoder.width, model.config.is_causal
        self._most_whole = 0 if encoder is None or not encoder.sees_whole else encoder.num_rows
        if not self._is_causal:  # as in resolve()
            config = msgspec.structs.replace(config, enable_chunked_prefill=False)
        self._model, self._operations, self._device = model, operations, operations.device
        on_gpu = self._device.type == "cuda"
        #: The GPU's memory; 0 in Triton's interpreter, which computes in the host's.
        self.device_bytes = torch.cuda.mem_get_info(self._device)[1] if on_gpu else 0
        self._config = with_rows(config, self.device_bytes)
        self.num_rows = self._config.max_num_seqs
        self.kept_bytes = 0  # for what comes later

    def cache_bytes(self) -> int | None:
        """Return the bytes that gpu_memory_utilization leaves after the weights and the largest step.

        The largest step is run to measure its memory. The result is None in Triton's interpreter, which uses host
        memory. Errors: OutOfMemoryError.
        """
        if self._device.type != "cuda":
            return None
        total = self.device_bytes
        with self.fits():
            peak = self._peak_bytes(self.largest_step)
            # The memory of graphs, which they share, comes on top of a step's without one, because they keep it.
            if self._is_causal:  # else there are no graphs
                graphs = max(self._peak_bytes(self.largest_decode), self._peak_bytes(self.largest_graph))
                peak += graphs - torch.cuda.memory_allocated(self._device)
        torch.cuda.empty_cache()
        peak += self._tables_bytes() + self.kept_bytes
        used_by_others = total - torch.cuda.mem_get_info(self._device)[0] - torch.cuda.memory_reserved(self._device)
        left = int(total * self._config.gpu_memory_utilization) - peak - used_by_others
        if left <= 0:
            raise OutOfMemoryError(
                f"of {total} bytes of GPU memory, the model and its largest step use {peak} and other programs "
                f"{used_by_others}: nothing is left for the KV cache below "
                f"gpu_memory_utilization={self._config.gpu_memory_utilization}; raise it, or lower "
                "max_num_batched_tokens"
            )
        return left

    @contextmanager
    def fits(self) -> Iterator[None]:
        """Turn torch's error of a step that does not fit into one that names the options. Errors: OutOfMemoryError."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"a step of max_num_batched_tokens={self._token_budget()} tokens or of max_num_seqs="
                f"{self._config.max_num_seqs} requests of maximum length does not fit the GPU next to the weights; "
                f"lower them or max_model_len: {error}"
            ) from error

    def _peak_bytes(self, step: Callable[[], None]) -> int:
        """Run the step and return the peak memory of all tensors during it, including weights, in bytes."""
        torch.cuda.reset_peak_memory_stats(self._device)
        step()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def _max_model_len(self) -> int:
        most = self._model.max_model_len
        return min(self._config.max_model_len or most, most)

    def _token_budget(self) -> int:
        """Return the tokens of the largest step."""
        return token_budget(self._config, self._max_model_len(), self._most_whole, device_bytes=self.device_bytes)

    def _tables_bytes(self) -> int:
        """Return the bytes of the tables in core/runner/cuda_model_runner.py, which are allocated later."""
        num_tokens = self._max_model_len() + 1
        return 4 * self._config.max_num_seqs * (num_tokens + ceil_div(num_tokens, self._config.block_size))

    def largest_step(self) -> None:
        """Run a step with all tokens of the budget, for as many requests as may run."""
        num_tokens = self._token_budget()
        self.run_step(num_tokens, min(most_alone(self._config), num_tokens))  # a draft has logits, like a request

    def compile_steps(self) -> None:
        """Run steps of 1, 2, 4, ... tokens and the largest one, which compiles the kernels of prompts and of samples.

        How many tokens a step has, and how many logits, chooses the shapes of tiles, and each is a kernel of its own.
        """
        most, num_tokens = self._token_budget(), 1
        while num_tokens < most:
            self.run_step(num_tokens, min(most_alone(self._config), max(1, num_tokens // 2)))
            num_tokens *= 2
        self.largest_step()
        if self._most_whole:
            self.run_step(2, 1, sees_later=True)

    @torch.inference_mode()
    def run_step(self, num_tokens: int, num_requests: int, *, sees_later: bool = False) -> None:
        """Run a step of the prompts of some requests, with logits and samples. Its cache has only the null block.

        sees_later: tokens see later ones, as those of images. An encoder's do in any case.
        """
        model = self._model
        counts = np.full(num_requests, num_tokens // num_requests)
        counts[: num_tokens % num_requests] += 1
        block_size = self._config.block_size
        cache = model.allocate_cache(1, block_size)
        blocks = np.zeros((num_requests, ceil_div(int(counts.max()), block_size)), np.int32)
        wholes = whole_prompts(counts) if sees_later or not self._is_causal else None
        work = triton_work(counts, counts, blocks, self._operations.group_size, self._device, wholes=wholes)
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        kinds = self._operations.of_kinds(work)
        inputs = ModelInputs(zeros, work.positions, zeros - 1, kinds, cache, zeros[:num_requests])
        requests = self._no_states(torch.from_numpy(counts), saves=True)
        inputs = inputs._replace(requests=requests, given=self._given(num_tokens))
        hidden = tapped_states(model, inputs)[:, : model.config.hidden_size]
        if model.head is None:
            model.final_states(hidden, inputs.logits_rows)
            return
        logits = model.logits(hidden, inputs.logits_rows)
        none, one = np.zeros(num_requests), np.ones(num_requests)
        words = pack_columns(
            temperature=one,
            top_k=none,
            top_p=one,
            min_p=none,
            seed=none.astype(np.uint64),
            position=none,
            choice=none,
        )
        reported = logits.clone()  # a step keeps a copy for log probabilities
        sample_tokens(reported, torch.from_numpy(words).to(self._device), Kinds(draws=True, cuts=True))

    @torch.inference_mode()
    def largest_graph(self) -> None:
        """Run the largest step with prompts that is a graph, of padding only, over a cache with only the null block."""
        if self._config.enforce_eager or self._model.config.recurrent is not None:
            return
        model, device, length = self._model, self._device, self._max_model_len()
        size = most_work(self._token_budget(), self.num_rows, self._operations.group_size, ceil_div(length, SPLIT))
        none = [torch.full((count,), -1, dtype=torch.int32, device=device) for count in size[:3]]
        rows, alone, tiles = none
        lasts = rows if self._most_whole else None
        work = TritonWork(rows, rows, rows[:1, None], alone, tiles, tiles, size.num_splits, lasts=lasts)
        kinds, ids = self._operations.of_kinds(work), rows.long()
        cache = model.allocate_cache(1, self._config.block_size)
        has_axes = self._encoder_width is not None and model.config.rope_axes is not None
        turned = rows[:, None].expand(-1, AXES) if has_axes else None
        inputs = ModelInputs(ids + 1, rows, ids, kinds, cache, ids[:0], given=self._given(len(rows)), turned=turned)
        hidden = model.hidden_states(inputs)
        hidden.clone()  # graphs have their results in common

    @torch.inference_mode()
    def largest_decode(self) -> None:
        """Run a decode step with one token for each request that may run, and for each draft.

        Its memory is that of the longest possible context, but its time is that of a context of one token, in the null
        block.
        """
        model = self._model
        num_rows, device = padded_rows(most_alone(self._config)), self._device
        zeros = torch.zeros(num_rows, dtype=torch.int32, device=device)
        splits = ceil_div(self._max_model_len(), SPLIT)
        alone = torch.arange(num_rows, dtype=torch.int32, device=device)
        work = TritonWork(zeros, zeros, zeros[:1, None], alone, zeros[:0], zeros[:0], splits)
        ids, cache = zeros.long(), model.allocate_cache(1, self._config.block_size)
        inputs = ModelInputs(ids, zeros, ids - 1, self._operations.of_kinds(work), cache, ids[:0])
        model.hidden_states(inputs._replace(requests=self._no_states(torch.ones(num_rows))))

    def _given(self, num_tokens: int) -> GivenRows | None:
        """Return embeddings of all tokens of a trial step, as of images; None: the model sees none."""
        if self._encoder_width is None:
            return None
        rows = torch.zeros(num_tokens, self._encoder_width, device=self._device)
        return GivenRows(torch.arange(num_tokens, device=self._device), rows)

    def _no_states(self, num_tokens: torch.Tensor, *, saves: bool = False) -> DeviceStates | None:
        """Return states for a trial step with requests of num_tokens [R] tokens each; None: the model has none."""
        size = self._model.config.state_size
        return no_states(size, num_tokens.to(self._device), saves=saves) if size else None
