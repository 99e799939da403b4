/* Tiles of the KV cache that several requests of a step have in common: the same blocks at the same place. */
#ifndef SHARED_TILES_H
#define SHARED_TILES_H

#include "attention.h"

typedef struct {
    const int32_t *blocks; /* [requests, width] ids */
    int32_t width, block_size;
} BlockTables;

/* A request that has one token in this step, and a tile that it sees the whole of. */
typedef struct {
    int32_t request, token; /* rows of the block tables and of q */
    int32_t begin;          /* the tile's first token */
    int32_t last_block;     /* the id of its last block */
    int32_t partial;        /* where the rows of the first KV head have their partial results for this tile */
    int32_t head_stride;    /* from there to those of the next KV head */
    int32_t first;          /* of all users of the tile; an index, as is */
    int32_t next;           /* one more user, or -1 */
    int32_t count;          /* of users, at the first of them */
} TileUser;

/* Whether a tile from token `begin` on can be told from others by its row of the tables. */
int tile_has_blocks(const BlockTables *tables, int32_t begin);

/* A user of a tile that nobody else uses so far. */
TileUser lone_user(const BlockTables *tables, int32_t request, int32_t token, int32_t begin, int32_t index);

/* Bring the users of each tile together; returns whether any tile has several. The room is for the least power of two
 * that is at least 2 * num_users numbers. Users whose tiles have the same last block as a tile seen before but are not
 * that tile stay alone: a tile is compared with one other at most. */
int find_shared_tiles(const BlockTables *tables, TileUser *users, int64_t num_users, int32_t *room);

#endif
