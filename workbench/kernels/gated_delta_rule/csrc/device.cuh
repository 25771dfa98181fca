// What the kernels of this folder need of a GPU, without a header of CUDA or torch: nvcc, NVRTC and (for tests) a C++
// compiler with a model of a block of threads in KERNEL_HOST_MODEL all compile the very same kernels.
//
// Storage types: Float16 and Bfloat16 are their 16 bits. A tensor core multiplies them from sm_75 (Float16) and sm_80
// (Bfloat16) on; below that, and for float, the same product is made of fp32 multiply-adds.
#pragma once

#ifdef KERNEL_HOST_MODEL
#include KERNEL_HOST_MODEL
#else
#define SHARED_MEMORY(name) extern __shared__ __align__(16) unsigned char name[]
#define DEVICE __device__ __forceinline__
#define ON_BOTH __host__ __device__ __forceinline__
#endif

typedef unsigned short Bits16;
typedef unsigned int Bits32;

struct Float16 {
    Bits16 bits;
};
struct Bfloat16 {
    Bits16 bits;
};

// An unused stretch at the end of each row of shared memory, in bytes: eight rows that one instruction reads begin in
// different banks. 16 bytes is the least that keeps rows aligned for ldmatrix and 16-byte copies; 0 to measure without.
#ifndef ROW_PADDING_BYTES
#define ROW_PADDING_BYTES 16
#endif

template <typename T>
ON_BOTH constexpr int row_padding() {
    return ROW_PADDING_BYTES / (int)sizeof(T);
}

// ---- one instruction each, and what a host model has in their place

#ifndef KERNEL_HOST_MODEL
DEVICE Bits32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(Bits32 x) { return __uint_as_float(x); }
DEVICE float exp_of(float x) { return expf(x); }
DEVICE float exp2_of(float x) { return exp2f(x); }
DEVICE Bits32 from_lane(Bits32 x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE Bits32 from_lane_xor(Bits32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE void wait_for_warp() { __syncwarp(); }
DEVICE void wait_for_block() { __syncthreads(); }
DEVICE void raise_to(int* word, int value) { atomicMax(word, value); }

DEVICE Bits16 float16_bits(float x) {
    Bits16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
DEVICE float float16_value(Bits16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// 16 bytes from global to shared memory, zero where `is_there` is false; complete after `copies_have_landed`.
DEVICE void copy_16_bytes(void* shared, const void* global, bool is_there) {
#if __CUDA_ARCH__ >= 800
    Bits32 address = (Bits32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(is_there ? 16 : 0)
                 : "memory");
#else
    *(uint4*)shared = is_there ? *(const uint4*)global : make_uint4(0, 0, 0, 0);
#endif
}
DEVICE void end_of_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most `still_open` groups of this thread's copies are under way.
template <int still_open>
DEVICE void copies_have_landed() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(still_open) : "memory");
#endif
}

#if __CUDA_ARCH__ >= 750
// Four 8 x 8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void load_matrices(Bits32 (&x)[4], const void* row) {
    Bits32 address = (Bits32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}
DEVICE void load_matrices_transposed(Bits32 (&x)[4], const void* row) {
    Bits32 address = (Bits32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}
#endif

#if __CUDA_ARCH__ >= 800
#define HAS_TENSOR_CORE(T) (sizeof(T) == 2)
#elif __CUDA_ARCH__ >= 750
#define HAS_TENSOR_CORE(T) is_float16<T>()
#else
#define HAS_TENSOR_CORE(T) false
#endif
#endif

DEVICE double from_lane(double x, int lane) {
    union {
        double value;
        Bits32 parts[2];
    } both;
    both.value = x;
    both.parts[0] = from_lane(both.parts[0], lane);
    both.parts[1] = from_lane(both.parts[1], lane);
    return both.value;
}

template <typename T>
DEVICE constexpr bool is_float16() {
    return false;
}
template <>
DEVICE constexpr bool is_float16<Float16>() {
    return true;
}

// ---- conversions, round to nearest even; NaN stays NaN

DEVICE bool is_nan(float x) { return x != x; }

DEVICE Bits16 bfloat16_bits(float x) {
    Bits32 bits = bits_of(x);
    if (is_nan(x)) return (Bits16)(bits >> 16 | 0x40u);
    return (Bits16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
DEVICE float bfloat16_value(Bits16 bits) { return float_of((Bits32)bits << 16); }

DEVICE float value(float x) { return x; }
DEVICE float value(Float16 x) { return float16_value(x.bits); }
DEVICE float value(Bfloat16 x) { return bfloat16_value(x.bits); }

template <typename T>
DEVICE T rounded(float x);
template <>
DEVICE float rounded<float>(float x) {
    return x;
}
template <>
DEVICE Float16 rounded<Float16>(float x) {
    return Float16{float16_bits(x)};
}
template <>
DEVICE Bfloat16 rounded<Bfloat16>(float x) {
    return Bfloat16{bfloat16_bits(x)};
}

// Two neighbours of a row, as a register of a fragment holds them.
template <typename T>
struct Pair {
    Bits32 bits;
};
template <>
struct Pair<float> {
    float first, second;
};

template <typename T>
DEVICE Pair<T> paired(float first, float second) {
    if constexpr (sizeof(T) == 4) {
        return Pair<T>{first, second};
    } else {
#if __CUDA_ARCH__ >= 800 && !defined(KERNEL_HOST_MODEL)
        Pair<T> pair;
        if constexpr (is_float16<T>())
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair.bits) : "f"(second), "f"(first));
        else
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair.bits) : "f"(second), "f"(first));
        return pair;
#else
        return Pair<T>{(Bits32)rounded<T>(first).bits | (Bits32)rounded<T>(second).bits << 16};
#endif
    }
}

// ---- limits of a policy

// Values limited to [low, high]; NaN passes. Without a clamp the limits are infinite.
struct Limits {
    double low, high;
};
template <typename Number>
DEVICE Number limited(Number x, Limits limits) {
    Number low = (Number)limits.low, high = (Number)limits.high;
    x = x < low ? low : x;
    return x > high ? high : x;
}

// ---- flags: bits of the largest value and of the largest -x, at least +0.0; NaN above all in both

struct Flag {
    int high, low;
};
// Bits of floats that are not negative order as integers do; negative ones are below the zero that both words begin at.
DEVICE void seen(Flag& flag, float x) {
    int high = (int)bits_of(x), low = (int)(bits_of(x) ^ 0x80000000u);
    flag.high = high > flag.high ? high : flag.high;
    flag.low = low > flag.low ? low : flag.low;
}
// The flag of the same values rounded to T: rounding keeps their order.
template <typename T>
DEVICE Flag rounded_flag(Flag flag) {
    return Flag{(int)bits_of(value(rounded<T>(float_of((Bits32)flag.high)))),
                (int)bits_of(value(rounded<T>(float_of((Bits32)flag.low))))};
}
// Raises the two words of a tap point by what the lanes of a warp have seen.
DEVICE void raise_flag(int* words, Flag flag, int lane) {
    for (int mask = 16; mask > 0; mask >>= 1) {
        int high = (int)from_lane_xor((Bits32)flag.high, mask), low = (int)from_lane_xor((Bits32)flag.low, mask);
        flag.high = high > flag.high ? high : flag.high;
        flag.low = low > flag.low ? low : flag.low;
    }
    int most = flag.high > flag.low ? flag.high : flag.low;
    bool has_nan = most > 0x7f800000;  // one with a sign has been seen as the largest -x alone
    if (lane == 0) {
        raise_to(words, has_nan ? most : flag.high);
        raise_to(words + 1, has_nan ? most : flag.low);
    }
}

// ---- products of a warp
//
// A warp multiplies a left operand of 16 rows with a right one of 8 columns per tile. Lane l holds of a tile of the
// product, rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next: tile[0], tile[1] of the first row, tile[2],
// tile[3] of the second. So two neighbouring tiles of a product, rounded, are a left operand of 16 columns.

template <typename T>
struct Left {
    Pair<T> x[4];  // (row l / 4, columns 2 (l % 4)), the row 8 below, and both 8 columns on
};

// Two neighbouring tiles, the row l / 4 times scales[0] and the one 8 below times scales[1].
template <typename T>
DEVICE Left<T> left_of(const float (&tile)[4], const float (&next)[4], const float (&scales)[2]) {
    return Left<T>{{paired<T>(tile[0] * scales[0], tile[1] * scales[0]),
                    paired<T>(tile[2] * scales[1], tile[3] * scales[1]),
                    paired<T>(next[0] * scales[0], next[1] * scales[0]),
                    paired<T>(next[2] * scales[1], next[3] * scales[1])}};
}

// 16 rows and columns of a matrix in shared memory, `stride` elements a row.
template <typename T>
DEVICE Left<T> load_left(const T* matrix, int stride, int lane) {
    Left<T> left;
    if constexpr (HAS_TENSOR_CORE(T)) {
        Bits32 x[4];
        load_matrices(x, matrix + (lane % 16) * stride + lane / 16 * 8);
        for (int i = 0; i < 4; i++) left.x[i].bits = x[i];
    } else {
        for (int i = 0; i < 4; i++)
            left.x[i] = *(const Pair<T>*)(matrix + (lane / 4 + i % 2 * 8) * stride + i / 2 * 8 + lane % 4 * 2);
    }
    return left;
}

// Tiles of the transpose of a matrix in shared memory, 8 TILES rows of 16 columns.
template <int TILES, typename T>
DEVICE void load_transposed(float (&tiles)[TILES][4], const T* matrix, int stride, int lane) {
    if constexpr (HAS_TENSOR_CORE(T)) {
        const T* address = matrix + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8;
#pragma unroll
        for (int n = 0; n < TILES; n += 2) {
            Bits32 x[4];
            load_matrices_transposed(x, address + n * 8 * stride);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                tiles[n + i / 2][i % 2 * 2] = value(T{(Bits16)(x[i] & 0xffffu)});
                tiles[n + i / 2][i % 2 * 2 + 1] = value(T{(Bits16)(x[i] >> 16)});
            }
        }
    } else {
#pragma unroll
        for (int n = 0; n < TILES; n++)
            for (int i = 0; i < 4; i++)
                tiles[n][i] = value(matrix[(n * 8 + lane % 4 * 2 + i % 2) * stride + lane / 4 + i / 2 * 8]);
    }
}

#ifndef KERNEL_HOST_MODEL
template <typename T>
DEVICE void multiply_tile(float (&tile)[4], const Left<T>& left, Bits32 upper, Bits32 lower) {
#if __CUDA_ARCH__ >= 800
    if constexpr (is_float16<T>())
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(tile[0]), "+f"(tile[1]), "+f"(tile[2]), "+f"(tile[3])
            : "r"(left.x[0].bits), "r"(left.x[1].bits), "r"(left.x[2].bits), "r"(left.x[3].bits), "r"(upper),
              "r"(lower));
    else
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(tile[0]), "+f"(tile[1]), "+f"(tile[2]), "+f"(tile[3])
            : "r"(left.x[0].bits), "r"(left.x[1].bits), "r"(left.x[2].bits), "r"(left.x[3].bits), "r"(upper),
              "r"(lower));
#elif __CUDA_ARCH__ >= 750
    for (int half = 0; half < 2; half++)  // 8 of the 16 columns of the left operand at a time
        asm(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(tile[0]), "+f"(tile[1]), "+f"(tile[2]), "+f"(tile[3])
            : "r"(left.x[2 * half].bits), "r"(left.x[2 * half + 1].bits), "r"(half ? lower : upper));
#endif
}
#endif

DEVICE float first_of(Pair<float> pair, int lane) { return float_of(from_lane(bits_of(pair.first), lane)); }
DEVICE float second_of(Pair<float> pair, int lane) { return float_of(from_lane(bits_of(pair.second), lane)); }
template <typename T>
DEVICE float first_of(Pair<T> pair, int lane) {
    return value(T{(Bits16)(from_lane(pair.bits, lane) & 0xffffu)});
}
template <typename T>
DEVICE float second_of(Pair<T> pair, int lane) {
    return value(T{(Bits16)(from_lane(pair.bits, lane) >> 16)});
}

// Tiles whose right operands are read before the first of them is multiplied: the reads overlap.
constexpr int TILES_AT_ONCE = 8;

// tiles += left right for `TILES` tiles of 8 columns, of which those before `from` are left out. `right` is in shared
// memory: element (k, n) at [n * stride + k], or at [k * stride + n] where it is IS_ROW_MAJOR.
template <bool IS_ROW_MAJOR, int TILES, typename T>
DEVICE void multiply(float (&tiles)[TILES][4], const Left<T>& left, const T* right, int stride, int lane, int from = 0,
                     int to = TILES) {
    if constexpr (HAS_TENSOR_CORE(T)) {
        int matrix = lane / 8, row = lane % 8;
        const T* address = IS_ROW_MAJOR ? right + (matrix % 2 * 8 + row) * stride + matrix / 2 * 8
                                        : right + (matrix / 2 * 8 + row) * stride + matrix % 2 * 8;
#pragma unroll
        for (int start = 0; start < TILES; start += TILES_AT_ONCE) {
            Bits32 x[TILES_AT_ONCE / 2][4];
#pragma unroll
            for (int n = start; n < start + TILES_AT_ONCE && n < TILES; n += 2) {
                if (n < from || n >= to) continue;
                if constexpr (IS_ROW_MAJOR)
                    load_matrices_transposed(x[(n - start) / 2], address + n * 8);
                else
                    load_matrices(x[(n - start) / 2], address + n * 8 * stride);
            }
#pragma unroll
            for (int n = start; n < start + TILES_AT_ONCE && n < TILES; n += 2) {
                if (n < from || n >= to) continue;
                const Bits32(&right_of)[4] = x[(n - start) / 2];
                multiply_tile<T>(tiles[n], left, right_of[0], right_of[1]);
                multiply_tile<T>(tiles[n + 1], left, right_of[2], right_of[3]);
            }
        }
    } else {
        for (int other = 0; other < 4; other++) {  // the four lanes that hold the left operand's rows of this one
            int source = lane / 4 * 4 + other;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float upper[2] = {first_of(left.x[2 * half], source), second_of(left.x[2 * half], source)};
                float lower[2] = {first_of(left.x[2 * half + 1], source), second_of(left.x[2 * half + 1], source)};
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    if (n < from || n >= to) continue;
                    int column = n * 8 + lane % 4 * 2;
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        int k = half * 8 + other * 2 + i;
                        const T* at = IS_ROW_MAJOR ? right + k * stride + column : right + column * stride + k;
                        float a = value(at[0]), b = value(at[IS_ROW_MAJOR ? 1 : stride]);
                        tiles[n][0] += upper[i] * a;
                        tiles[n][1] += upper[i] * b;
                        tiles[n][2] += lower[i] * a;
                        tiles[n][3] += lower[i] * b;
                    }
                }
            }
        }
    }
}
