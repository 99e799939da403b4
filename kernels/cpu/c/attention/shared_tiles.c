#include "attention/shared_tiles.h"

static const int32_t *blocks_of(const BlockTables *tables, int32_t request, int32_t begin) {
    return tables->blocks + (size_t)request * tables->width + begin / tables->block_size;
}

int tile_has_blocks(const BlockTables *tables, int32_t begin) {
    return TILE % tables->block_size == 0 && (int64_t)begin + TILE <= (int64_t)tables->width * tables->block_size;
}

TileUser lone_user(const BlockTables *tables, int32_t request, int32_t token, int32_t begin, int32_t index) {
    return (TileUser){
        .request = request,
        .token = token,
        .begin = begin,
        .last_block = blocks_of(tables, request, begin)[TILE / tables->block_size - 1],
        .first = index,
        .next = -1,
        .count = 1,
    };
}

static int have_equal_blocks(const BlockTables *tables, const TileUser *a, const TileUser *b) {
    const int32_t *of_a = blocks_of(tables, a->request, a->begin), *of_b = blocks_of(tables, b->request, b->begin);
    return a->begin == b->begin && memcmp(of_a, of_b, TILE / tables->block_size * sizeof of_a[0]) == 0;
}

int find_shared_tiles(const BlockTables *tables, TileUser *users, int64_t num_users, int32_t *room) {
    uint32_t size = 1;
    while (size < 2 * num_users) size *= 2;
    memset(room, -1, size * sizeof room[0]); /* hash table: indices of users by last block, -1 = empty */
    int is_any_shared = 0;
    for (int32_t i = 0; i < num_users; i++) {
        uint32_t place = (uint32_t)users[i].last_block * 0x9e3779b1u >> 7; /* hash: 2 ** 32 / golden ratio */
        while (room[place &= size - 1] >= 0 && users[room[place]].last_block != users[i].last_block) place++;
        if (room[place] < 0) {
            room[place] = i;
            continue;
        }
        TileUser *first = &users[room[place]];
        if (!have_equal_blocks(tables, first, &users[i])) continue;
        users[i].first = room[place];
        users[i].next = first->next;
        first->next = i;
        first->count++;
        is_any_shared = 1;
    }
    return is_any_shared;
}
