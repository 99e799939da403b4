"""The tree of errors that users of the engine can meet.

EngineCoreError
├── ConfigError (ValueError)            an engine option is unknown or has a bad value
├── InvalidRequestError (ValueError)    a prompt or a sampling parameter is wrong
│   ├── UnsupportedParameterError       this version does not support the parameter
│   └── PromptTooLongError              prompt and output do not fit the model's context
├── RequestFailedError                  the engine accepted the request and could not finish it
│   └── DeadlineExceededError           the request's deadline came first
├── ModelFileError                      a model file is missing, truncated or corrupt
│   └── UnsupportedModelError           the file is sound but its architecture or format is not supported
├── OutOfMemoryError                    the model or the KV cache does not fit the available memory
├── EngineStartError                    the engine process did not start
├── EngineDeadError                     the engine process is gone; requests in flight are lost
├── HandshakeError                      the engine refused this client (version, limits)
├── CallFailedError                     a typed call (statistics, tokenizer, ...) was answered with an error
├── CaptureFileError                    a capture is damaged, or is no capture that this version can read
├── ReceiptError                        a receipt is malformed, or its signature is not that of its key
├── AddressError (ValueError)           an address cannot be used: malformed, too long, or in use by a live engine
└── MalformedMessageError               received bytes are not a message of this protocol
"""

from collections.abc import Sequence


class EngineCoreError(Exception):
    """Root of the tree above.

    outputs: set on an error of LLM.generate() or chat() after the start: the outputs of finished prompts, in the
    prompts' order; None for an unfinished prompt.
    """

    outputs: Sequence[object | None] = ()


class ConfigError(EngineCoreError, ValueError):
    """An engine option is unknown or has a bad value."""


class InvalidRequestError(EngineCoreError, ValueError):
    """A prompt or a sampling parameter is wrong."""


class UnsupportedParameterError(InvalidRequestError):
    """This version does not support the parameter."""


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for an output in the model's context.

    excess: the prompt's length and the allowed length, without the context's length; "" = only the text has them.
    """

    excess = ""


class RequestFailedError(EngineCoreError):
    """The engine accepted the request and could not finish it, or refused it because a bound is reached.

    code: name of the engine's ErrorCode; "" if the client itself failed the request. retry_after_ms: milliseconds after
    which the same request may be accepted; 0 = it did not fail for lack of room.
    """

    code = ""
    retry_after_ms = 0


class DeadlineExceededError(RequestFailedError):
    """The request's deadline passed before it ended."""


class ModelFileError(EngineCoreError):
    """A model file is missing, truncated or corrupt."""


class UnsupportedModelError(ModelFileError):
    """The file is sound but its architecture or format is not supported."""


class OutOfMemoryError(EngineCoreError):
    """The model or the KV cache does not fit the available memory."""


class EngineStartError(EngineCoreError):
    """The engine process did not start."""


class EngineDeadError(EngineCoreError):
    """The engine process is gone; requests in flight are lost."""


class HandshakeError(EngineCoreError):
    """The engine refused this client (version, limits)."""


class CallFailedError(EngineCoreError):
    """A typed call was answered with an error.

    code: name of the engine's error code; "" = the call was not answered.
    """

    code = ""


class CaptureFileError(EngineCoreError):
    """A capture is damaged, or is not one that this version can read."""


class ReceiptError(EngineCoreError):
    """A receipt is malformed or too large, or its signature is not that of its key, or of a trusted one."""


class AddressError(EngineCoreError, ValueError):
    """An address is malformed, too long, or in use by a live engine."""


class MalformedMessageError(EngineCoreError):
    """Received bytes are not a message of this protocol."""
