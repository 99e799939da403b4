"""The C kernels' structs as ctypes classes; kernels/cpu/library.py compares them with the loaded library.

Each class mirrors one struct in kernels/cpu/c/, field by field; kernels/cpu/c/layers/struct_fields.c exports the C
side. kernels/cpu/latent_structs.py has those of latent attention.
"""

from kernels.cpu.c_struct import FLOAT as _FLOAT
from kernels.cpu.c_struct import INT32 as _INT32
from kernels.cpu.c_struct import INT64 as _INT64
from kernels.cpu.c_struct import POINTER as _POINTER
from kernels.cpu.c_struct import CStruct
from kernels.cpu.c_struct import fields as _fields


class CacheShape(CStruct):
    """Shape and dtype of the KV cache (cache_shape.h)."""

    c_name = "CacheShape"
    _fields_ = (
        *_fields("num_kv_heads head_dim block_size dtype is_quantized token_bytes num_sides value_dim", _INT32),
        ("block_bytes", _INT64),
    )


class BlockTables(CStruct):
    """Block tables [requests, width] and their block size (shared_tiles.h)."""

    c_name = "BlockTables"
    _fields_ = (("blocks", _POINTER), *_fields("width block_size", _INT32))


class AttentionItem(CStruct):
    """Work of one thread: some rows of one KV head against a part of their context (attention.h)."""

    c_name = "AttentionItem"
    _fields_ = (*_fields("request kv_head token num_tokens position begin end partial members sees_end", _INT32),)


class AttentionMember(CStruct):
    """A token of an item that several requests share (attention.h)."""

    c_name = "AttentionMember"
    _fields_ = (*_fields("token partial", _INT32),)


class AttentionMerge(CStruct):
    """Partial results that belong to the same rows (attention.h)."""

    c_name = "AttentionMerge"
    _fields_ = (*_fields("kv_head token num_tokens partial num_partials", _INT32),)


class TileUser(CStruct):
    """A request with one token that sees a whole tile (shared_tiles.h)."""

    c_name = "TileUser"
    _fields_ = (*_fields("request token begin last_block partial head_stride first next count", _INT32),)


class AttentionArguments(CStruct):
    """Arguments of attention() (attention.h)."""

    c_name = "Attention"
    _fields_ = (
        *_fields("q layer out block_tables items members merges partials scratch", _POINTER),
        ("shape", CacheShape),
        *_fields("num_heads table_width num_items num_merges max_item_tokens window ahead", _INT32),
        *_fields("scale cap_factor", _FLOAT),
        ("sinks", _POINTER),
    )


class PlanArguments(CStruct):
    """Arguments and results of attention_plan() (attention_plan.h)."""

    c_name = "AttentionPlan"
    _anonymous_ = ("tables",)
    _fields_ = (
        *_fields("num_tokens context_lens wholes items merges members tile_users places", _POINTER),
        *_fields("wanted_items wanted_merges", _POINTER),
        ("tables", BlockTables),
        *_fields("num_requests num_wholes max_items", _INT64),
        *_fields("num_kv_heads group window ahead max_item_tokens max_split_rows max_members", _INT32),
        *_fields("num_items num_merges num_members num_partials num_tile_users num_rows longest", _INT64),
        *_fields("num_wanted_items num_wanted_merges", _INT64),
    )
    num_rows: int
    longest: int
    num_partials: int
    max_item_tokens: int


class GemmArguments(CStruct):
    """Arguments of gemm() (gemm.h)."""

    c_name = "Gemm"
    _fields_ = (
        *_fields("x weights bias y", _POINTER),
        *_fields("num_rows num_columns depth x_stride y_stride", _INT64),
        *_fields("dtype y_dtype gate streams packing activation", _INT32),
        *_fields("next quantized", _POINTER),
        ("quantized_stride", _INT64),
        *_fields("lora constants second", _POINTER),
    )


class SecondFormArguments(CStruct):
    """Weights in another form (gemm.h)."""

    c_name = "SecondForm"
    _fields_ = (("weights", _POINTER), *_fields("packing reserved", _INT32))


class RoutingArguments(CStruct):
    """How a routed MLP chooses experts (routing.h)."""

    c_name = "Routing"
    _fields_ = (
        ("correction", _POINTER),
        ("scaling", _FLOAT),
        *_fields("num_experts num_chosen is_sigmoid normalises num_groups num_chosen_groups best_of_group", _INT32),
        ("added_to_sum", _FLOAT),
        ("scales_inputs", _INT32),
        ("scales", _POINTER),
    )


class ExpertsArguments(CStruct):
    """Weights and constants of a routed MLP (experts.h)."""

    c_name = "Experts"
    _fields_ = (
        ("router", GemmArguments),
        *_fields("gate_up down shared", _POINTER),
        ("routing", RoutingArguments),
        *_fields("has_shared_gate width", _INT32),
    )


class ExpertsRoom(CStruct):
    """Memory in which routed MLPs are computed (experts.h)."""

    c_name = "ExpertsRoom"
    _fields_ = (
        *_fields("logits keys chosen weights places starts active gathered gated results", _POINTER),
        *_fields("shared_gated shared_results quantized", _POINTER),
        ("quantized_stride", _INT64),
    )


class ExpertsStepArguments(CStruct):
    """Arguments of experts() (experts.h)."""

    c_name = "ExpertsStep"
    _fields_ = (*_fields("experts room x y", _POINTER), ("num_rows", _INT64), *_fields("router_x group", _POINTER))


class PackArguments(CStruct):
    """Arguments of gemm_pack() and of the functions of compact.h (gemm.h)."""

    c_name = "GemmPack"
    _fields_ = (
        *_fields("source packed", _POINTER),
        *_fields("num_columns depth source_stride", _INT64),
        *_fields("source_dtype dtype is_gated is_packed", _INT32),
        ("plan", _POINTER),
    )


class QuantizedPartArguments(CStruct):
    """Rows of a matrix that are stored in the same way (quantized.h)."""

    c_name = "QuantizedPart"
    _fields_ = (("rows", _POINTER), *_fields("num_rows row_bytes", _INT64), *_fields("type reserved", _INT32))


class QuantizeArguments(CStruct):
    """Arguments of gemm_quantize() (quantized.h)."""

    c_name = "Quantize"
    _fields_ = (
        *_fields("parts packed must_be_whole", _POINTER),
        *_fields("num_parts num_columns depth", _INT64),
        *_fields("is_gated in_8_bits", _INT32),
    )


class NormWeights(CStruct):
    """The constants of one normalisation (norm.h)."""

    c_name = "NormWeights"
    _fields_ = (*_fields("weight bias", _POINTER), *_fields("is_centred replaces precedes reserved", _INT32))


class BesideArguments(CStruct):
    """The norms of a layer whose experts run alongside a dense MLP (decoder.h)."""

    c_name = "ExpertsBeside"
    _fields_ = (*_fields("input_norm router_norm dense_norm output_norm", NormWeights),)


class RowHeads(CStruct):
    """What a row of qkv has, if it has more heads than are used (rope.h)."""

    c_name = "RowHeads"
    _fields_ = (*_fields("heads kv_heads first_head first_kv_head", _INT32),)


class Place(CStruct):
    """Where a rank's columns are in a result of a group (group.h)."""

    c_name = "Place"
    _fields_ = (*_fields("first width", _INT64), ("bounds", _POINTER))


class LayerArguments(CStruct):
    """One layer's weights and constants (decoder.h)."""

    c_name = "DecoderLayer"
    _fields_ = (
        *_fields("qkv o gate_up down", GemmArguments),
        *_fields("input_norm mlp_norm attention_out_norm mlp_out_norm", NormWeights),
        ("norms", _POINTER),
        *_fields("scale cap_factor", _FLOAT),
        ("kind", _INT32),
        ("tap", _INT64),
        *_fields("norms_of_rows centred_norms norms_after values", _INT32),
        ("row", RowHeads),
        ("layer_scale", _FLOAT),
        ("lacks_mlp", _INT32),
        *_fields("experts beside per_layer sinks latent recurrence output_gate", _POINTER),
        *_fields("attended gated", Place),
    )


class BlockArguments(CStruct):
    """Arguments of make_blocks() (make_blocks.h)."""

    c_name = "MakeBlocks"
    _fields_ = (*_fields("numbers blocks", _POINTER), ("num_blocks", _INT64), *_fields("dtype reserved", _INT32))


class GroupStreams(CStruct):
    """The streams between the ranks of a group (group.h)."""

    c_name = "GroupStreams"
    _fields_ = (*_fields("fds room", _POINTER), ("room_bytes", _INT64), *_fields("rank size", _INT32))


class Ranks(CStruct):
    """The ranks of a group (group.h)."""

    c_name = "Ranks"
    _fields_ = (*_fields("state streams", _POINTER), *_fields("rank size", _INT32))


class GatherArguments(CStruct):
    """Arguments of group_gather_rows() (group.h)."""

    c_name = "GroupGather"
    _fields_ = (("ranks", Ranks), ("place", Place), ("y", _POINTER), *_fields("num_rows element", _INT64))


class GroupArguments(CStruct):
    """The group of ranks that a decoder belongs to (decoder.h)."""

    c_name = "DecoderGroup"
    _fields_ = (
        ("ranks", Ranks),
        *_fields("hidden vocabulary expert_gated shared_gated", Place),
        *_fields("num_words num_turns norm_size", _INT64),
    )


class DecoderArguments(CStruct):
    """A model's weights and constants (decoder.h)."""

    c_name = "Decoder"
    _fields_ = (
        ("layers", _POINTER),
        ("head", GemmArguments),
        ("embeddings", _POINTER),
        ("norm", NormWeights),
        ("hidden_size", _INT64),
        *_fields("num_layers num_heads dtype", _INT32),
        *_fields("eps embedding_scale", _FLOAT),
        ("embeddings_packing", _INT32),
        *_fields("kinds places", _POINTER),
        ("num_words", _INT64),
        ("group", _POINTER),
        *_fields("residual_multiplier logits_cap", _FLOAT),
        ("per_layer", _POINTER),
        ("num_tail", _INT64),
    )


class KindArguments(CStruct):
    """A step's rotary tables, plan, slots and attention memory for one kind of layer (decoder.h)."""

    c_name = "DecoderKind"
    _fields_ = (*_fields("cos sin query_cos query_sin plan slots", _POINTER), ("attention", AttentionArguments))


class StepArguments(CStruct):
    """Arguments of decoder_step() and decoder_logits() (decoder.h)."""

    c_name = "DecoderStep"
    _fields_ = (
        *_fields("decoder kinds cache token_ids positions logits_rows", _POINTER),
        *_fields("hidden x qkv q attended gated queries values embedded own_attended", _POINTER),
        *_fields("recurred added normed last_hidden logits largest taps quantized", _POINTER),
        ("quantized_stride", _INT64),
        ("experts_room", _POINTER),
        *_fields("num_tokens num_logits num_taps is_narrow", _INT64),
        *_fields("adapters picked lowered", _POINTER),
        ("lowered_stride", _INT64),
        *_fields("given rotations deep", _POINTER),
        ("num_deep", _INT64),
        *_fields("words embeddings", _POINTER),
        *_fields("output_gates mixed states state_rows firsts saves", _POINTER),
        *_fields("state_stride mixed_stride num_requests", _INT64),
        *_fields("projected own_inputs router_x beside tail_q tail_attended tail_picked", _POINTER),
    )


class LoraStrip(CStruct):
    """A strip of an adapter's B (lora.h)."""

    c_name = "LoraStrip"
    _fields_ = (("offset", _INT64), *_fields("first rank", _INT32))


class LoraProduct(CStruct):
    """What an adapter adds to one product (lora.h)."""

    c_name = "LoraProduct"
    _fields_ = (*_fields("a b strips scales", _POINTER), ("rank", _INT64))


class LoraArguments(CStruct):
    """The adapters of a product's rows (lora.h)."""

    c_name = "Lora"
    _fields_ = (*_fields("adapters lowered", _POINTER), *_fields("stride product", _INT64))


class LowerArguments(CStruct):
    """Arguments of lora_lower() (lora.h)."""

    c_name = "LoraLower"
    _fields_ = (
        *_fields("lora x", _POINTER),
        *_fields("num_rows depth x_stride", _INT64),
        *_fields("dtype by_rows", _INT32),
    )


class DequantizeArguments(CStruct):
    """Arguments of dequantize() (dequantize.h)."""

    c_name = "Dequantize"
    _fields_ = (*_fields("blocks out", _POINTER), ("num_blocks", _INT64), *_fields("type dtype", _INT32))


class EmbeddingArguments(CStruct):
    """Arguments of embedding() (embedding.h)."""

    c_name = "Embedding"
    _fields_ = (
        *_fields("ids table out", _POINTER),
        *_fields("num_rows width", _INT64),
        ("dtype", _INT32),
        ("scale", _FLOAT),
        ("packing", _INT32),
        *_fields("kinds places positions", _POINTER),
        ("num_words", _INT64),
        ("given", _POINTER),
    )


class NormArguments(CStruct):
    """Arguments of norm() (norm.h)."""

    c_name = "Norm"
    _fields_ = (
        *_fields("hidden x", _POINTER),
        ("norm", NormWeights),
        ("out", _POINTER),
        *_fields("num_rows width", _INT64),
        *_fields("x_dtype out_dtype", _INT32),
        *_fields("eps multiplier scale", _FLOAT),
        ("reserved", _INT32),
    )


class RopeArguments(CStruct):
    """Arguments of rope_kv_write() (rope.h)."""

    c_name = "RopeKvWrite"
    _fields_ = (
        *_fields("qkv cos sin query_cos query_sin positions norms slots q layer", _POINTER),
        ("shape", CacheShape),
        *_fields("num_heads num_tokens", _INT32),
        ("eps", _FLOAT),
        *_fields("norms_of_rows is_centred is_after values", _INT32),
        ("row", RowHeads),
        ("tokens", _POINTER),
    )


class SamplingArguments(CStruct):
    """Arguments of sample() (sampling.h)."""

    c_name = "Sampling"
    _fields_ = (
        *_fields("logits temperature top_k top_p min_p seed position choice largest tokens scratch", _POINTER),
        *_fields("num_rows vocab_size", _INT64),
    )


class SoftCapArguments(CStruct):
    """Arguments of soft_cap() (soft_cap.h)."""

    c_name = "SoftCap"
    _fields_ = (("numbers", _POINTER), *_fields("num_rows width", _INT64), ("cap", _FLOAT))


#: Every struct of this file.
