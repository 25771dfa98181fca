// The gated delta rule in chunks of ROWS tokens, in two kernels.
//
// With G the cumulative log decay inside a chunk and D_ij = exp(G_i - G_j) for j <= i, 0 above:
//
//   chunk_prepare, a block per chunk and value head (needs no state):
//     inverse = (I + L)^-1, L_ij = beta_i (k_i . k_j) D_ij below the diagonal      intra = (q k^T) o D
//   chunk_scan, a block per sequence, value head and 16 WARPS value columns, chunk after chunk, S the state:
//     r = beta o (v - e^G o (k S))     v' = inverse r     o = e^G o (q S) + intra v'
//     S <- e^(G_C) S + k^T (e^(G_C - G) o v')
//
// The scan holds S transposed, 16 value columns a warp, in registers: the state, r and v' are then left operands of the
// next product as they stand, and no warp waits for another but for what is loaded. With KEY_PARTS 2 two warps share
// their columns, each with half of the keys: they add up what they read of the state, and one makes the output.
// Where rows of the solve are limited, chunk_prepare solves for u = inverse (beta v) and w = inverse (beta e^G k), and
// the scan takes v' = u - w S.
//
// A build with BUILD_RANGES=1 also writes what range the values of each stage have, warp by warp.
//
// Operands of a product are rounded to T, sums and state are fp32, G and its differences as the policy says.
// Source: arXiv 2406.06484 section 3 (chunk form), arXiv 2412.06464 (scalar gate).
#pragma once
#include "device.cuh"

#ifndef BUILD_RANGES
#define BUILD_RANGES 0
#endif

enum ExponentForm { DIFFERENCE_THEN_MASK, MASK_AFTER, MULTIPLY_MASK, FACTORED, FACTORED_MASK_AFTER, MIDPOINT };
enum CumsumKind { CUMSUM_FLOAT64, CUMSUM_FLOAT32, CUMSUM_SEGSUM, CUMSUM_BFLOAT16, CUMSUM_FLOAT16 };

// Whether the form leaves something above the diagonal of `intra`: infinity times 0, which has to show.
DEVICE bool is_full(int exponent_form) { return exponent_form == MULTIPLY_MASK || exponent_form == FACTORED; }

// Rows R are all tokens of a call, N chunks of ROWS rows each, V value heads, H key heads; T is the dtype of q, k, v.
struct ChunkArguments {
    const void* q;               // [R, H, K] T
    const void* k;               // [R, H, K] T
    const void* v;               // [R, V, W] T
    const float* log_decay;      // [R, V]
    const float* beta;           // [R, V]
    const float* initial_state;  // [S, V, K, W], or null for zero
    void* out;                   // [R, V, W] T
    float* state;                // [S, V, K, W]
    void* inverse;               // [N, V, ROWS, ROWS] T; w [N, V, ROWS, K] T where rows are limited
    void* intra;                 // [N, V, ROWS, ROWS] T
    void* u;                     // [N, V, ROWS, W] T where rows are limited, otherwise null
    float* factors;              // [N, V, 4 ROWS + 4]: beta, beta e^G, e^G of the readout, e^(G_C - G); then e^(G_C)
    const int* chunk_table;      // [N, 2] first row and rows of a chunk; null: `tokens` rows for each sequence
    const int* sequence_table;   // [S, 2] first chunk and chunks of a sequence; null likewise
    float* ranges;               // [stages, N, V, range_slots, 5], see Range; read by builds with ranges alone
    int* out_flag;               // two words each, see raise_flag; null: none
    int* state_flag;
    int sequences, tokens, chunks;
    int key_heads, value_heads, key_dim, value_dim;
    int exponent_form, cumsum_kind;
    int keys_are_aligned, values_are_aligned;  // rows of q and k, of v, out and u: whole pieces of 16 bytes
    int range_slots;                           // warps that have a part of a matrix, at most
    int limits_state;                          // whether state_limits bind anything
    Limits cumsum, k_decay, inter_attention, state_update, solve_rows, state_limits;
};

struct alignas(8) Two {
    float x, y;
};
DEVICE Two two_of(const float* x) { return *(const Two*)x; }

// ---- ranges of the stages

enum RangeStage {
    RANGE_CUMSUM, RANGE_DECAY, RANGE_KKT, RANGE_INVERSE, RANGE_U, RANGE_W, RANGE_INTRA, RANGE_INTER, RANGE_STATE
};

// Smallest and largest finite value, infinities where there is none, and how many values are NaN, +inf and -inf.
struct Range {
    float low, high, nan, above, below;
};
DEVICE Range no_range() { return Range{float_of(0x7f800000u), float_of(0xff800000u), 0.0f, 0.0f, 0.0f}; }
DEVICE void seen(Range& range, float x) {
    if constexpr (BUILD_RANGES) {
        Bits32 size = bits_of(x) & 0x7fffffffu;
        if (size > 0x7f800000u) range.nan += 1.0f;
        if (size == 0x7f800000u && x > 0.0f) range.above += 1.0f;
        if (size == 0x7f800000u && x < 0.0f) range.below += 1.0f;
        if (size >= 0x7f800000u) return;
        range.low = x < range.low ? x : range.low;
        range.high = x > range.high ? x : range.high;
    }
}
// What the lanes of a warp have seen of matrix (n, head) of a stage.
DEVICE void put_range(const ChunkArguments& a, int stage, long long matrix, int slot, Range range, int lane) {
    if constexpr (BUILD_RANGES) {
        for (int mask = 16; mask > 0; mask >>= 1) {
            float low = float_of(from_lane_xor(bits_of(range.low), mask));
            float high = float_of(from_lane_xor(bits_of(range.high), mask));
            range.low = low < range.low ? low : range.low;
            range.high = high > range.high ? high : range.high;
            range.nan += float_of(from_lane_xor(bits_of(range.nan), mask));
            range.above += float_of(from_lane_xor(bits_of(range.above), mask));
            range.below += float_of(from_lane_xor(bits_of(range.below), mask));
        }
        long long at = ((long long)stage * a.chunks * a.value_heads + matrix) * a.range_slots + slot;
        if (lane == 0) ((Range*)a.ranges)[at] = range;
    }
}

// First row and number of rows of chunk n.
template <int ROWS>
DEVICE void find_chunk(const ChunkArguments& a, int n, long long& row, int& rows) {
    if (a.chunk_table) {
        row = a.chunk_table[2 * n];
        rows = a.chunk_table[2 * n + 1];
    } else {
        int steps = (a.tokens + ROWS - 1) / ROWS, step = n % steps;
        row = (long long)(n / steps) * a.tokens + step * ROWS;
        rows = a.tokens - step * ROWS < ROWS ? a.tokens - step * ROWS : ROWS;
    }
}

// ROWS x COLUMNS of a matrix in global memory to shared memory, zero beyond `rows` and `columns`.
template <int ROWS, int COLUMNS, int STRIDE, int THREADS, typename T>
DEVICE void fetch_tile(T* tile, const T* matrix, long long stride, int rows, int columns, bool is_aligned, int thread) {
    constexpr int PIECE = 16 / (int)sizeof(T), PIECES = COLUMNS / PIECE, AT_ONCE = THREADS / PIECES;
    static_assert(THREADS % PIECES == 0, "a thread copies one column of pieces");
    if (is_aligned) {
        int row = thread / PIECES, column = thread % PIECES * PIECE;
        if (column >= columns) rows = 0;
        const T* from = matrix + row * stride + column;
        T* to = tile + row * STRIDE + column;
#pragma unroll 4
        for (; row < ROWS; row += AT_ONCE, from += AT_ONCE * stride, to += AT_ONCE * STRIDE)
            copy_16_bytes(to, row < rows ? from : matrix, row < rows);
    } else {
#pragma unroll 1
        for (int i = thread; i < ROWS * COLUMNS; i += THREADS) {
            int row = i / COLUMNS, column = i % COLUMNS;
            bool is_there = row < rows && column < columns;
            tile[row * STRIDE + column] = is_there ? matrix[row * stride + column] : rounded<T>(0.0f);
        }
    }
}

// ---- exponentials of a chunk

struct Exponents {
    const double* sums;  // [ROWS] G
    const float* gates;  // [ROWS]
    int form, kind, rows;

    DEVICE float narrowed(float x) const {
        return kind == CUMSUM_BFLOAT16 ? bfloat16_value(bfloat16_bits(x)) : float16_value(float16_bits(x));
    }
    // exp of an exponent in nats, in the format of the sums.
    DEVICE float exp(double x) const {
        if (kind == CUMSUM_FLOAT64) return exp2_of((float)(x * 1.4426950408889634));
        if (kind == CUMSUM_FLOAT32 || kind == CUMSUM_SEGSUM) return exp_of((float)x);
        return narrowed(exp_of(narrowed((float)x)));
    }
    DEVICE double minus(double x, double y) const {
        if (kind == CUMSUM_FLOAT64) return x - y;
        float difference = (float)x - (float)y;
        return kind == CUMSUM_FLOAT32 || kind == CUMSUM_SEGSUM ? difference : narrowed(difference);
    }
    // G_i - G_j; of windows summed by themselves 0 above the diagonal.
    DEVICE double difference(int i, int j) const {
        if (kind != CUMSUM_SEGSUM) return minus(sums[i], sums[j]);
        float sum = 0.0f;
        for (int row = j + 1; row <= i; row++) sum += gates[row];
        return sum;
    }
    DEVICE bool is_factored() const { return form >= FACTORED; }
    DEVICE double anchor() const {
        if (form != MIDPOINT) return 0.0;
        double ends = sums[0] + sums[rows - 1];
        if (kind == CUMSUM_FLOAT64) return 0.5 * ends;
        float half = 0.5f * (float)ends;
        return kind == CUMSUM_FLOAT32 || kind == CUMSUM_SEGSUM ? half : narrowed(0.5f * narrowed((float)ends));
    }
    // Whether D_ij is `usual_pair`: under the default policy, and the one to be quick under.
    DEVICE bool is_usual() const { return form == DIFFERENCE_THEN_MASK && kind == CUMSUM_FLOAT64; }
    DEVICE float usual_pair(int i, int j) const {
        return j <= i ? exp2_of((float)((sums[i] - sums[j]) * 1.4426950408889634)) : 0.0f;
    }
    // D_ij.
    DEVICE float pair(int i, int j) const {
        if (form == DIFFERENCE_THEN_MASK || form == MASK_AFTER) return j <= i ? exp(difference(i, j)) : 0.0f;
        float mask = j <= i ? 1.0f : 0.0f, decay;
        if (is_factored()) {
            double middle = anchor();
            decay = exp(minus(sums[i], middle)) * exp(minus(middle, sums[j]));
        } else {
            decay = exp(difference(i, j));
        }
        if (form == FACTORED_MASK_AFTER || form == MIDPOINT) return j <= i ? decay : 0.0f;
        return decay * mask;  // infinity times 0 is NaN: the fault that these forms are kept to show
    }
    // e^(G_C - G_i), its exponents limited.
    DEVICE float until_end(int i, Limits limits) const {
        int last = rows - 1;
        if (!is_factored()) return exp(limited(difference(last, i), limits));
        double middle = anchor();
        return exp(limited(minus(sums[last], middle), limits)) * exp(limited(minus(middle, sums[i]), limits));
    }
    DEVICE float since_start(int i, Limits limits) const { return exp(limited(sums[i], limits)); }
};

// ---- chunk_prepare

template <typename T, int KEYS, int ROWS>
struct Prepared {
    static constexpr int THREADS = 2 * ROWS;
    static constexpr int STRIDE = KEYS + row_padding<T>();  // of the tiles of q and k
    static constexpr int LOWER = ROWS + 4;                  // of L, transposed: element (i, j) at [j * LOWER + i]
    ON_BOTH static constexpr int gate_bytes() { return ROWS * (int)(sizeof(double) + 2 * sizeof(float)); }
    // The tiles are read before L and the solved columns [ROWS, ROWS], both fp32, are written in their place.
    ON_BOTH static constexpr int bytes() {
        int tiles = 2 * ROWS * STRIDE * (int)sizeof(T), solve = ROWS * (LOWER + ROWS) * (int)sizeof(float);
        return gate_bytes() + (tiles > solve ? tiles : solve);
    }
};

// G of the chunk into `sums`: in float64 all threads together, otherwise in fp32 one row after another.
template <int ROWS>
DEVICE void sum_gates(double* sums, const float* gates, int kind, Limits limits, int thread, int lane) {
    static_assert(ROWS <= 64, "two warps of rows");
    double sum = thread < ROWS ? (double)gates[thread] : 0.0;
    if (kind == CUMSUM_FLOAT64) {
        for (int step = 1; step < 32; step <<= 1) {
            double before = from_lane(sum, lane >= step ? lane - step : lane);
            if (lane >= step) sum += before;
        }
        if (thread == 31) sums[0] = sum;
        wait_for_block();
        if (thread >= 32) sum += sums[0];
        wait_for_block();
    } else if (thread < ROWS) {
        float narrow = 0.0f;
        for (int i = 0; i <= thread; i++) narrow += gates[i];
        sum = narrow;
    }
    if (thread < ROWS) sums[thread] = kind == CUMSUM_FLOAT64 ? limited(sum, limits) : limited((float)sum, limits);
}

// Column `column` of the solution x of (I + L) x = right, from row `from` on, a multiple of 16; `right` is zero before.
// Two lanes side by side do it: each subtracts half of the rows above a block of 16, then both solve it.
template <int ROWS, int LOWER, typename Right>
DEVICE void solve_column(float* solved, int column, const float* lower, int from, Limits limits, int lane,
                         Right right) {
    constexpr int BLOCK = 16;
    int second = lane % 2;
#pragma unroll 1
    for (int start = from; start < ROWS; start += BLOCK) {
        float x[BLOCK];
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[i] = second ? 0.0f : right(start + i);
#pragma unroll 4
        for (int j = from + second; j < start; j += 2) {
            float known = solved[j * ROWS + column];
            const float4* below = (const float4*)(lower + j * LOWER + start);
#pragma unroll
            for (int i = 0; i < BLOCK; i += 4) {
                float4 four = below[i / 4];
                x[i] -= four.x * known, x[i + 1] -= four.y * known;
                x[i + 2] -= four.z * known, x[i + 3] -= four.w * known;
            }
        }
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[i] += float_of(from_lane_xor(bits_of(x[i]), 1));
#pragma unroll
        for (int j = 0; j < BLOCK; j++) {
            x[j] = limited(x[j], limits);
            if (j % 2 == second) solved[(start + j) * ROWS + column] = x[j];
            const float4* below = (const float4*)(lower + (start + j) * LOWER + start);
#pragma unroll
            for (int i = (j + 1) / 4 * 4; i < BLOCK; i += 4) {
                float4 four = below[i / 4];
                if (i > j) x[i] -= four.x * x[j];
                if (i + 1 > j) x[i + 1] -= four.y * x[j];
                if (i + 2 > j) x[i + 2] -= four.z * x[j];
                if (i + 3 > j) x[i + 3] -= four.w * x[j];
            }
        }
        wait_for_warp();
    }
}

template <typename T, int KEYS, int ROWS>
__global__ void __launch_bounds__(2 * ROWS) chunk_prepare(ChunkArguments a) {
    using Layout = Prepared<T, KEYS, ROWS>;
    SHARED_MEMORY(memory);
    double* sums = (double*)memory;
    float* gates = (float*)(sums + ROWS);
    float* betas = gates + ROWS;
    T* k_tile = (T*)(memory + Layout::gate_bytes());
    T* q_tile = k_tile + ROWS * Layout::STRIDE;
    float* lower = (float*)k_tile;
    float* solved = lower + ROWS * Layout::LOWER;

    int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;
    int n = (int)blockIdx.x, head = (int)blockIdx.y, key_head = head / (a.value_heads / a.key_heads);
    bool limits_rows = a.u != nullptr;
    long long row, matrix = (long long)n * a.value_heads + head;
    int rows;
    find_chunk<ROWS>(a, n, row, rows);
    long long stride = (long long)a.key_heads * a.key_dim, place = row * stride + (long long)key_head * a.key_dim;
    const T* k = (const T*)a.k + place;
    fetch_tile<ROWS, KEYS, Layout::STRIDE, Layout::THREADS>(k_tile, k, stride, rows, a.key_dim, a.keys_are_aligned,
                                                            thread);
    fetch_tile<ROWS, KEYS, Layout::STRIDE, Layout::THREADS>(q_tile, (const T*)a.q + place, stride, rows, a.key_dim,
                                                            a.keys_are_aligned, thread);
    end_of_copies();
    if (thread < ROWS) {
        long long at = (row + thread) * a.value_heads + head;
        gates[thread] = thread < rows ? a.log_decay[at] : 0.0f;
        betas[thread] = thread < rows ? a.beta[at] : 0.0f;
    }
    wait_for_block();
    sum_gates<ROWS>(sums, gates, a.cumsum_kind, a.cumsum, thread, lane);
    Exponents exponents{sums, gates, a.exponent_form, a.cumsum_kind, ROWS};
    if (a.cumsum_kind >= CUMSUM_BFLOAT16 && thread < ROWS) sums[thread] = exponents.narrowed((float)sums[thread]);
    copies_have_landed<0>();
    wait_for_block();

    // Rows 16 warp to 16 warp + 15 of k k^T and q k^T.
    constexpr int TILES = ROWS / 8;
    float kk[TILES][4] = {}, qk[TILES][4] = {};
    bool is_whole = is_full(a.exponent_form);
    int tiles = is_whole ? TILES : 2 * warp + 2;
    for (int at = 0; at < KEYS; at += 16) {
        Left<T> of_k = load_left(k_tile + warp * 16 * Layout::STRIDE + at, Layout::STRIDE, lane);
        Left<T> of_q = load_left(q_tile + warp * 16 * Layout::STRIDE + at, Layout::STRIDE, lane);
        multiply<false>(kk, of_k, k_tile + at, Layout::STRIDE, lane, 0, tiles);
        multiply<false>(qk, of_q, k_tile + at, Layout::STRIDE, lane, 0, tiles);
    }

    wait_for_block();  // the tiles have been read
    Range of_cumsum = no_range(), of_decay = no_range(), of_kkt = no_range(), of_intra = no_range();
    if (thread < ROWS) {
        seen(of_cumsum, (float)sums[thread]);
        float* factors = a.factors + matrix * (4 * ROWS + 4);
        float beta = betas[thread];
        factors[thread] = beta;
        factors[ROWS + thread] = beta * exponents.since_start(thread, a.k_decay);
        factors[2 * ROWS + thread] = exponents.since_start(thread, a.inter_attention);
        factors[3 * ROWS + thread] = exponents.until_end(thread, a.state_update);
        if (limits_rows) factors[thread] = factors[ROWS + thread] = 1.0f;  // they are in u and w
        if (thread < 4) factors[4 * ROWS + thread] = exponents.since_start(ROWS - 1, a.state_update);
    }
    // D in the place of L, element after element; then each lane makes L and P of those of its products.
    int i = thread % ROWS;
    if (exponents.is_usual()) {
#pragma unroll 8
        for (int j = thread / ROWS; j < ROWS; j += 2) {
            float decay = exponents.usual_pair(i, j);
            lower[j * Layout::LOWER + i] = decay;
            seen(of_decay, decay);
        }
    } else {
#pragma unroll 1
        for (int j = thread / ROWS; j < ROWS; j += 2) {
            float decay = exponents.pair(i, j);
            lower[j * Layout::LOWER + i] = decay;
            seen(of_decay, decay);
        }
    }
    wait_for_block();
    T* intra = (T*)a.intra + matrix * ROWS * ROWS;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = warp * 16 + half * 8 + lane / 4, j = tile * 8 + lane % 4 * 2;
            float beta = betas[i], p[2];
#pragma unroll
            for (int next = 0; next < 2; next++) {
                float* decay = lower + (j + next) * Layout::LOWER + i;
                p[next] = is_whole || j + next <= i ? qk[tile][2 * half + next] * *decay : 0.0f;
                *decay = j + next < i ? beta * kk[tile][2 * half + next] * *decay : 0.0f;
                seen(of_intra, p[next]);
                seen(of_kkt, *decay);
            }
            *(Pair<T>*)(intra + i * ROWS + j) = paired<T>(p[0], p[1]);
        }
    }
    put_range(a, RANGE_CUMSUM, matrix, warp, of_cumsum, lane);
    put_range(a, RANGE_DECAY, matrix, warp, of_decay, lane);
    put_range(a, RANGE_KKT, matrix, warp, of_kkt, lane);
    put_range(a, RANGE_INTRA, matrix, warp, of_intra, lane);
    wait_for_block();

    Range of_inverse = no_range(), of_u = no_range(), of_w = no_range();
    int column = thread / 2;
    if (!limits_rows) {
        solve_column<ROWS, Layout::LOWER>(solved, column, lower, column / 16 * 16, a.solve_rows, lane,
                                          [&](int i) { return i == column ? 1.0f : 0.0f; });
        for (int i = thread % 2; i < column / 16 * 16; i += 2) solved[i * ROWS + column] = 0.0f;
        wait_for_block();
        T* inverse = (T*)a.inverse + matrix * ROWS * ROWS;
#pragma unroll 4
        for (int at = 2 * thread; at < ROWS * ROWS; at += 2 * Layout::THREADS) {
            Two two = two_of(solved + at);
            *(Pair<T>*)(inverse + at) = paired<T>(two.x, two.y);
            seen(of_inverse, two.x);
            seen(of_inverse, two.y);
        }
    } else {
        const T* v = (const T*)a.v + (row * a.value_heads + head) * a.value_dim;
        T* u = (T*)a.u + matrix * ROWS * a.value_dim;
        T* w = (T*)a.inverse + matrix * ROWS * a.key_dim;
        for (int first = 0; first < a.value_dim + a.key_dim; first += ROWS) {
            int key = first + column - a.value_dim;  // below 0: a column of u
            bool is_there = key < a.key_dim;
            auto right = [&](int i) {
                if (i >= rows || !is_there) return 0.0f;
                if (key < 0) return betas[i] * value(v[(long long)i * a.value_heads * a.value_dim + first + column]);
                return betas[i] * exponents.since_start(i, a.k_decay) * value(k[i * stride + key]);
            };
            solve_column<ROWS, Layout::LOWER>(solved, column, lower, 0, a.solve_rows, lane, right);
            for (int i = lane % 2; i < ROWS && is_there; i += 2) {
                float x = solved[i * ROWS + column];
                seen(key < 0 ? of_u : of_w, x);
                if (key < 0)
                    u[i * a.value_dim + first + column] = rounded<T>(x);
                else
                    w[i * a.key_dim + key] = rounded<T>(x);
            }
            wait_for_warp();
        }
    }
    put_range(a, RANGE_INVERSE, matrix, warp, of_inverse, lane);
    put_range(a, RANGE_U, matrix, warp, of_u, lane);
    put_range(a, RANGE_W, matrix, warp, of_w, lane);
}

// ---- chunk_scan

// WARPS side by side in the value columns.
template <typename T, int KEYS, int ROWS, int WARPS>
struct Stage {
    static constexpr int COLUMNS = 16 * WARPS;
    static constexpr int PADDING = row_padding<T>();
    static constexpr int KEY_STRIDE = KEYS + PADDING, VALUE_STRIDE = COLUMNS + PADDING, ROW_STRIDE = ROWS + PADDING;
    static constexpr int Q = ROWS * KEY_STRIDE, V = 2 * Q, INTRA = V + ROWS * VALUE_STRIDE;
    static constexpr int INVERSE = INTRA + ROWS * ROW_STRIDE;
    // The last tile is the inverse, or w.
    ON_BOTH static constexpr int elements(bool limits_rows) {
        return INVERSE + ROWS * (limits_rows ? KEY_STRIDE : ROW_STRIDE);
    }
    ON_BOTH static constexpr int bytes(bool limits_rows) {
        return elements(limits_rows) * (int)sizeof(T) + (4 * ROWS + 4) * (int)sizeof(float);
    }
    // Behind the stages: a product of 16 columns and ROWS for each warp that hands one on.
    static constexpr int PRODUCT = ROWS / 8 * 32;  // in pieces of 16 bytes
    ON_BOTH static constexpr int exchange_bytes(int key_parts) { return key_parts == 1 ? 0 : 2 * WARPS * PRODUCT * 16; }
};

template <int TILES>
DEVICE void hand_on(float4* place, const float (&tiles)[TILES][4], int lane) {
#pragma unroll
    for (int n = 0; n < TILES; n++) place[n * 32 + lane] = float4{tiles[n][0], tiles[n][1], tiles[n][2], tiles[n][3]};
}
template <int TILES>
DEVICE void add_handed(float (&tiles)[TILES][4], const float4* place, int lane) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        float4 four = place[n * 32 + lane];
        tiles[n][0] += four.x, tiles[n][1] += four.y, tiles[n][2] += four.z, tiles[n][3] += four.w;
    }
}

// A power of two that brings numbers of up to this magnitude to where Float16 has all its digits. Those below 2^-40
// count as that much: what they are multiplied with must not overflow.
DEVICE float scale_for(Bits32 magnitude) {
    int exponent = (int)(magnitude >> 23);  // biased by 127
    if (exponent == 255) return 1.0f;
    return float_of((Bits32)(2 * 127 + 12 - (exponent < 87 ? 87 : exponent)) << 23);
}

// Factors of the two rows of a left operand that a lane has a part of, and their inverses. In Float16 they are powers
// of two: a state beyond 65504, or one that has decayed to subnormal numbers, keeps its digits. 1 for the other types,
// whose range is that of float.
struct Scales {
    float up[2], down[2];
};
template <typename T, int TILES>
DEVICE Scales scales_of(const float (&tiles)[TILES][4]) {
    Scales scales = {{1.0f, 1.0f}, {1.0f, 1.0f}};
    if constexpr (is_float16<T>()) {
        Bits32 most[2] = {0u, 0u};
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                Bits32 bits = bits_of(tiles[n][i]) & 0x7fffffffu;
                most[i / 2] = bits > most[i / 2] ? bits : most[i / 2];
            }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            for (int mask = 1; mask < 4; mask <<= 1) {  // the four lanes of a row
                Bits32 other = from_lane_xor(most[i], mask);
                most[i] = other > most[i] ? other : most[i];
            }
            scales.up[i] = scale_for(most[i]);
            scales.down[i] = 1.0f / scales.up[i];
        }
    }
    return scales;
}
template <typename T, int TILES>
DEVICE void scale_up(float (&tiles)[TILES][4], const Scales& scales) {
    if constexpr (is_float16<T>()) {
#pragma unroll
        for (int n = 0; n < TILES; n++)
            for (int i = 0; i < 4; i++) tiles[n][i] *= scales.up[i / 2];
    }
}
template <typename T, int TILES>
DEVICE void scale_down(float (&tiles)[TILES][4], const Scales& scales) {
    if constexpr (is_float16<T>()) {
#pragma unroll
        for (int n = 0; n < TILES; n++)
            for (int i = 0; i < 4; i++) tiles[n][i] *= scales.down[i / 2];
    }
}

template <typename T, int KEYS, int ROWS, int WARPS, int KEY_PARTS>
__global__ void __launch_bounds__(32 * WARPS * KEY_PARTS) chunk_scan(ChunkArguments a, int stages) {
    using Layout = Stage<T, KEYS, ROWS, WARPS>;
    constexpr int THREADS = 32 * WARPS * KEY_PARTS, STATE_TILES = KEYS / 8 / KEY_PARTS, TILES = ROWS / 8;
    SHARED_MEMORY(memory);

    int thread = (int)threadIdx.x, lane = thread % 32;
    int warp = thread / 32 % WARPS, key_part = thread / 32 / WARPS;  // its 16 columns, and which of the keys
    int parts = (a.value_dim + Layout::COLUMNS - 1) / Layout::COLUMNS;
    int part = (int)blockIdx.x % parts, head = (int)blockIdx.x / parts % a.value_heads;
    int sequence = (int)blockIdx.x / parts / a.value_heads;
    int key_head = head / (a.value_heads / a.key_heads);
    bool limits_rows = a.u != nullptr;
    int bytes = Layout::bytes(limits_rows);

    int first_chunk, steps;
    if (a.sequence_table) {
        first_chunk = a.sequence_table[2 * sequence];
        steps = a.sequence_table[2 * sequence + 1];
    } else {
        steps = (a.tokens + ROWS - 1) / ROWS;
        first_chunk = sequence * steps;
    }
    int first_column = part * Layout::COLUMNS, columns = a.value_dim - first_column;
    long long key_stride = (long long)a.key_heads * a.key_dim, value_stride = (long long)a.value_heads * a.value_dim;

    auto fetch = [&](int step) {
        unsigned char* stage = memory + step % stages * bytes;
        T* tiles = (T*)stage;
        float* factors = (float*)(tiles + Layout::elements(limits_rows));
        int n = first_chunk + step, rows;
        long long row, matrix = (long long)n * a.value_heads + head;
        find_chunk<ROWS>(a, n, row, rows);
        long long place = row * key_stride + (long long)key_head * a.key_dim;
        fetch_tile<ROWS, KEYS, Layout::KEY_STRIDE, THREADS>(tiles, (const T*)a.k + place, key_stride, rows, a.key_dim,
                                                            a.keys_are_aligned, thread);
        fetch_tile<ROWS, KEYS, Layout::KEY_STRIDE, THREADS>(tiles + Layout::Q, (const T*)a.q + place, key_stride, rows,
                                                            a.key_dim, a.keys_are_aligned, thread);
        const T* v = limits_rows ? (const T*)a.u + matrix * ROWS * a.value_dim
                                 : (const T*)a.v + (row * a.value_heads + head) * a.value_dim;
        fetch_tile<ROWS, Layout::COLUMNS, Layout::VALUE_STRIDE, THREADS>(
            tiles + Layout::V, v + first_column, limits_rows ? a.value_dim : value_stride, rows, columns,
            a.values_are_aligned, thread);
        fetch_tile<ROWS, ROWS, Layout::ROW_STRIDE, THREADS>(
            tiles + Layout::INTRA, (const T*)a.intra + matrix * ROWS * ROWS, ROWS, ROWS, ROWS, true, thread);
        if (limits_rows)
            fetch_tile<ROWS, KEYS, Layout::KEY_STRIDE, THREADS>(tiles + Layout::INVERSE,
                                                                (const T*)a.inverse + matrix * ROWS * a.key_dim,
                                                                a.key_dim, ROWS, a.key_dim, a.keys_are_aligned, thread);
        else
            fetch_tile<ROWS, ROWS, Layout::ROW_STRIDE, THREADS>(
                tiles + Layout::INVERSE, (const T*)a.inverse + matrix * ROWS * ROWS, ROWS, ROWS, ROWS, true, thread);
        const float* from = a.factors + matrix * (4 * ROWS + 4);
        for (int i = 4 * thread; i < 4 * ROWS + 4; i += 4 * THREADS) copy_16_bytes(factors + i, from + i, true);
    };

    // S^T, rows 16 of the value columns, the warp's keys from `first_key` on. Value column and key of state[j][i]:
    int column = first_column + warp * 16 + lane / 4, pair = lane % 4 * 2, first_key = key_part * 8 * STATE_TILES;
    long long states = ((long long)sequence * a.value_heads + head) * a.key_dim;
    float state[STATE_TILES][4];
#pragma unroll
    for (int j = 0; j < STATE_TILES; j++)
        for (int i = 0; i < 4; i++) {
            int key = first_key + j * 8 + pair + i % 2, here = column + i / 2 * 8;
            bool is_there = a.initial_state && key < a.key_dim && here < a.value_dim;
            state[j][i] = is_there ? a.initial_state[(states + key) * a.value_dim + here] : 0.0f;
        }

    Flag out_flag = {0, 0};
    for (int step = 1 - stages; step < steps; step++) {
        int next = step + stages - 1;  // the chunk itself, or with two stages the one after it
        if (next < steps) fetch(next);
        end_of_copies();
        if (step < 0) continue;
        if (stages > 1)
            copies_have_landed<1>();
        else
            copies_have_landed<0>();
        wait_for_block();
        unsigned char* stage = memory + step % stages * bytes;
        T* k_tile = (T*)stage;
        const T *q_tile = k_tile + Layout::Q, *intra = k_tile + Layout::INTRA, *inverse = k_tile + Layout::INVERSE;
        T* v_tile = k_tile + Layout::V + warp * 16;
        const float* factors = (const float*)(k_tile + Layout::elements(limits_rows));
        const T* read_by = limits_rows ? inverse : k_tile;  // w, or k

        // (k S)^T and (q S)^T
        float r[TILES][4] = {}, o[TILES][4] = {};
        Scales scales = scales_of<T>(state);
#pragma unroll
        for (int j = 0; j < STATE_TILES; j += 2) {
            Left<T> left = left_of<T>(state[j], state[j + 1], scales.up);
            multiply<false>(r, left, read_by + first_key + j * 8, Layout::KEY_STRIDE, lane);
            multiply<false>(o, left, q_tile + first_key + j * 8, Layout::KEY_STRIDE, lane);
        }
        scale_down<T>(r, scales);
        scale_down<T>(o, scales);
        float v[TILES][4];  // read before any warp can have put its output in their place
        load_transposed(v, v_tile, Layout::VALUE_STRIDE, lane);
        Range of_inter = no_range(), of_state = no_range();
        // Places of r of the two warps, and then of o of the second: a lane reads what the same lane has written.
        float4* place = (float4*)(memory + stages * bytes) + warp * Layout::PRODUCT;
        constexpr int NEXT = WARPS * Layout::PRODUCT;
        if constexpr (KEY_PARTS > 1) {
            hand_on(place + key_part * NEXT, r, lane);
            wait_for_block();
            add_handed(r, place + (1 - key_part) * NEXT, lane);
            if (key_part > 0) hand_on(place, o, lane);
        }
#pragma unroll
        for (int c = 0; c < TILES; c++) {
            Two beta = two_of(factors + c * 8 + pair), read = two_of(factors + ROWS + c * 8 + pair);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                r[c][i] = (i % 2 ? beta.y : beta.x) * v[c][i] - (i % 2 ? read.y : read.x) * r[c][i];
            }
        }
        long long matrix = (long long)(first_chunk + step) * a.value_heads + head;

        // v'^T
        float corrections[TILES][4] = {};
        if (limits_rows) {
#pragma unroll
            for (int c = 0; c < TILES; c++)
                for (int i = 0; i < 4; i++) corrections[c][i] = r[c][i];
        } else {
            scales = scales_of<T>(r);
#pragma unroll
            for (int c = 0; c < TILES; c += 2)
                multiply<false>(corrections, left_of<T>(r[c], r[c + 1], scales.up), inverse + c * 8, Layout::ROW_STRIDE,
                                lane, c);
            scale_down<T>(corrections, scales);
        }

        // o^T
        if constexpr (KEY_PARTS > 1) wait_for_block();
        if (key_part == 0) {
            if constexpr (KEY_PARTS > 1) add_handed(o, place, lane);
#pragma unroll
            for (int c = 0; c < TILES; c++) {
                Two readout = two_of(factors + 2 * ROWS + c * 8 + pair);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    o[c][i] *= i % 2 ? readout.y : readout.x;
                    if (column + i / 2 * 8 < a.value_dim) seen(of_inter, o[c][i]);
                }
            }
            put_range(a, RANGE_INTER, matrix, part * WARPS + warp, of_inter, lane);
            scales = scales_of<T>(corrections);
            scale_up<T>(o, scales);
            if (a.exponent_form >= MULTIPLY_MASK) {  // v' may be NaN, and 0 times that has to show
#pragma unroll
                for (int c = 0; c < TILES; c += 2)
                    multiply<false>(o, left_of<T>(corrections[c], corrections[c + 1], scales.up), intra + c * 8,
                                    Layout::ROW_STRIDE, lane);
            } else {
#pragma unroll
                for (int c = 0; c < TILES; c += 2)
                    multiply<false>(o, left_of<T>(corrections[c], corrections[c + 1], scales.up), intra + c * 8,
                                    Layout::ROW_STRIDE, lane, c);
            }
            scale_down<T>(o, scales);
            if (a.out_flag) {  // rows and columns that are not there are zero, and change no word
#pragma unroll
                for (int c = 0; c < TILES; c++)
#pragma unroll
                    for (int i = 0; i < 4; i++) seen(out_flag, o[c][i]);
            }
            // The columns of v have been read by all lanes that need them: the output is put in order in their place.
            wait_for_warp();
#pragma unroll
            for (int c = 0; c < TILES; c++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    v_tile[(c * 8 + pair + i % 2) * Layout::VALUE_STRIDE + lane / 4 + i / 2 * 8] = rounded<T>(o[c][i]);
            wait_for_warp();
            int n = first_chunk + step, rows;
            long long row;
            find_chunk<ROWS>(a, n, row, rows);
            T* out = (T*)a.out + (row * a.value_heads + head) * a.value_dim + first_column + warp * 16;
            int own_columns = columns - warp * 16;  // of the 16 those that exist
            if (a.values_are_aligned) {
                constexpr int PIECE = 16 / (int)sizeof(T), PIECES = 16 / PIECE, AT_ONCE = 32 / PIECES;
                int at = lane % PIECES * PIECE, here = lane / PIECES;
                if (at >= own_columns) rows = 0;
                const T* from = v_tile + here * Layout::VALUE_STRIDE + at;
                T* to = out + here * value_stride + at;
#pragma unroll 4
                for (; here < ROWS; here += AT_ONCE) {
                    if (here < rows) *(float4*)to = *(const float4*)from;
                    from += AT_ONCE * Layout::VALUE_STRIDE, to += AT_ONCE * value_stride;
                }
            } else {
#pragma unroll 1
                for (int i = lane; i < rows * 16; i += 32)
                    if (i % 16 < own_columns)
                        out[i / 16 * value_stride + i % 16] = v_tile[i / 16 * Layout::VALUE_STRIDE + i % 16];
            }
        }

        // S^T
        float whole = factors[4 * ROWS];
#pragma unroll
        for (int c = 0; c < TILES; c++) {
            Two until_end = two_of(factors + 3 * ROWS + c * 8 + pair);
#pragma unroll
            for (int i = 0; i < 4; i++) corrections[c][i] *= i % 2 ? until_end.y : until_end.x;
        }
        scales = scales_of<T>(corrections);
#pragma unroll
        for (int j = 0; j < STATE_TILES; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) state[j][i] *= whole * scales.up[i / 2];
#pragma unroll
        for (int c = 0; c < TILES; c += 2)
            multiply<true>(state, left_of<T>(corrections[c], corrections[c + 1], scales.up),
                           k_tile + c * 8 * Layout::KEY_STRIDE + first_key, Layout::KEY_STRIDE, lane);
        scale_down<T>(state, scales);
        if (a.limits_state) {
#pragma unroll
            for (int j = 0; j < STATE_TILES; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) state[j][i] = limited(state[j][i], a.state_limits);
        }
        if constexpr (BUILD_RANGES) {
#pragma unroll
            for (int j = 0; j < STATE_TILES; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (first_key + j * 8 + pair + i % 2 < a.key_dim && column + i / 2 * 8 < a.value_dim)
                        seen(of_state, state[j][i]);
        }
        put_range(a, RANGE_STATE, matrix, (part * KEY_PARTS + key_part) * WARPS + warp, of_state, lane);
        wait_for_block();
    }

    Flag state_flag = {0, 0};
#pragma unroll
    for (int j = 0; j < STATE_TILES; j++)
        for (int i = 0; i < 4; i++) {
            int key = first_key + j * 8 + pair + i % 2, here = column + i / 2 * 8;
            if (key >= a.key_dim || here >= a.value_dim) continue;
            a.state[(states + key) * a.value_dim + here] = state[j][i];
            if (a.state_flag) seen(state_flag, state[j][i]);
        }
    if (a.out_flag && key_part == 0) raise_flag(a.out_flag, rounded_flag<T>(out_flag), lane);
    if (a.state_flag) raise_flag(a.state_flag, state_flag, lane);
}
