// Launches of the chunk kernels for one dtype, one padded key size and one chunk, which the build names:
// -DELEMENT=Bfloat16 -DKEYS=128 -DROWS=64. Plain C functions, no torch.
#include "chunk.cuh"

namespace {

// More than 48 KiB of shared memory has to be asked for, once for each kernel and device; as often as not is harmless.
template <typename Kernel>
cudaError_t allow(Kernel kernel, int bytes) {
    return cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

template <int WARPS, int KEY_PARTS>
cudaError_t scan(const ChunkArguments& a, int stages, cudaStream_t stream) {
    using Layout = Stage<BUILD_ELEMENT, BUILD_KEYS, BUILD_ROWS, WARPS>;
    auto kernel = chunk_scan<BUILD_ELEMENT, BUILD_KEYS, BUILD_ROWS, WARPS, KEY_PARTS>;
    int bytes = stages * Layout::bytes(a.u != nullptr) + Layout::exchange_bytes(KEY_PARTS);
    int parts = (a.value_dim + Layout::COLUMNS - 1) / Layout::COLUMNS;
    if (cudaError_t error = allow(kernel, bytes)) return error;
    kernel<<<parts * a.value_heads * a.sequences, 32 * WARPS * KEY_PARTS, bytes, stream>>>(a, stages);
    return cudaGetLastError();
}

}  // namespace

extern "C" {

// Both kernels on a stream of the current device; 0 or a cudaError. Blocks of the scan have `warps` side by side: 8, or
// 2 of which each shares its columns with a second one.
int launch_chunks(const ChunkArguments* a, int warps, int stages, void* stream) {
    using Layout = Prepared<BUILD_ELEMENT, BUILD_KEYS, BUILD_ROWS>;
    auto prepare = chunk_prepare<BUILD_ELEMENT, BUILD_KEYS, BUILD_ROWS>;
    int bytes = Layout::bytes();
    if (a->chunks > 0) {
        if (cudaError_t error = allow(prepare, bytes)) return error;
        prepare<<<dim3(a->chunks, a->value_heads), Layout::THREADS, bytes, (cudaStream_t)stream>>>(*a);
        if (cudaError_t error = cudaGetLastError()) return error;
    }
    return warps == 8 ? scan<8, 1>(*a, stages, (cudaStream_t)stream) : scan<2, 2>(*a, stages, (cudaStream_t)stream);
}

const char* error_text(int error) { return cudaGetErrorString((cudaError_t)error); }
}
