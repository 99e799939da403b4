"""The structs of recurrent layers, output gates and inputs per layer as ctypes classes; see kernels/cpu/structs.py."""

from kernels.cpu.c_struct import FLOAT, INT32, INT64, POINTER, CStruct, fields
from kernels.cpu.structs import EmbeddingArguments, GemmArguments, NormWeights


class OutputGateArguments(CStruct):
    """Arguments of output_gate() (output_gate.h)."""

    c_name = "OutputGate"
    _fields_ = (
        *fields("x gates", POINTER),
        *fields("num_rows width", INT64),
        *fields("dtype group", INT32),
    )


class RecurrenceArguments(CStruct):
    """Constants of a layer with a recurrent state (recurrence.h)."""

    c_name = "Recurrence"
    _fields_ = (
        *fields("kernel bias rates step_biases skips norm", POINTER),
        *fields("channels width state_offset", INT64),
        *fields("kind dtype taps num_heads num_groups takes_turns key_dim value_dim", INT32),
        *fields("eps least_step most_step most_beta", FLOAT),
    )


class RecurrenceStepArguments(CStruct):
    """Arguments of recurrence() (recurrence.h)."""

    c_name = "RecurrenceStep"
    # "in" is a Python keyword: such fields are set by position or setattr().
    _fields_ = (
        *fields("layer in out mixed states rows firsts positions saves", POINTER),
        *fields("state_stride mixed_stride num_requests", INT64),
        ("gated", POINTER),
        ("gated_stride", INT64),
    )


class PerLayerInputsArguments(CStruct):
    """What all layers with inputs of their own share (per_layer.h)."""

    c_name = "PerLayerInputs"
    _fields_ = (
        ("table", EmbeddingArguments),
        ("projection", GemmArguments),
        ("norm", POINTER),
        ("width", INT64),
        *fields("num_layers dtype", INT32),
        ("eps", FLOAT),
        ("first_layer", INT32),
        *fields("given_id row_layers", INT64),
    )


class PerLayerArguments(CStruct):
    """The products and the norm of a layer's own inputs (per_layer.h)."""

    c_name = "PerLayer"
    _fields_ = (*fields("gate out", GemmArguments), ("norm", NormWeights))


class PerLayerStepArguments(CStruct):
    """Arguments of per_layer() (per_layer.h)."""

    c_name = "PerLayerStep"
    _fields_ = (*fields("inputs ids tokens projected x", POINTER), *fields("num_rows layer", INT64))
