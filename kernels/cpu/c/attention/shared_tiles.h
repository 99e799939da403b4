/* Tiles of the KV cache that several requests of a step share: the same blocks at the same positions. */
#ifndef SHARED_TILES_H
#define SHARED_TILES_H

#include "attention/attention.h"

typedef struct {
    const int32_t *blocks; /* [requests, width] ids */
    int32_t width, block_size;
} BlockTables;

/* A user of a tile: a request with one token in this step that sees the whole tile. */
typedef struct {
    int32_t request, token; /* rows of the block tables and of q */
    int32_t begin;          /* the tile's first token */
    int32_t last_block;     /* the id of its last block */
    int32_t partial;        /* first row of the first KV head's partial results for this tile */
    int32_t head_stride;    /* rows from there to those of the next KV head */
    int32_t first;          /* index of the tile's first user */
    int32_t next;           /* index of another user of the tile, or -1 */
    int32_t count;          /* number of the tile's users; valid in the first user only */
} TileUser;

/* Return whether the tile from token `begin` on consists of whole blocks and is within the tables' width. */
int tile_has_blocks(const BlockTables *tables, int32_t begin);

/* Return a user of a tile that has no other users yet. */
TileUser lone_user(const BlockTables *tables, int32_t request, int32_t token, int32_t begin, int32_t index);

/* Link the users of each tile. Return whether any tile has several users. `room` has as many numbers as the least
 * power of two that is at least 2 * num_users. A tile is compared with at most one other tile: the first one with
 * the same last block. If the two differ, its user stays alone. */
int find_shared_tiles(const BlockTables *tables, TileUser *users, int64_t num_users, int32_t *room);

#endif
