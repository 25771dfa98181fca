// The gated delta rule token by token, in fp32: the decode step, and a prefill of few tokens.
//
//   S <- exp(g) S     u = beta (v - S^T k)     S <- S + k u^T     o = S^T q
//
// A block holds the state of 64 value columns of one sequence and value head in registers: a lane has 4 columns, half
// a warp a key at a time, so 16 keys are read at once and each half warp has KEYS / 16 of them. Several blocks share a
// multiprocessor: some read a state while others write theirs. Only the two sums over keys cross warps.
#pragma once
#include "device.cuh"

enum ElementKind { FLOAT32_ELEMENTS, FLOAT16_ELEMENTS, BFLOAT16_ELEMENTS };

struct RecurrentArguments {
    const void* q;               // [R, H, K] of key_kind, with the strides below
    const void* k;               // [R, H, K] likewise
    const void* v;               // [R, V, W] of value_kind
    const float* log_decay;      // [R, V]
    const float* beta;           // [R, V]
    const float* initial_state;  // [S, V, K, W], or null for zero
    void* out;                   // [R, V, W] of value_kind
    float* state;                // [S, V, K, W]
    const int* bounds;           // [S + 1] first rows of the sequences; null: `tokens` rows each
    int* out_flag;               // two words each, see raise_flag; null: none
    int* state_flag;
    int sequences, tokens;
    int key_heads, value_heads, key_dim, value_dim;
    int key_kind, value_kind;
    int limits_state;  // whether state_limits bind anything
    Limits state_limits;
};

DEVICE float element(const void* x, int kind, long long at) {
    if (kind == FLOAT16_ELEMENTS) return value(((const Float16*)x)[at]);
    if (kind == BFLOAT16_ELEMENTS) return value(((const Bfloat16*)x)[at]);
    return ((const float*)x)[at];
}

// Writes `x` in the dtype of the output, returns what was written.
DEVICE float put_element(void* out, int kind, long long at, float x) {
    if (kind == FLOAT32_ELEMENTS) {
        ((float*)out)[at] = x;
        return x;
    }
    if (kind == FLOAT16_ELEMENTS) return value(((Float16*)out)[at] = rounded<Float16>(x));
    return value(((Bfloat16*)out)[at] = rounded<Bfloat16>(x));
}

constexpr int RECURRENT_WARPS = 8, RECURRENT_COLUMNS = 64, KEYS_AT_ONCE = 2 * RECURRENT_WARPS;
constexpr int RECURRENT_BLOCKS = 4;  // that have room on a multiprocessor

// Sum over the half warps of each of the block's columns; every lane gets those of its four.
DEVICE void sum_over_warps(float (&x)[4], float* exchange, int warp, int lane) {
    for (int c = 0; c < 4; c++) x[c] += float_of(from_lane_xor(bits_of(x[c]), 16));
    float4* fours = (float4*)exchange + lane % 16;
    if (lane < 16) fours[warp * (RECURRENT_COLUMNS / 4)] = float4{x[0], x[1], x[2], x[3]};
    wait_for_block();
    for (int c = 0; c < 4; c++) x[c] = 0.0f;
    for (int i = 0; i < RECURRENT_WARPS; i++) {
        float4 four = fours[i * (RECURRENT_COLUMNS / 4)];
        x[0] += four.x, x[1] += four.y, x[2] += four.z, x[3] += four.w;
    }
}

template <int KEYS>
__global__ void __launch_bounds__(32 * RECURRENT_WARPS, KEYS <= 128 ? RECURRENT_BLOCKS : 2)
    recurrent(RecurrentArguments a) {
    constexpr int OWN = KEYS / KEYS_AT_ONCE;     // keys of a half warp
    SHARED_MEMORY(memory);
    float* keys = (float*)memory;                // [KEYS]
    float* queries = keys + KEYS;                // [KEYS]
    float* exchange = queries + KEYS;            // [2, warps, columns]

    int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;
    int parts = (a.value_dim + RECURRENT_COLUMNS - 1) / RECURRENT_COLUMNS;
    int part = (int)blockIdx.x % parts, head = (int)blockIdx.x / parts % a.value_heads;
    int sequence = (int)blockIdx.x / parts / a.value_heads;
    int key_head = head / (a.value_heads / a.key_heads);
    int column = part * RECURRENT_COLUMNS + lane % 16 * 4, first_key = 2 * warp + lane / 16;
    long long states = ((long long)sequence * a.value_heads + head) * a.key_dim;

    // What a lane has lies at these places of the state before and after, a row of `next` elements apart.
    bool is_whole = a.value_dim % 4 == 0 && column < a.value_dim && a.key_dim == KEYS;  // nothing of it is missing
    long long first = (states + first_key) * a.value_dim + column, next = (long long)KEYS_AT_ONCE * a.value_dim;

    float state[OWN][4] = {};
    if (a.initial_state && is_whole) {
        const float* from = a.initial_state + first;
#pragma unroll
        for (int i = 0; i < OWN; i++, from += next) {
            float4 four = *(const float4*)from;
            state[i][0] = four.x, state[i][1] = four.y, state[i][2] = four.z, state[i][3] = four.w;
        }
    } else if (a.initial_state) {
#pragma unroll
        for (int i = 0; i < OWN; i++)
            for (int c = 0; c < 4; c++)
                if (first_key + i * KEYS_AT_ONCE < a.key_dim && column + c < a.value_dim)
                    state[i][c] = a.initial_state[first + i * next + c];
    }

    Flag out_flag = {0, 0};
    long long row = a.bounds ? a.bounds[sequence] : (long long)sequence * a.tokens;
    long long end = a.bounds ? a.bounds[sequence + 1] : row + a.tokens;
    for (; row < end; row++) {
        for (int key = thread; key < KEYS; key += 32 * RECURRENT_WARPS) {
            long long at = (row * a.key_heads + key_head) * a.key_dim + key;
            keys[key] = key < a.key_dim ? element(a.k, a.key_kind, at) : 0.0f;
            queries[key] = key < a.key_dim ? element(a.q, a.key_kind, at) : 0.0f;
        }
        float decay = exp_of(a.log_decay[row * a.value_heads + head]), beta = a.beta[row * a.value_heads + head];
        long long values = (row * a.value_heads + head) * a.value_dim + column;
        float v[4], read[4] = {}, out[4] = {};
        for (int c = 0; c < 4; c++) v[c] = column + c < a.value_dim ? element(a.v, a.value_kind, values + c) : 0.0f;
        wait_for_block();
#pragma unroll
        for (int i = 0; i < OWN; i++)
            for (int c = 0; c < 4; c++) {
                state[i][c] *= decay;
                read[c] += keys[first_key + i * KEYS_AT_ONCE] * state[i][c];
            }
        sum_over_warps(read, exchange, warp, lane);
#pragma unroll
        for (int i = 0; i < OWN; i++)
            for (int c = 0; c < 4; c++) {
                state[i][c] += keys[first_key + i * KEYS_AT_ONCE] * (beta * (v[c] - read[c]));
                if (a.limits_state) state[i][c] = limited(state[i][c], a.state_limits);
                out[c] += queries[first_key + i * KEYS_AT_ONCE] * state[i][c];
            }
        sum_over_warps(out, exchange + RECURRENT_WARPS * RECURRENT_COLUMNS, warp, lane);
        if (warp == 0 && lane < 16)
            for (int c = 0; c < 4; c++)
                if (column + c < a.value_dim) {
                    float x = put_element(a.out, a.value_kind, values + c, out[c]);
                    if (a.out_flag) seen(out_flag, x);
                }
    }

    if (is_whole) {
        float* to = a.state + first;
#pragma unroll
        for (int i = 0; i < OWN; i++, to += next)
            *(float4*)to = float4{state[i][0], state[i][1], state[i][2], state[i][3]};
    } else {
#pragma unroll
        for (int i = 0; i < OWN; i++)
            for (int c = 0; c < 4; c++)
                if (first_key + i * KEYS_AT_ONCE < a.key_dim && column + c < a.value_dim)
                    a.state[first + i * next + c] = state[i][c];
    }
    if (a.state_flag) {  // what is missing is zero, and changes no word
        Flag state_flag = {0, 0};
#pragma unroll
        for (int i = 0; i < OWN; i++)
            for (int c = 0; c < 4; c++) seen(state_flag, state[i][c]);
        raise_flag(a.state_flag, state_flag, lane);
    }
    if (a.out_flag && warp == 0) raise_flag(a.out_flag, out_flag, lane);
}
