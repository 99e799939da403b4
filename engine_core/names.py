"""The public names: `from engine_core import LLM, AsyncLLM, SamplingParams`."""

from frontend.async_llm import AsyncLLM
from frontend.llm import LLM
from frontend.results.outputs import CompletionOutput, RequestMetrics, RequestOutput
from frontend.text.prompts import TextPrompt, TokensPrompt
from ipc.errors import (
    AddressError,
    CallFailedError,
    ConfigError,
    DeadlineExceededError,
    EngineCoreError,
    EngineDeadError,
    EngineStartError,
    HandshakeError,
    InvalidRequestError,
    MalformedMessageError,
    ModelFileError,
    OutOfMemoryError,
    PromptTooLongError,
    RequestFailedError,
    UnsupportedModelError,
    UnsupportedParameterError,
)
from ipc.sampling_params import RequestOutputKind, SamplingParams
from ipc.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "AddressError",
    "AsyncLLM",
    "CallFailedError",
    "CompletionOutput",
    "ConfigError",
    "DeadlineExceededError",
    "EngineCoreError",
    "EngineDeadError",
    "EngineStartError",
    "HandshakeError",
    "InvalidRequestError",
    "MalformedMessageError",
    "ModelFileError",
    "OutOfMemoryError",
    "PromptTooLongError",
    "RequestFailedError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UnsupportedModelError",
    "UnsupportedParameterError",
]
