"""Every error a user of the engine can meet.

EngineCoreError
├── ConfigError (ValueError)            an engine option is unknown or has a bad value
├── InvalidRequestError (ValueError)    a prompt or a sampling parameter is wrong
│   └── UnsupportedParameterError       the parameter is known but this version cannot do it
├── RequestFailedError                  the engine accepted the request and could not finish it
│   └── DeadlineExceededError           ... before its deadline
├── ModelFileError                      a model file is missing, truncated or corrupt
│   └── UnsupportedModelError           the file is sound but names an architecture or format we do not run
├── OutOfMemoryError                    the model or the KV cache does not fit the memory there is
├── EngineStartError                    the engine process did not come up
├── EngineDeadError                     the engine process is gone; requests in flight are lost
├── HandshakeError                      the engine refused this client (version, limits)
├── CallFailedError                     a typed call (statistics, tokenizer, ...) was answered with an error
├── CaptureFileError                    a capture is damaged, or is no capture that this version can read
├── AddressError (ValueError)           an address cannot be used: malformed, too long, or in use by a live engine
└── MalformedMessageError               bytes on the wire are not a message of this protocol
"""


class EngineCoreError(Exception):
    """Root of the tree above."""


class ConfigError(EngineCoreError, ValueError):
    pass


class InvalidRequestError(EngineCoreError, ValueError):
    pass


class UnsupportedParameterError(InvalidRequestError):
    pass


class RequestFailedError(EngineCoreError):
    pass


class DeadlineExceededError(RequestFailedError):
    pass


class ModelFileError(EngineCoreError):
    pass


class UnsupportedModelError(ModelFileError):
    pass


class OutOfMemoryError(EngineCoreError):
    pass


class EngineStartError(EngineCoreError):
    pass


class EngineDeadError(EngineCoreError):
    pass


class HandshakeError(EngineCoreError):
    pass


class CallFailedError(EngineCoreError):
    pass


class CaptureFileError(EngineCoreError):
    pass


class AddressError(EngineCoreError, ValueError):
    pass


class MalformedMessageError(EngineCoreError):
    pass
