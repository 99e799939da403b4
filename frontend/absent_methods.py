"""AbsentMethods: methods of vLLM's classes that do not exist here; the error says why, and what to use instead."""

from typing import TYPE_CHECKING, Any, NoReturn

_WORKERS = "an engine does not run its callers' code"
_PROFILE = (
    "there is no profiler; `engine-core control dump` and then `engine-core replay FILE --perfetto OUT` show the steps "
    "of a running engine"
)
_LORA = "give a lora_request to generate(), or use `engine-core control` (docs/lora.md)"
_PAUSE = "use client.pause() and client.resume(), as the engine's owner"
_MEDIA = "an image's rows are cached by content and need no reset; reset_prefix_cache() also drops prompts with images"
_CONFIG = "there is no such object; client.welcome has the engine's limits and names"
_SCHEDULER = (
    "the scheduler runs in the engine's process; statistics() and get_metrics() have its counts, client.explain() says "
    "why a request waits"
)

#: vLLM's name -> why it does not exist here, or what to use.
ABSENT = {
    **dict.fromkeys(("collective_rpc", "apply_model", "scale_elastic_ep"), _WORKERS),
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILE),
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"), _LORA),
    **dict.fromkeys(("pause_generation", "resume_generation", "is_paused"), _PAUSE),
    "wait_for_requests_to_drain": "use client.drain(), as the engine's owner",
    "reset_mm_cache": _MEDIA,
    **dict.fromkeys(("vllm_config", "get_vllm_config", "from_vllm_config", "cache_config"), _CONFIG),
    **dict.fromkeys(("get_decoding_config", "get_scheduler_config", "get_lora_config"), _CONFIG),
    **dict.fromkeys(("scheduler", "make_stats", "get_request_counts", "has_finished_requests"), _SCHEDULER),
    **dict.fromkeys(("block_manager", "cache_engine", "determine_num_available_blocks"), _SCHEDULER),
    "finish_requests": "use abort_request(), or AsyncLLM.abort(); a request ends by itself at its deadline",
    "process_model_inputs": "generate() and add_request() tokenize; get_tokenizer() does it alone",
    "set_tokenizer": "give tokenizer=PATH to the constructor",
    "reward": "use encode() with a pooling model",
    "preprocess_chat": "use get_tokenizer().apply_chat_template()",
    **dict.fromkeys(("enqueue", "wait_for_completion"), "use llm_engine.add_request() and step()"),
    "do_log_stats": "use get_metrics(), or `engine-core top`",
}


class AbsentMethods:
    """The base of a class whose methods are vLLM's. An absent one is an AttributeError, so hasattr() says False."""

    if not TYPE_CHECKING:  # so that a type checker finds misspelled names

        def __getattr__(self, name: str) -> Any:
            refuse(type(self).__name__, name)


def refuse(owner: str, name: str) -> NoReturn:
    """Raise the AttributeError of a missing name, with the reason if vLLM has it."""
    if name in ABSENT:
        raise AttributeError(f"vLLM's {owner}.{name} is not supported by this version: {ABSENT[name]}")
    raise AttributeError(f"{owner!r} object has no attribute {name!r}")
