// Launch of the recurrent kernel. A plain C function, no torch.
#include "recurrent.cuh"

namespace {

template <int KEYS>
cudaError_t launch(const RecurrentArguments& a, cudaStream_t stream) {
    int parts = (a.value_dim + RECURRENT_COLUMNS - 1) / RECURRENT_COLUMNS;
    int bytes = (2 * KEYS + 2 * RECURRENT_WARPS * RECURRENT_COLUMNS) * (int)sizeof(float);
    recurrent<KEYS><<<parts * a.value_heads * a.sequences, 32 * RECURRENT_WARPS, bytes, stream>>>(a);
    return cudaGetLastError();
}

}  // namespace

extern "C" {

// On a stream of the current device; 0 or a cudaError. For key sizes up to 256.
int launch_recurrent(const RecurrentArguments* a, void* stream) {
    if (a->key_dim <= 64) return launch<64>(*a, (cudaStream_t)stream);
    if (a->key_dim <= 128) return launch<128>(*a, (cudaStream_t)stream);
    return launch<256>(*a, (cudaStream_t)stream);
}

const char* error_text(int error) { return cudaGetErrorString((cudaError_t)error); }
}
