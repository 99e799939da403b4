"""ModelOptions: the options for what an engine runs, and on which machine: the first part of EngineConfig."""

from typing import Annotated, Literal

import msgspec

from ipc.options.option import Option

Dtype = Literal["auto", "float32", "bfloat16"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Numerics = Literal["L0", "L2"]
RunnerKind = Literal["auto", "generate", "pooling"]
ModelImpl = Literal["auto", "native", "transformers"]
CpuKernels = Literal[
    "auto", "c", "amx", "avx512bf16", "avx512", "avx2", "neon_bf16", "neon_dot", "neon", "portable", "torch"
]
DistributedExecutorBackend = Literal["auto", "uni", "mp", "ray"]
Quantization = Literal["auto", "stored", "none", "int8", "fp8"]


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of the model, of its adapters and of the machine. EngineConfig (ipc/options/config.py) has the others."""

    model: Annotated[
        str | None,
        Option(
            "model",
            "folder with config.json and *.safetensors, .gguf file, or Hugging Face name (org/name, org/name:Q4_K_M); "
            "default: the demo model",
            flags=("-m", "--model-path", "--model-id", "-hf", "-hfr", "--hf-repo"),
        ),
    ] = None
    mmproj: Annotated[
        str | None,
        Option(
            "model",
            "file with the vision encoder of a model in a .gguf file; default: a file next to it with mmproj in its "
            "name",
            flags=("-mm",),
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Option(
            "model",
            "file with a chat template, or the template itself, instead of all of the model's own",
            flags=("--chat-template-file",),
        ),
    ] = None
    executor: Annotated[
        str,
        Option(
            "machine",
            "what runs the steps: local = the model, fake = made-up tokens without a model; any other name is a "
            "plug-in's (docs/executors.md)",
        ),
    ] = "local"
    executor_options: Annotated[
        dict[str, str],
        Option(
            "machine", "an option of the executor (docs/executors.md); may be repeated", flags=("--executor-option",)
        ),
    ] = {}
    distributed_executor_backend: Annotated[
        DistributedExecutorBackend,
        Option(
            "machine",
            "mp = the executor runs in worker processes, which may crash and restart; ray = in those that Ray places "
            "(pip install ray); uni = in the engine; auto = uni if possible",
            spellings={"external_launcher": "uni"},  # of trainers: each of their processes has an engine
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int, Option("machine", "workers that compute the model together, each a part", 1, 256, flags=("-tp",))
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Option("machine", "stages: groups of workers, each with some of the layers", 1, 256, flags=("-pp",))
    ] = 1
    nnodes: Annotated[
        int,
        Option(
            "machine",
            "number of machines for the workers; the others run `engine-core worker`, with ray by themselves",
            1,
            256,
        ),
    ] = 1
    master_addr: Annotated[
        str | None,
        Option(
            "machine",
            "address at which they join: HOST or HOST:PORT of this machine, or tcp://HOST:PORT?keys=PATH",
            metavar="ADDRESS",
        ),
    ] = None
    load_format: Annotated[
        LoadFormat, Option("model", "format of the weights; 'dummy' = made-up weights, to benchmark a config")
    ] = "auto"
    dtype: Annotated[
        Dtype,
        Option(
            "model",
            "type of weights and arithmetic; auto = bfloat16 with AVX2, on a GPU that has it, or if memory is short, "
            "otherwise float32",
            spellings={"float": "float32"},
            refused=dict.fromkeys(("float16", "half"), "bfloat16 takes the same memory, and is what is computed here"),
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        Option(
            "model",
            "matrices in memory: stored = as in a quantized file, none = dequantized at load (no token changes), "
            "int8 = products in 8 bits (on a GPU: weights in 8 bits; changes tokens), fp8 = weights and activations "
            "are 8-bit floats (on a GPU; changes tokens); auto = stored, none or both, "
            "which depends on the CPU and the memory (on a GPU: none)",
        ),
    ] = "auto"
    limit_mm_per_prompt: Annotated[
        dict[str, int],
        Option("model", "most images of one prompt, as image=2; may be 0; default: no limit"),
    ] = {}
    image_max_pixels: Annotated[
        int | None,
        Option(
            "model", "larger images are made smaller, for models that take any size; default: the model's", 1, 2**31
        ),
    ] = None
    device: Annotated[
        str,
        Option(
            "machine",
            "device of the model; cuda = an NVIDIA GPU, with Triton kernels; others by plug-ins (docs/executors.md)",
            metavar="cpu|cuda|NAME",
        ),
    ] = "cpu"
    model_impl: Annotated[
        ModelImpl,
        Option(
            "model",
            "source of the model code; auto = ours if it has the architecture, otherwise transformers",
            spellings={"vllm": "native"},
        ),
    ] = "auto"
    runner: Annotated[
        RunnerKind,
        Option(
            "model",
            "what requests get: tokens (generate) or vectors (pooling); auto = from the model's files",
            names=("task",),
            spellings=dict.fromkeys(("embed", "embedding", "classify", "score", "reward", "encode"), "pooling"),
            refused={"transcription": "speech is not read"},
        ),
    ] = "auto"
    classifier_from_token: Annotated[
        str | None,
        Option("model", "NO,YES: two tokens; a prompt's score is the probability of the second, among these two"),
    ] = None
    enable_lora: Annotated[bool, Option("adapters", "allow requests with adapters (LoRA) of the model")] = False
    max_loras: Annotated[
        int, Option("adapters", "most different adapters in one step; requests with others wait", 1, 1024)
    ] = 8
    max_lora_rank: Annotated[int, Option("adapters", "largest rank of an adapter's matrices", 1, 4096)] = 64
    lora_modules: Annotated[
        dict[str, str],
        Option("adapters", "adapters to load at the start: PEFT folders or .gguf files; may be repeated"),
    ] = {}
    numerics: Annotated[
        Numerics, Option("model", "L2: a request's tokens never depend on its neighbours; L0: torch's operations")
    ] = "L2"
    threads: Annotated[
        int | None,
        Option(
            "machine",
            "compute threads; default: the CPUs that this process may use, by affinity and CPU quota",
            1,
            1024,
            flags=("-t",),
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Option(
            "model",
            "most tokens of prompt and output together; default: the model's",
            2,
            2**24,
            flags=("-c", "--ctx-size", "--context-length"),
        ),
    ] = None
    async_scheduling: Annotated[
        bool | None,
        Option("machine", "schedule a step before the tokens of the previous one are known; default: on a GPU"),
    ] = None
    generation_config: Annotated[
        str,
        Option(
            "model", "default sampling parameters; auto = the model's own, vllm = neutral ones, or those in a folder"
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, float],
        Option("model", "default sampling parameters in place of those of generation_config, as temperature=0.5"),
    ] = {}
    cpu_kernels: Annotated[
        CpuKernels,
        Option(
            "machine",
            "CPU kernels; auto = C kernels if the wheel has them or a C compiler is found, otherwise torch's; c or "
            "the name of a variant: these, or the start fails",
        ),
    ] = "auto"
    reserve_weights: Annotated[
        bool,
        Option(
            "machine",
            "take memory for the first update of the weights when the engine starts or wakes up, so that it is as "
            "fast as later ones; the system may take it back",
        ),
    ] = False
    weight_cache_bytes: Annotated[
        int,
        Option(
            "machine",
            "size of the folder of packed weights, which make later starts faster; 0 = packed at each start",
            0,
            2**63 - 1,
        ),
    ] = 64 << 30
    gpu_memory_utilization: Annotated[
        float, Option("machine", "share of a GPU's memory that the engine may take", 0, 1, is_above_low=True)
    ] = 0.9
    enforce_eager: Annotated[bool, Option("machine", "no CUDA graphs on a GPU")] = False
