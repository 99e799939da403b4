"""The public names: `from engine_core import LLM, AsyncLLM, SamplingParams`."""

from frontend.async_llm import AsyncLLM
from frontend.engine_args import AsyncEngineArgs, EngineArgs
from frontend.llm import LLM
from frontend.llm_engine import LLMEngine, ModelDescription
from frontend.lora import LoRARequest
from frontend.results.beam_search import BeamSearchOutput, BeamSearchSequence
from frontend.results.outputs import CompletionOutput, RequestMetrics, RequestOutput
from frontend.results.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from frontend.text.prompt_forms import TextPrompt, TokensPrompt
from frontend.text.tokenizer import Tokenizer
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
    ReceiptError,
    RequestFailedError,
    UnsupportedModelError,
    UnsupportedParameterError,
)
from ipc.params.beam_search import BeamSearchParams
from ipc.params.pooling_params import PoolingParams
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.records.receipt import Receipt
from ipc.wire.pin_messages import Pin, PinAnswer, PinList

__all__ = [
    "LLM",
    "AddressError",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CallFailedError",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "DeadlineExceededError",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineCoreError",
    "EngineDeadError",
    "EngineStartError",
    "HandshakeError",
    "InvalidRequestError",
    "LLMEngine",
    "LoRARequest",
    "MalformedMessageError",
    "ModelDescription",
    "ModelFileError",
    "OutOfMemoryError",
    "Pin",
    "PinAnswer",
    "PinList",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptTooLongError",
    "Receipt",
    "ReceiptError",
    "RequestFailedError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "Tokenizer",
    "TokensPrompt",
    "UnsupportedModelError",
    "UnsupportedParameterError",
]
