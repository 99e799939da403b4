"""without_neutral(): flags of vLLM that change nothing here are accepted, as LLM() accepts them (docs/vllm.md)."""

from collections.abc import Container, Sequence

from ipc.errors import ConfigError
from ipc.options.neutral_options import check_neutral, is_neutral, is_switch, value_of
from tools.flags.hints import FLAGS

_SHORT = {"-dp": "data_parallel_size"}
#: Switches of vLLM's and llama.cpp's that ask for what is always so here, tune what is not here, or are about the log.
_ALWAYS_SO = (
    *("--cont-batching", "-cb", "--flash-attn", "-fa", "--jinja", "--webui", "--no-webui", "--ui", "--no-ui"),
    *("--verbose", "-v", "--log-disable", "--log-prefix", "--no-log-prefix", "--log-timestamps", "--no-log-timestamps"),
    *("--embedding", "--embeddings", "--reranking", "--rerank", "--slots", "--cache-prompt", "--no-context-shift"),
    *("--mmap", "--no-mmap", "--warmup", "--no-warmup", "--perf", "--no-perf", "--kv-unified", "-kvu", "--swa-full"),
    *("--kv-offload", "--no-kv-offload", "-nkvo", "--repack", "--no-repack", "--escape", "--no-escape", "--no-mmproj"),
    *("--check-tensors", "--disable-uvicorn-access-log", "--exclude-tools-when-tool-choice-none"),
    *("--enable-prompt-tokens-details", "--enable-request-id-headers", "--enable-server-load-tracking"),
    *("--enable-tokenizer-info-endpoint", "--enable-log-deltas", "--log-error-stack"),
)
_ANY = ()
#: Flags with a value -> the values that change nothing, and what to do instead of another; no values = all of them.
VALUES: dict[str, tuple[tuple[str, ...], str]] = {
    "--seed": (("0", "-1"), "each request has its own seed; without one it is random"),
    "-s": (("0", "-1"), "each request has its own seed; without one it is random"),
    "--response-role": (("assistant",), "the role of an answer is assistant"),
    "--chat-template-content-format": (("auto",), "the chat template decides"),
    "--structured-outputs-config.backend": (("auto", "guidance"), "grammars are run by llguidance"),
    "--structured-outputs-config.reasoning_parser": (("",), "use --reasoning-parser"),
    "--uvicorn-log-level": (_ANY, ""),
    "--log-colors": (("on", "off", "auto"), "the log has no colours"),
    "--verbosity": (_ANY, ""),
    "-lv": (_ANY, ""),
    "--spec-type": (("none",), FLAGS["--spec-type"]),
    "--reasoning-format": (("auto", "deepseek"), "use --reasoning-parser none to leave reasoning in the text"),
    "--reasoning-budget": (("-1",), "send reasoning_effort or chat_template_kwargs with a request"),
    "--cache-type-k": (("f16", "bf16"), "use --kv-cache-dtype for both"),
    "-ctk": (("f16", "bf16"), "use --kv-cache-dtype for both"),
    "--cache-type-v": (("f16", "bf16"), "use --kv-cache-dtype for both"),
    "-ctv": (("f16", "bf16"), "use --kv-cache-dtype for both"),
    "--cache-reuse": (("0",), "caches are reused from a prompt's beginning"),
    "--keep": (("0", "-1"), "no prompt is cut"),
    "--numa": (("",), "start the server under numactl"),
    "--split-mode": (("none",), "use --tensor-parallel-size or --pipeline-parallel-size"),
    "-sm": (("none",), "use --tensor-parallel-size or --pipeline-parallel-size"),
    "--n-gpu-layers": (("0",), FLAGS["--n-gpu-layers"]),
    "--gpu-layers": (("0",), FLAGS["--n-gpu-layers"]),
    "-ngl": (("0",), FLAGS["--n-gpu-layers"]),
    "--main-gpu": (("0",), "set CUDA_VISIBLE_DEVICES"),
    "-mg": (("0",), "set CUDA_VISIBLE_DEVICES"),
    "--threads-http": (_ANY, ""),
    "--threads-batch": (_ANY, ""),
    "-tb": (_ANY, ""),
    "--prio": (("0",), "start the server under nice"),
    "--poll": (_ANY, ""),
    "--defrag-thold": (_ANY, ""),
    "-dt": (_ANY, ""),
    "--ctx-checkpoints": (_ANY, ""),
    "--cache-ram": (_ANY, ""),
    "--slot-prompt-similarity": (_ANY, ""),
    "--h11-max-incomplete-event-size": (_ANY, ""),
    "--h11-max-header-count": (_ANY, ""),
}
_OPTIONAL = ("--flash-attn", "-fa", "--log-colors")  # switches in older versions, with on, off or auto in newer ones


def without_neutral(words: Sequence[str], known: Container[str]) -> list[str]:
    """Return the words without other engines' flags that change nothing; underscores in our own flags become dashes.

    known: the command's own flags.
    Errors: ConfigError for a value that asks for a feature that does not exist.
    """
    kept, at = [], 0
    while at < len(words) and words[at] != "--":
        word, at = words[at], at + 1
        flag, has_value, value = word.partition("=")
        if flag.startswith("--") and flag not in known and (dashed := flag.replace("_", "-")) in known:
            word, flag = dashed + word[len(flag) :], dashed
        name = _option(flag)
        if flag in known or name is None:
            follows = not has_value and list(words[at : at + 1]) not in ([], ["--"])
            if flag in _OPTIONAL and flag not in known:
                at += follows and words[at] in ("on", "off", "auto")
                continue
            lacks_value = flag in VALUES and not has_value and not follows
            if flag in known or lacks_value or flag not in (*_ALWAYS_SO, *VALUES):
                kept.append(word)
            elif flag in VALUES:
                if not has_value:
                    value, at = " ".join(words[at : at + 1]), at + 1
                _check_value(flag, value)
        elif is_switch(name):
            _check(flag, name, not flag.startswith("--no-"))
        else:
            if not has_value:
                value, at = " ".join(words[at : at + 1]), at + 1
            _check(flag, name, value_of(value))
    return kept + list(words[at:])


def _check_value(flag: str, value: str) -> None:
    allowed, instead = VALUES[flag]
    if allowed and value not in allowed:
        shown = " or ".join(one or '""' for one in allowed)
        raise ConfigError(f"argument {flag}: {value!r:.80} is not supported; only {shown} is: {instead}")


def _check(flag: str, name: str, value: object) -> None:
    try:
        check_neutral(name, value)
    except ConfigError as error:
        raise ConfigError(f"argument {flag}: {FLAGS.get(flag, error)}") from None


def _option(flag: str) -> str | None:
    """Return the option of this flag, if it is a flag of vLLM and not of ours."""
    if flag in _SHORT:
        return _SHORT[flag]
    name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
    if is_neutral(name):
        return name
    name = name.removeprefix("no_")
    return name if is_neutral(name) and is_switch(name) else None
