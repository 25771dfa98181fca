// A block of CUDA threads on one CPU thread, for `KERNEL_HOST_MODEL` of the kernels' device.cuh.
//
// Every thread of a block is a context of its own. They run one at a time, each until it waits for its warp or block or
// ends, in an order that is shuffled anew for every round: what needs a barrier and has none goes wrong. Shared memory
// starts as NaN. Exchanges between lanes and products of tensor cores are computed from what all lanes of the warp have
// put down. TENSOR_CORES=0 is a GPU that has none.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#define __global__
#define __launch_bounds__(...)
#define __align__(bytes)
#define __restrict__
#define DEVICE inline
#define ON_BOTH inline
#define SHARED_MEMORY(name) unsigned char* name = block_model::shared.data()

struct float4 {
    float x, y, z, w;
};
struct Index {
    unsigned x = 0, y = 0, z = 0;
};

namespace block_model {

constexpr int LANES = 32, WORDS = 8;
constexpr std::size_t STACK = 1 << 16;

struct Thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK);
    bool is_done = false;
};
struct Barrier {
    int arrived = 0;
    long generation = 0;
};

inline std::vector<unsigned char> shared;
inline std::vector<Thread> threads;
inline std::vector<Barrier> warps;
inline std::vector<unsigned> words;  // [threads, WORDS], what lanes put down for each other
inline Barrier block;
inline ucontext_t scheduler;
inline int current = 0;
inline long arrivals = 0;  // to see that nothing moves any more
inline std::function<void()> body;

inline void wait(Barrier& barrier, int expected) {
    long generation = barrier.generation;
    arrivals++;
    if (++barrier.arrived == expected) {
        barrier.arrived = 0;
        barrier.generation++;
    }
    while (barrier.generation == generation) swapcontext(&threads[current].context, &scheduler);
}
inline void wait_for_warp() { wait(warps[current / LANES], LANES); }

inline void start() {
    body();
    threads[current].is_done = true;
    arrivals++;
}

}  // namespace block_model

inline Index threadIdx, blockIdx;

namespace block_model {

inline void run_block(int count, std::size_t shared_bytes, std::mt19937& order_of) {
    shared.assign(shared_bytes, 0xff);
    threads = std::vector<Thread>(count);
    warps.assign(count / LANES, Barrier{});
    words.assign(std::size_t(count) * WORDS, 0xffffffffu);
    block = Barrier{};
    for (auto& thread : threads) {
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = STACK;
        thread.context.uc_link = &scheduler;
        makecontext(&thread.context, start, 0);
    }
    std::vector<int> order(count);
    std::iota(order.begin(), order.end(), 0);
    for (int done = 0; done < count;) {
        std::shuffle(order.begin(), order.end(), order_of);
        long before = arrivals;
        for (int i : order) {
            if (threads[i].is_done) continue;
            current = i;
            threadIdx.x = unsigned(i);
            swapcontext(&scheduler, &threads[i].context);
            done += threads[i].is_done;
        }
        if (arrivals == before && done < count) {
            std::fprintf(stderr, "block_model: a barrier that not all threads reach\n");
            std::abort();
        }
    }
}

// kernel(arguments) for every block of a grid of x times y.
template <typename Kernel>
void launch(unsigned x, unsigned y, int count, std::size_t shared_bytes, unsigned seed, Kernel kernel) {
    std::mt19937 order(seed);
    body = kernel;
    for (blockIdx.y = 0; blockIdx.y < y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < x; blockIdx.x++) run_block(count, shared_bytes, order);
}

}  // namespace block_model

inline unsigned bits_of(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float float_of(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline float exp_of(float x) { return std::exp(x); }
inline float exp2_of(float x) { return std::exp2(x); }
inline void wait_for_warp() { block_model::wait_for_warp(); }
inline void wait_for_block() { block_model::wait(block_model::block, int(block_model::threads.size())); }
inline void raise_to(int* word, int value) { *word = value > *word ? value : *word; }

inline unsigned* words_of(int lane) {
    return &block_model::words[(block_model::current / block_model::LANES * block_model::LANES + lane) *
                               block_model::WORDS];
}
inline int own_lane() { return block_model::current % block_model::LANES; }

inline unsigned from_lane(unsigned x, int lane) {
    words_of(own_lane())[0] = x;
    wait_for_warp();
    unsigned found = words_of(lane)[0];
    wait_for_warp();
    return found;
}
inline unsigned from_lane_xor(unsigned x, int mask) { return from_lane(x, own_lane() ^ mask); }

inline float float16_value(unsigned short bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                 : exponent == 0 ? std::ldexp(float(fraction), -24)
                                 : std::ldexp(float(1024 + fraction), exponent - 25);
    return bits >> 15 ? -size : size;
}
inline unsigned short float16_bits(float x) {
    unsigned short sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return 0x7fff;
    double size = std::fabs(double(x));
    if (size >= 65520.0) return sign | 0x7c00;
    int exponent = size < std::ldexp(1.0, -14) ? -14 : std::ilogb(size);
    int units = int(std::nearbyint(std::ldexp(size, 10 - exponent)));  // to even
    return (unsigned short)(sign | (units < 1024 ? units : ((exponent + 14) << 10) + units));
}

inline void copy_16_bytes(void* to, const void* from, bool is_there) {
    if (is_there)
        std::memcpy(to, from, 16);
    else
        std::memset(to, 0, 16);
}
inline void end_of_copies() {}
template <int still_open>
inline void copies_have_landed() {}

#define HAS_TENSOR_CORE(T) (TENSOR_CORES && sizeof(T) == 2)

template <bool IS_TRANSPOSED>
inline void matrices(unsigned (&x)[4], const void* row) {
    std::memcpy(words_of(own_lane()), &row, sizeof(row));
    wait_for_warp();
    int lane = own_lane();
    for (int matrix = 0; matrix < 4; matrix++) {
        unsigned short pair[2];
        for (int i = 0; i < 2; i++) {
            int at = IS_TRANSPOSED ? lane % 4 * 2 + i : lane / 4, element = IS_TRANSPOSED ? lane / 4 : lane % 4 * 2 + i;
            const unsigned short* address;
            std::memcpy(&address, words_of(matrix * 8 + at), sizeof(address));
            pair[i] = address[element];
        }
        x[matrix] = pair[0] | unsigned(pair[1]) << 16;
    }
    wait_for_warp();
}
inline void load_matrices(unsigned (&x)[4], const void* row) { matrices<false>(x, row); }
inline void load_matrices_transposed(unsigned (&x)[4], const void* row) { matrices<true>(x, row); }

template <typename T>
struct Left;
template <typename T>
inline void multiply_tile(float (&tile)[4], const Left<T>& left, unsigned upper, unsigned lower);
