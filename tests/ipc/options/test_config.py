"""EngineConfig: every bad option is named together with what is allowed."""

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from ipc.errors import ConfigError, EngineCoreError
from ipc.options.config import OPTIONS, EngineConfig
from ipc.options.given_options import config_from_options
from ipc.options.neutral_options import ELSEWHERE, NEUTRAL, WITHOUT_EFFECT
from ipc.options.option import Option, declared_options
from ipc.options.workers import most_in_flight

FIELDS = EngineConfig.__struct_fields__


def names_of(plain: object) -> list[str]:
    return sorted(name for name, declared in OPTIONS.items() if declared.plain is plain)


CHOICES = {name: declared.choices for name, declared in OPTIONS.items() if declared.choices}
#: What some options need beside them.
BESIDE = {"nnodes": {"pipeline_parallel_size": 256, "master_addr": "127.0.0.1"}}
OPTIONAL = [name for name, declared in OPTIONS.items() if declared.is_optional]


def test_every_option_is_checked_by_some_rule() -> None:
    others = {"model", "capture", "client_weights", "generation_config", "speculative_config", "kv_transfer_config"}
    others |= {
        "classifier_from_token",
        "executor",
        "executor_options",
        "lora_modules",
        "flight_recorder_folder",
        "kv_dir",
        "kv_listen",
        "kv_peers",
        "kv_key_file",
        "master_addr",
        "mmproj",
        "chat_template",
        "device",
        "limit_mm_per_prompt",
        "override_generation_config",
        "scheduler_cls",
    }
    assert set(FIELDS) == {*CHOICES, *names_of(bool), *names_of(int), *names_of(float), *others}
    assert list(OPTIONS) == list(FIELDS)


def test_every_option_says_what_it_is() -> None:
    for name, declared in OPTIONS.items():
        assert len(declared.option.help) > 10, name
        assert declared.option.group, name
        if declared.plain in (int, float):
            assert declared.option.low < declared.option.high, name


def test_a_field_without_a_declaration_is_a_mistake() -> None:
    class Config(msgspec.Struct):
        declared: Annotated[int, Option("group", "number of things", 1, 2)] = 1
        forgotten: int = 2

    with pytest.raises(TypeError, match=r"Config\.forgotten must be Annotated with one Option; it is <class 'int'>"):
        declared_options(Config)


@pytest.mark.parametrize("weights", [[], {"": 1.0}, {1: 1.0}])
def test_client_weights_are_by_name(weights: object) -> None:
    with pytest.raises(ConfigError, match="client_weights must be a dict of client names and weights; got "):
        config_from_options(client_weights=weights)


@pytest.mark.parametrize("weight", [0, -1.0, 1001, float("nan"), True, "2", None])
def test_a_weight_is_a_positive_number(weight: object) -> None:
    assert config_from_options(client_weights={"a": 0.5, "b": 3}).client_weights == {"a": 0.5, "b": 3}
    with pytest.raises(ConfigError, match=r"the weight of 'b' must be a number from 0.001 to 1000; got "):
        config_from_options(client_weights={"a": 1.0, "b": weight})


def test_defaults_are_valid_and_frozen() -> None:
    config = config_from_options()
    assert config == EngineConfig()
    with pytest.raises(AttributeError):
        config.block_size = 32  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(CHOICES))
@pytest.mark.parametrize("value", ["nonsense", "", 3, ["auto"]])
def test_choices(name: str, value: object) -> None:
    allowed = ", ".join(CHOICES[name])
    with pytest.raises(ConfigError, match=re.escape(f"{name} must be one of {allowed}; got {value!r}")):
        config_from_options(**{name: value})


def test_every_choice_is_accepted() -> None:
    for name, choices in CHOICES.items():
        for choice in choices:
            assert getattr(config_from_options(**{name: choice}), name) == choice


@pytest.mark.parametrize("name", names_of(int))
def test_ranges(name: str) -> None:
    low, high = int(OPTIONS[name].option.low), int(OPTIONS[name].option.high)
    for value in (low, high):
        assert getattr(config_from_options(**{name: value}, **BESIDE.get(name, {})), name) == value
    text = re.escape(f"{name} must be an integer from {low} to {high}; got ")
    bad: list[Any] = [low - 1, high + 1, -(10**9), 10**30, True, 8.5, float("nan"), float("inf"), [8], b"8"]
    bad += [] if OPTIONS[name].is_bytes else ["8"]
    for value in bad:
        with pytest.raises(ConfigError, match=text + re.escape(repr(value))):
            config_from_options(**{name: value})


def test_none_lets_the_engine_decide() -> None:
    for name in OPTIONAL:
        assert getattr(config_from_options(**{name: None}), name) is None


def test_a_path_may_be_a_path_object() -> None:
    assert config_from_options(capture=Path("a") / "b", model=Path("c")) == EngineConfig(capture="a/b", model="c")


@pytest.mark.parametrize("name", sorted(set(names_of(float)) - {"gpu_memory_utilization"}))
def test_numbers(name: str) -> None:
    option = OPTIONS[name].option
    for value in (option.low, option.high):
        assert getattr(config_from_options(**{name: value}), name) == value
    for bad in (-0.1, option.high * 1.01, float("nan"), True, "0.1"):
        text = f"{name} must be a number from 0 to {option.high:g}; got {bad!r}"
        with pytest.raises(ConfigError, match=re.escape(text)):
            config_from_options(**{name: bad})


def test_an_integral_float_is_told_how_to_be_written() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs must be an integer from 1 to 65536; got 8\.0, write 8$"):
        config_from_options(max_num_seqs=8.0)


@pytest.mark.parametrize("value", [3, 5, 6, 7, 12, 100, 127])
def test_block_size_is_a_power_of_two(value: int) -> None:
    with pytest.raises(ConfigError, match=f"block_size must be a power of two from 1 to 128; got {value}"):
        config_from_options(block_size=value)


@pytest.mark.parametrize("name", names_of(bool))
@pytest.mark.parametrize("value", [1, 0, "true"])
def test_switches(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be true or false; got {value!r}"):
        config_from_options(**{name: value})


@pytest.mark.parametrize("value", ["", 3, b"model", ["model"]])
def test_capture(value: object) -> None:
    with pytest.raises(ConfigError, match=r"capture must be the path of a file to write; got"):
        config_from_options(capture=value)


@pytest.mark.parametrize("value", ["", 3, b"model", ["model"]])
def test_model(value: object) -> None:
    with pytest.raises(ConfigError, match=r"model must be a model folder, a \.gguf file or a Hugging Face name; got"):
        config_from_options(model=value)


def test_the_length_and_the_characters_of_a_model_are_bounded() -> None:
    assert config_from_options(model="\u00e4" * 2048).model == "\u00e4" * 2048
    with pytest.raises(ConfigError, match="model must be at most 4096 bytes long; got 4098, beginning"):
        config_from_options(model="\u00e4" * 2049)
    for value in ("\udcff", "a\0"):
        with pytest.raises(ConfigError, match="model must be valid UTF-8 without NUL; got"):
            config_from_options(model=value)


def test_async_scheduling_needs_an_executor_that_overlaps() -> None:
    with pytest.raises(ConfigError, match="async_scheduling=true needs an executor that overlaps"):
        config_from_options(async_scheduling=True)
    assert config_from_options(async_scheduling=True, executor="fake").async_scheduling
    assert config_from_options(async_scheduling=True, device="cuda").async_scheduling


def test_steps_overlap_on_a_gpu_unless_the_config_says_no() -> None:
    assert most_in_flight(config_from_options(device="cuda")) == 2
    assert most_in_flight(config_from_options(device="cuda", async_scheduling=False)) == 1
    assert most_in_flight(config_from_options()) == most_in_flight(config_from_options(executor="fake")) == 1


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_num_sequences", "max_num_seqs"),
        ("max_model_length", "max_model_len"),
        ("blocksize", "block_size"),
        ("num_threads", "threads"),
        ("max_num_batched_token", "max_num_batched_tokens"),
        ("prefix_caching", "enable_prefix_caching"),
        ("preempted_mode", "preemption_mode"),
        ("tensor_parallelism_size", "tensor_parallel_size"),
    ],
)
def test_an_unknown_option_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{name}'; did you mean '{near}'\\? known options: model,"):
        config_from_options(**{name: 8})


def test_an_option_like_no_other_gets_the_list() -> None:
    with pytest.raises(ConfigError, match="unknown option 'zzz'; known options: ") as caught:
        config_from_options(zzz=1)
    assert all(name in str(caught.value) for name in FIELDS)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, EngineCoreError)


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_options_of_vllm_are_accepted_where_they_change_nothing(name: str) -> None:
    for value in (*NEUTRAL[name], None):
        assert config_from_options(**{name: value}) == EngineConfig()
    with pytest.raises(ConfigError, match=f"{name}=7 is not supported by this version; only .* is"):
        config_from_options(**{name: 7})


def test_options_of_vllm_that_never_have_an_effect() -> None:
    assert config_from_options(**dict.fromkeys(WITHOUT_EFFECT, 7)) == EngineConfig()
    assert not (WITHOUT_EFFECT | set(NEUTRAL)) & set(OPTIONS)
    assert not WITHOUT_EFFECT & set(NEUTRAL)


@pytest.mark.parametrize("name", sorted({*OPTIONS, "swap_space", "revision", "num_gpu_blocks_override"}))
def test_none_is_an_option_that_was_not_given(name: str) -> None:
    assert config_from_options(**{name: None}) == EngineConfig()


def test_a_revision_is_a_part_of_the_models_name() -> None:
    assert config_from_options(model="org/name", revision="v1").model == "org/name@v1"
    for model in (None, "/models/x", "org/name@v2"):
        with pytest.raises(ConfigError, match="revision='v1' needs a model of the Hugging Face Hub"):
            config_from_options(model=model, revision="v1")


def test_dtypes_of_torch() -> None:
    class TorchDtype:
        def __repr__(self) -> str:
            return "torch.bfloat16"

    assert config_from_options(dtype=TorchDtype()).dtype == "bfloat16"
    with pytest.raises(ConfigError, match="dtype must be one of auto, float32, bfloat16; got 'half': bfloat16"):
        config_from_options(dtype="half")


def test_share_of_a_gpu() -> None:
    assert config_from_options(gpu_memory_utilization=1).gpu_memory_utilization == 1
    for value in (0, 1.5, float("nan"), True, "0.9"):
        with pytest.raises(ConfigError, match="gpu_memory_utilization must be a number above 0 and up to 1; got"):
            config_from_options(gpu_memory_utilization=value)


def test_other_names() -> None:
    config = config_from_options(dtype="float", num_gpu_blocks_override=9)
    assert (config.dtype, config.num_blocks_override) == ("float32", 9)
    with pytest.raises(ConfigError, match="num_gpu_blocks_override is another name of an option"):
        config_from_options(num_blocks_override=9, num_gpu_blocks_override=9)
    with pytest.raises(ConfigError, match="dtype must be one of auto, float32, bfloat16; got 'half': bfloat16"):
        config_from_options(dtype="half")


def test_a_config_is_a_message() -> None:
    configs = (
        EngineConfig(),
        EngineConfig(model="m", executor="fake", async_scheduling=True, num_blocks_override=2, threads=1),
    )
    for config in configs:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
        assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


@pytest.mark.parametrize("raw", [{"block_size": 12}, {"dtype": "float8"}, {"threads": "2"}, {"model": ""}])
def test_a_bad_config_is_refused_when_decoded(raw: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=EngineConfig)


def test_generation_config() -> None:
    for value in ("auto", "vllm", "/a/folder"):
        assert config_from_options(generation_config=value).generation_config == value
    assert config_from_options(generation_config=None).generation_config == "auto"
    for wrong in ("", 3, True):
        with pytest.raises(ConfigError, match="generation_config must be 'auto', 'vllm' or the path of a folder; got"):
            config_from_options(generation_config=wrong)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"policy": "priority"}, {"scheduling_policy": "priority"}),
        ({"task": "generate"}, {"runner": "generate"}),
        ({"task": "embed"}, {"runner": "pooling"}),
        ({"delay_factor": 0.5}, {"scheduler_delay_factor": 0.5}),
        ({"num_gpu_blocks": 64}, {"num_blocks_override": 64}),
        ({"num_cpu_blocks": 64}, {"num_swap_blocks": 64}),
        ({"swap_space": 4}, {"swap_space_bytes": 4 << 30}),
        ({"kv_cache_memory_bytes": "64M"}, {"kv_cache_memory_bytes": 64 << 20}),
        ({"kv_host_bytes": "1g"}, {"kv_host_bytes": 1 << 30}),
        ({"worker_use_ray": True}, {"distributed_executor_backend": "ray"}),
        ({"worker_use_ray": False}, {"distributed_executor_backend": "auto"}),
        ({"kv_dir_bytes": "1048576"}, {"kv_dir_bytes": 1 << 20}),
    ],
)
def test_other_names_and_texts_of_options(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert config_from_options(**given) == EngineConfig(**ours)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_host_bytes": "64 MB"}, "kv_host_bytes: expected bytes as 1048576, 512M or 2G, got '64 MB'"),
        ({"kv_host_bytes": "9" * 5000}, "kv_host_bytes: expected bytes"),
        ({"task": "transcription"}, "runner must be one of .*: speech is not read"),
        ({"num_scheduler_steps": 8}, "async_scheduling computes"),
        ({"otlp_traces_endpoint": "grpc://a"}, "engine-core serve --http --otlp-traces-endpoint"),
        ({"engine_use_ray": True}, "engine-core ray"),
        ({"worker_use_ray": "yes"}, "worker_use_ray must be true or false"),
        ({"worker_use_ray": True, "distributed_executor_backend": "mp"}, "'mp' was given; leave one of them out"),
        ({"distributed_executor_backend": "ray", "device": "cuda"}, "for device='cpu'"),
        ({"sliding_window": 4096}, "it is kv_window"),
        ({"device": "npu"}, r"device must be one of cpu, cuda.*; got 'npu': .*docs/executors.md"),
        ({"device": "a b"}, "device must be"),
        ({"device": "npu", "executor": "fake"}, "executor='fake' runs on cpu and cuda; got device='npu'"),
        ({"device": 3}, "device must be cpu, cuda or a name"),
        ({"limit_mm_per_prompt": {"picture": 1}}, 'limit_mm_per_prompt must be {"image": N}'),
        ({"limit_mm_per_prompt": {"image": -1}}, "image must be an integer from 0"),
        ({"limit_mm_per_prompt": {"image": True}}, "image must be an integer from 0"),
    ],
)
def test_what_is_refused_names_the_substitute(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_from_options(**given)


#: The options of vLLM that docs/origins.md speaks of -> a value with which LLM() takes them, and what they become.
OF_THE_DESIGN_NOTES: dict[str, tuple[object, dict[str, Any]]] = {
    "block_size": (32, {"block_size": 32}),
    "delay_factor": (0.5, {"scheduler_delay_factor": 0.5}),
    "device": ("cpu", {"device": "cpu"}),
    "disable_cascade_attn": (True, {"disable_cascade_attn": True}),
    "distributed_executor_backend": ("mp", {"distributed_executor_backend": "mp"}),
    "enable_chunked_prefill": (False, {"enable_chunked_prefill": False}),
    "enable_lora": (True, {"enable_lora": True}),
    "enable_prefix_caching": (False, {"enable_prefix_caching": False}),
    "encoder_cache_size": (4096, {"encoder_cache_size": 4096}),
    "engine_use_ray": (False, {}),
    "gpu_memory_utilization": (0.8, {"gpu_memory_utilization": 0.8}),
    "kv_transfer_config": (None, {}),
    "logits_processors": ([], {}),
    "long_prefill_token_threshold": (64, {"long_prefill_token_threshold": 64}),
    "max_loras": (2, {"max_loras": 2}),
    "max_model_len": (512, {"max_model_len": 512}),
    "max_num_batched_tokens": (256, {"max_num_batched_tokens": 256}),
    "max_num_encoder_input_tokens": (2048, {"max_num_encoder_input_tokens": 2048}),
    "max_num_seqs": (8, {"max_num_seqs": 8}),
    "num_cpu_blocks": (64, {"num_swap_blocks": 64}),
    "num_gpu_blocks": (64, {"num_blocks_override": 64}),
    "num_gpu_blocks_override": (64, {"num_blocks_override": 64}),
    "num_lookahead_slots": (4, {}),
    "num_scheduler_steps": (1, {}),
    "otlp_traces_endpoint": (None, {}),
    "pipeline_parallel_size": (2, {"pipeline_parallel_size": 2}),
    "policy": ("priority", {"scheduling_policy": "priority"}),
    "preemption_mode": ("swap", {"preemption_mode": "swap"}),
    "scheduler_cls": (None, {}),
    "scheduling_policy": ("priority", {"scheduling_policy": "priority"}),
    "sliding_window": (None, {}),
    "swap_space": (1.5, {"swap_space_bytes": 3 << 29}),
    "task": ("embedding", {"runner": "pooling"}),
    "tensor_parallel_size": (2, {"tensor_parallel_size": 2}),
    "use_async_output_proc": (True, {}),
    "use_v2_block_manager": (True, {}),
    "watermark": (0.05, {"watermark": 0.05}),
    "worker_use_ray": (False, {}),
}


def test_every_option_of_the_design_notes_is_taken_or_named() -> None:
    for name, (value, ours) in OF_THE_DESIGN_NOTES.items():
        assert config_from_options(**{name: value}) == EngineConfig(**ours), name
        if value is None and name in NEUTRAL:  # taken at no value: refused, with what to use
            with pytest.raises(ConfigError, match=f"{name}=.* is not supported by this version; .*: "):
                config_from_options(**{name: 1})


def test_names_that_are_no_options_say_what_is_meant() -> None:
    assert not set(ELSEWHERE) & {*OPTIONS, *NEUTRAL, *WITHOUT_EFFECT, *OF_THE_DESIGN_NOTES}
    for name, meant in ELSEWHERE.items():
        with pytest.raises(ConfigError, match=re.escape(f"unknown option '{name}'; {meant}; known options: ")):
            config_from_options(**{name: 1})
        option = re.fullmatch(r"it is ([a-z_]+)", meant)
        assert option is None or option[1] in OPTIONS, name


#: Words of the design notes which are like an option's name and mean something else.
OF_ANOTHER_MEANING = ("from_request", "pop_request", "request_ids", "add_num_seqs", "num_gpu_slots", "swap_policy")


@pytest.mark.parametrize("name", [*OF_ANOTHER_MEANING, "num_host_slots", "kv_host_blocks"])
def test_no_option_of_another_meaning_is_suggested(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{name}'; known options: "):
        config_from_options(**{name: 1})
