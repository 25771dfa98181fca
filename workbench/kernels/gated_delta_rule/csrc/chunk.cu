// Launches of the chunk kernels for what the build names: -DBUILD_ELEMENT=Bfloat16, the padded key size -DBUILD_KEYS=128,
// chunks of -DBUILD_ROWS=64, and blocks of the scan of -DBUILD_WARPS=8 by -DBUILD_KEY_PARTS=2 warps. Plain C functions,
// no torch.
#include "chunk.cuh"

namespace {

// More than 48 KiB of shared memory has to be asked for, once for each kernel and device; as often as not is harmless.
template <typename Kernel>
cudaError_t allow(Kernel kernel, int bytes) {
    return cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

cudaError_t scan(const ChunkArguments& a, int stages, cudaStream_t stream) {
    using Layout = Stage<BUILD_ELEMENT, BUILD_KEYS, BUILD_ROWS, BUILD_WARPS>;
    auto kernel = chunk_scan<BUILD_ELEMENT, BUILD_KEYS, BUILD_ROWS, BUILD_WARPS, BUILD_KEY_PARTS>;
    int bytes = stages * Layout::bytes(a.u != nullptr) + Layout::exchange_bytes(BUILD_KEY_PARTS);
    int parts = (a.value_dim + Layout::COLUMNS - 1) / Layout::COLUMNS;
    if (cudaError_t error = allow(kernel, bytes)) return error;
    kernel<<<parts * a.value_heads * a.sequences, 32 * BUILD_WARPS * BUILD_KEY_PARTS, bytes, stream>>>(a, stages);
    return cudaGetLastError();
}

}  // namespace

extern "C" {

// Both kernels on a stream of the current device, with `stages` chunks in shared memory; 0 or a cudaError.
int launch_chunks(const ChunkArguments* a, int stages, void* stream) {
    using Layout = Prepared<BUILD_ELEMENT, BUILD_KEYS, BUILD_ROWS>;
    auto prepare = chunk_prepare<BUILD_ELEMENT, BUILD_KEYS, BUILD_ROWS>;
    int bytes = Layout::bytes();
    if (a->chunks > 0) {
        if (cudaError_t error = allow(prepare, bytes)) return error;
        prepare<<<dim3(a->chunks, a->value_heads), Layout::THREADS, bytes, (cudaStream_t)stream>>>(*a);
        if (cudaError_t error = cudaGetLastError()) return error;
    }
    return scan(*a, stages, (cudaStream_t)stream);
}

const char* error_text(int error) { return cudaGetErrorString((cudaError_t)error); }
}
