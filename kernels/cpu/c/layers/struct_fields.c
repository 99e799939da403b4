/* The layout of every struct that Python fills. kernels/cpu/structs.py compares it with its own classes when it loads
 * these kernels. A field that is missing on one side, or that has another offset, is an error there.
 */
#include "layers/decoder.h"
#include "blocks/dequantize.h"
#include "layers/embedding.h"
#include "blocks/make_blocks.h"
#include "layers/norm.h"
#include "layers/output_gate.h"
#include "products/quantized.h"
#include "layers/recurrence.h"
#include "layers/rope.h"
#include "sampling/sampling.h"
#include "layers/soft_cap.h"

typedef struct {
    const char *type, *field; /* field "": the whole struct */
    int32_t offset, size;     /* bytes */
    int32_t kind;             /* 'i': an integer, 'f': a float, 'o': other */
} StructField;

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define KIND(value) _Generic((value), int32_t: 'i', int64_t: 'i', float: 'f', default: 'o')
#define FIELD(name) {TEXT(STRUCT), #name, offsetof(STRUCT, name), sizeof(((STRUCT *)0)->name), KIND(((STRUCT *)0)->name)},
#define WHOLE {TEXT(STRUCT), "", 0, sizeof(STRUCT), 'o'},

EXPORT const StructField struct_fields[] = {
#define STRUCT CacheShape
    WHOLE FIELD(num_kv_heads) FIELD(head_dim) FIELD(block_size) FIELD(dtype) FIELD(is_quantized) FIELD(token_bytes)
    FIELD(num_sides) FIELD(value_dim) FIELD(block_bytes)
#undef STRUCT
#define STRUCT RowHeads
    WHOLE FIELD(heads) FIELD(kv_heads) FIELD(first_head) FIELD(first_kv_head)
#undef STRUCT
#define STRUCT BlockTables
    WHOLE FIELD(blocks) FIELD(width) FIELD(block_size)
#undef STRUCT
#define STRUCT AttentionItem
    WHOLE FIELD(request) FIELD(kv_head) FIELD(token) FIELD(num_tokens) FIELD(position) FIELD(begin) FIELD(end)
    FIELD(partial) FIELD(members) FIELD(sees_end)
#undef STRUCT
#define STRUCT AttentionMember
    WHOLE FIELD(token) FIELD(partial)
#undef STRUCT
#define STRUCT AttentionMerge
    WHOLE FIELD(kv_head) FIELD(token) FIELD(num_tokens) FIELD(partial) FIELD(num_partials)
#undef STRUCT
#define STRUCT TileUser
    WHOLE FIELD(request) FIELD(token) FIELD(begin) FIELD(last_block) FIELD(partial) FIELD(head_stride) FIELD(first)
    FIELD(next) FIELD(count)
#undef STRUCT
#define STRUCT Attention
    WHOLE FIELD(q) FIELD(layer) FIELD(out) FIELD(block_tables) FIELD(items) FIELD(members) FIELD(merges) FIELD(partials)
    FIELD(scratch) FIELD(shape) FIELD(num_heads) FIELD(table_width) FIELD(num_items) FIELD(num_merges)
    FIELD(max_item_tokens) FIELD(window) FIELD(ahead) FIELD(scale) FIELD(cap_factor) FIELD(sinks)
#undef STRUCT
#define STRUCT AttentionPlan
    WHOLE FIELD(num_tokens) FIELD(context_lens) FIELD(wholes) FIELD(items) FIELD(merges) FIELD(members) FIELD(tile_users) FIELD(places)
    FIELD(wanted_items) FIELD(wanted_merges) FIELD(tables) FIELD(num_requests) FIELD(num_wholes) FIELD(max_items) FIELD(num_kv_heads)
    FIELD(group) FIELD(window) FIELD(ahead) FIELD(max_item_tokens) FIELD(max_split_rows) FIELD(max_members)
    FIELD(num_items) FIELD(num_merges) FIELD(num_members) FIELD(num_partials) FIELD(num_tile_users) FIELD(num_rows) FIELD(longest)
    FIELD(num_wanted_items) FIELD(num_wanted_merges)
#undef STRUCT
#define STRUCT Latent
    WHOLE FIELD(query) FIELD(keys) FIELD(values) FIELD(query_norm) FIELD(latent_norm) FIELD(num_heads) FIELD(query_dim)
    FIELD(latent_dim) FIELD(plain_dim) FIELD(rotated_dim) FIELD(value_dim) FIELD(eps) FIELD(reserved)
#undef STRUCT
#define STRUCT LatentStep
    WHOLE FIELD(latent) FIELD(qkv) FIELD(queries) FIELD(cos) FIELD(sin) FIELD(query_cos) FIELD(query_sin)
    FIELD(positions) FIELD(slots) FIELD(q) FIELD(layer) FIELD(shape) FIELD(num_rows) FIELD(quantized)
    FIELD(quantized_stride)
#undef STRUCT
#define STRUCT LatentValues
    WHOLE FIELD(latent) FIELD(attended) FIELD(values) FIELD(num_rows)
#undef STRUCT
#define STRUCT Experts
    WHOLE FIELD(router) FIELD(gate_up) FIELD(down) FIELD(shared) FIELD(routing) FIELD(has_shared_gate) FIELD(width)
#undef STRUCT
#define STRUCT Routing
    WHOLE FIELD(correction) FIELD(scaling) FIELD(num_experts) FIELD(num_chosen) FIELD(is_sigmoid) FIELD(normalises)
    FIELD(num_groups) FIELD(num_chosen_groups) FIELD(best_of_group) FIELD(added_to_sum) FIELD(scales_inputs) FIELD(scales)
#undef STRUCT
#define STRUCT ExpertsRoom
    WHOLE FIELD(logits) FIELD(chosen) FIELD(weights) FIELD(places) FIELD(starts) FIELD(active) FIELD(gathered)
    FIELD(gated) FIELD(results) FIELD(quantized) FIELD(quantized_stride) FIELD(keys) FIELD(shared_gated)
    FIELD(shared_results)
#undef STRUCT
#define STRUCT ExpertsStep
    WHOLE FIELD(experts) FIELD(room) FIELD(x) FIELD(y) FIELD(num_rows) FIELD(router_x) FIELD(group)
#undef STRUCT
#define STRUCT Gemm
    WHOLE FIELD(x) FIELD(weights) FIELD(bias) FIELD(y) FIELD(num_rows) FIELD(num_columns) FIELD(depth) FIELD(x_stride)
    FIELD(y_stride) FIELD(dtype) FIELD(y_dtype) FIELD(gate) FIELD(streams) FIELD(packing) FIELD(activation) FIELD(next)
    FIELD(quantized) FIELD(quantized_stride) FIELD(lora) FIELD(constants) FIELD(second)
#undef STRUCT
#define STRUCT SecondForm
    WHOLE FIELD(weights) FIELD(packing) FIELD(reserved)
#undef STRUCT
#define STRUCT GemmPack
    WHOLE FIELD(source) FIELD(packed) FIELD(num_columns) FIELD(depth) FIELD(source_stride) FIELD(source_dtype)
    FIELD(dtype) FIELD(is_gated) FIELD(is_packed) FIELD(plan)
#undef STRUCT
#define STRUCT QuantizedPart
    WHOLE FIELD(rows) FIELD(num_rows) FIELD(row_bytes) FIELD(type) FIELD(reserved)
#undef STRUCT
#define STRUCT Quantize
    WHOLE FIELD(parts) FIELD(packed) FIELD(must_be_whole) FIELD(num_parts) FIELD(num_columns) FIELD(depth)
    FIELD(is_gated) FIELD(in_8_bits)
#undef STRUCT
#define STRUCT NormWeights
    WHOLE FIELD(weight) FIELD(bias) FIELD(is_centred) FIELD(replaces) FIELD(precedes) FIELD(reserved)
#undef STRUCT
#define STRUCT DecoderLayer
    WHOLE FIELD(qkv) FIELD(o) FIELD(gate_up) FIELD(down) FIELD(input_norm) FIELD(mlp_norm) FIELD(attention_out_norm)
    FIELD(mlp_out_norm) FIELD(norms) FIELD(scale) FIELD(cap_factor) FIELD(kind) FIELD(tap) FIELD(norms_of_rows)
    FIELD(centred_norms) FIELD(norms_after) FIELD(values) FIELD(row) FIELD(layer_scale) FIELD(lacks_mlp) FIELD(beside) FIELD(per_layer) FIELD(experts) FIELD(sinks) FIELD(latent) FIELD(recurrence) FIELD(output_gate)
    FIELD(attended) FIELD(gated)
#undef STRUCT
#define STRUCT Place
    WHOLE FIELD(first) FIELD(width) FIELD(bounds)
#undef STRUCT
#define STRUCT GroupStreams
    WHOLE FIELD(fds) FIELD(room) FIELD(room_bytes) FIELD(rank) FIELD(size)
#undef STRUCT
#define STRUCT Ranks
    WHOLE FIELD(state) FIELD(streams) FIELD(rank) FIELD(size)
#undef STRUCT
#define STRUCT GroupGather
    WHOLE FIELD(ranks) FIELD(place) FIELD(y) FIELD(num_rows) FIELD(element)
#undef STRUCT
#define STRUCT DecoderGroup
    WHOLE FIELD(ranks) FIELD(hidden) FIELD(vocabulary) FIELD(expert_gated)
    FIELD(shared_gated) FIELD(num_words) FIELD(num_turns) FIELD(norm_size)
#undef STRUCT
#define STRUCT Decoder
    WHOLE FIELD(layers) FIELD(head) FIELD(embeddings) FIELD(norm) FIELD(hidden_size) FIELD(num_layers) FIELD(num_heads)
    FIELD(dtype) FIELD(eps) FIELD(embedding_scale) FIELD(embeddings_packing) FIELD(kinds) FIELD(places) FIELD(num_words)
    FIELD(group) FIELD(residual_multiplier) FIELD(logits_cap) FIELD(per_layer) FIELD(num_tail)
#undef STRUCT
#define STRUCT DecoderKind
    WHOLE FIELD(cos) FIELD(sin) FIELD(query_cos) FIELD(query_sin) FIELD(plan) FIELD(slots) FIELD(attention)
#undef STRUCT
#define STRUCT DecoderStep
    WHOLE FIELD(decoder) FIELD(kinds) FIELD(cache) FIELD(token_ids) FIELD(positions) FIELD(logits_rows)
    FIELD(hidden) FIELD(x) FIELD(qkv) FIELD(q) FIELD(attended) FIELD(gated) FIELD(queries)
    FIELD(values) FIELD(embedded) FIELD(own_attended) FIELD(recurred) FIELD(added)
    FIELD(normed) FIELD(last_hidden) FIELD(logits) FIELD(largest) FIELD(taps) FIELD(quantized) FIELD(quantized_stride)
    FIELD(experts_room) FIELD(num_tokens) FIELD(num_logits) FIELD(num_taps) FIELD(is_narrow)
    FIELD(adapters) FIELD(picked) FIELD(lowered) FIELD(lowered_stride) FIELD(given) FIELD(rotations) FIELD(deep) FIELD(num_deep)
    FIELD(words) FIELD(embeddings)
    FIELD(output_gates) FIELD(mixed)
    FIELD(states) FIELD(state_rows) FIELD(firsts) FIELD(saves) FIELD(state_stride) FIELD(mixed_stride) FIELD(num_requests)
    FIELD(projected) FIELD(own_inputs) FIELD(router_x) FIELD(beside)
    FIELD(tail_q) FIELD(tail_attended) FIELD(tail_picked)
#undef STRUCT
#define STRUCT ExpertsBeside
    WHOLE FIELD(input_norm) FIELD(router_norm) FIELD(dense_norm) FIELD(output_norm)
#undef STRUCT
#define STRUCT PerLayerInputs
    WHOLE FIELD(table) FIELD(projection) FIELD(norm) FIELD(width) FIELD(num_layers) FIELD(dtype) FIELD(eps) FIELD(first_layer)
    FIELD(given_id) FIELD(row_layers)
#undef STRUCT
#define STRUCT PerLayer
    WHOLE FIELD(gate) FIELD(out) FIELD(norm)
#undef STRUCT
#define STRUCT PerLayerStep
    WHOLE FIELD(inputs) FIELD(ids) FIELD(tokens) FIELD(projected) FIELD(x) FIELD(num_rows) FIELD(layer)
#undef STRUCT
#define STRUCT Dequantize
    WHOLE FIELD(blocks) FIELD(out) FIELD(num_blocks) FIELD(type) FIELD(dtype)
#undef STRUCT
#define STRUCT Embedding
    WHOLE FIELD(ids) FIELD(table) FIELD(out) FIELD(num_rows) FIELD(width) FIELD(dtype) FIELD(scale) FIELD(packing)
    FIELD(kinds) FIELD(places) FIELD(positions) FIELD(num_words) FIELD(given)
#undef STRUCT
#define STRUCT LoraStrip
    WHOLE FIELD(offset) FIELD(first) FIELD(rank)
#undef STRUCT
#define STRUCT LoraProduct
    WHOLE FIELD(a) FIELD(b) FIELD(strips) FIELD(scales) FIELD(rank)
#undef STRUCT
#define STRUCT Lora
    WHOLE FIELD(adapters) FIELD(lowered) FIELD(stride) FIELD(product)
#undef STRUCT
#define STRUCT LoraLower
    WHOLE FIELD(lora) FIELD(x) FIELD(num_rows) FIELD(depth) FIELD(x_stride) FIELD(dtype) FIELD(by_rows)
#undef STRUCT
#define STRUCT MakeBlocks
    WHOLE FIELD(numbers) FIELD(blocks) FIELD(num_blocks) FIELD(dtype) FIELD(reserved)
#undef STRUCT
#define STRUCT Norm
    WHOLE FIELD(hidden) FIELD(x) FIELD(norm) FIELD(out) FIELD(num_rows) FIELD(width) FIELD(x_dtype) FIELD(out_dtype)
    FIELD(eps) FIELD(multiplier) FIELD(scale) FIELD(reserved)
#undef STRUCT
#define STRUCT OutputGate
    WHOLE FIELD(x) FIELD(gates) FIELD(num_rows) FIELD(width) FIELD(dtype) FIELD(group)
#undef STRUCT
#define STRUCT Recurrence
    WHOLE FIELD(kernel) FIELD(bias) FIELD(rates) FIELD(step_biases) FIELD(skips) FIELD(norm) FIELD(channels) FIELD(width)
    FIELD(state_offset) FIELD(kind) FIELD(dtype) FIELD(taps) FIELD(num_heads) FIELD(num_groups) FIELD(takes_turns) FIELD(key_dim)
    FIELD(value_dim) FIELD(eps) FIELD(least_step) FIELD(most_step) FIELD(most_beta)
#undef STRUCT
#define STRUCT RecurrenceStep
    WHOLE FIELD(layer) FIELD(in) FIELD(out) FIELD(mixed) FIELD(states) FIELD(rows) FIELD(firsts) FIELD(positions)
    FIELD(saves) FIELD(state_stride) FIELD(mixed_stride) FIELD(num_requests) FIELD(gated) FIELD(gated_stride)
#undef STRUCT
#define STRUCT RopeKvWrite
    WHOLE FIELD(qkv) FIELD(cos) FIELD(sin) FIELD(query_cos) FIELD(query_sin) FIELD(positions) FIELD(norms) FIELD(slots) FIELD(q) FIELD(layer)
    FIELD(shape) FIELD(num_heads) FIELD(num_tokens) FIELD(eps) FIELD(norms_of_rows) FIELD(is_centred) FIELD(is_after)
    FIELD(values) FIELD(row) FIELD(tokens)
#undef STRUCT
#define STRUCT Sampling
    WHOLE FIELD(logits) FIELD(temperature) FIELD(top_k) FIELD(top_p) FIELD(min_p) FIELD(seed) FIELD(position)
    FIELD(choice) FIELD(largest) FIELD(tokens) FIELD(scratch) FIELD(num_rows) FIELD(vocab_size)
#undef STRUCT
#define STRUCT SoftCap
    WHOLE FIELD(numbers) FIELD(num_rows) FIELD(width) FIELD(cap)
#undef STRUCT
};

EXPORT const int32_t num_struct_fields = sizeof(struct_fields) / sizeof(struct_fields[0]);
