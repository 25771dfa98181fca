// The kernels of the gated delta rule for a CPU, see block_model.h. Built with the macros of chunk.cu,
// the functions have the names and arguments of those that nvcc builds.
#define KERNEL_HOST_MODEL "block_model.h"
#include "chunk.cuh"
#include "recurrent.cuh"

template <typename T>
void multiply_tile(float (&tile)[4], const Left<T>& left, unsigned upper, unsigned lower) {
    if constexpr (sizeof(T) == 2) {
        int lane = own_lane();
        unsigned* own = words_of(lane);
        for (int i = 0; i < 4; i++) own[i] = left.x[i].bits;
        own[4] = upper, own[5] = lower;
        wait_for_warp();
        for (int i = 0; i < 4; i++) {
            int row = lane / 4, column = lane % 4 * 2 + i % 2;
            for (int k = 0; k < 16; k++) {
                unsigned a = words_of(row * 4 + k % 8 / 2)[i / 2 + k / 8 * 2];
                unsigned b = words_of(column * 4 + k % 8 / 2)[4 + k / 8];
                tile[i] += value(T{(Bits16)(a >> k % 2 * 16)}) * value(T{(Bits16)(b >> k % 2 * 16)});
            }
        }
        wait_for_warp();
    }
}

using block_model::launch;

extern "C" {

int launch_chunks(const ChunkArguments* a, int stages, void* seed) {
    using Layout = Prepared<BUILD_ELEMENT, BUILD_KEYS, BUILD_ROWS>;
    using Block = Stage<BUILD_ELEMENT, BUILD_KEYS, BUILD_ROWS, BUILD_WARPS>;
    unsigned order = (unsigned)(unsigned long long)seed;
    launch(a->chunks, a->value_heads, Layout::THREADS, Layout::bytes(), order,
           [=] { chunk_prepare<BUILD_ELEMENT, BUILD_KEYS, BUILD_ROWS>(*a); });
    int parts = (a->value_dim + Block::COLUMNS - 1) / Block::COLUMNS;
    int bytes = stages * Block::bytes(a->u != nullptr) + Block::exchange_bytes(BUILD_KEY_PARTS);
    launch(parts * a->value_heads * a->sequences, 1, 32 * BUILD_WARPS * BUILD_KEY_PARTS, bytes, order,
           [=] { chunk_scan<BUILD_ELEMENT, BUILD_KEYS, BUILD_ROWS, BUILD_WARPS, BUILD_KEY_PARTS>(*a, stages); });
    return 0;
}

int launch_recurrent(const RecurrentArguments* a, void* seed) {
    int parts = (a->value_dim + RECURRENT_COLUMNS - 1) / RECURRENT_COLUMNS;
    int bytes = (2 * BUILD_KEYS + 2 * RECURRENT_WARPS * RECURRENT_COLUMNS) * 4;
    launch(parts * a->value_heads * a->sequences, 1, 32 * RECURRENT_WARPS, bytes, (unsigned)(unsigned long long)seed,
           [=] { recurrent<BUILD_KEYS>(*a); });
    return 0;
}

int stage_bytes(int limits_rows) {
    return Stage<BUILD_ELEMENT, BUILD_KEYS, BUILD_ROWS, BUILD_WARPS>::bytes(limits_rows);
}
int exchange_bytes() {
    return Stage<BUILD_ELEMENT, BUILD_KEYS, BUILD_ROWS, BUILD_WARPS>::exchange_bytes(BUILD_KEY_PARTS);
}
int chunk_argument_bytes() { return sizeof(ChunkArguments); }
int recurrent_argument_bytes() { return sizeof(RecurrentArguments); }

const char* error_text(int) { return "none"; }
}
