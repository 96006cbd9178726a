// summarize for the quest selector: element-wise minimum and maximum of complete pages, bf16.
//
// variant: HEAD_DIM=128 PAGE=16 KEY_TYPE=0
// variant: HEAD_DIM=64 PAGE=64 KEY_TYPE=3
#include "completed.cuh"
#include "keys.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#define PAGE 16
#define KEY_TYPE 0
#endif

namespace locks {

constexpr int kDim = HEAD_DIM;
constexpr int kPage = PAGE;
constexpr int kThreads = 128;
constexpr int kMostSlots = 4 * kPage;  // of a block
constexpr int kRowLanes = kDim / 8;    // lanes a token, 8 dimensions each
using Key = KeyType<KEY_TYPE>;

struct Params {
  const int64_t* keys;  // address of every layer's page view
  const int64_t* slots;
  int64_t count;
  int64_t page_stride, slot_stride, head_stride;  // of the keys, in bytes
  __nv_bfloat16 *low, *high;
  int64_t pages;  // of the record pool
  int kv_heads;
};

// One warp, one page and KV head; the other lanes of a column hold other tokens.
__device__ __forceinline__ void envelope_of(const unsigned char* keys, int64_t slot_bytes, __nv_bfloat16* low_plane,
                                            __nv_bfloat16* high_plane) {
  int lane = threadIdx.x % 32, column = lane % kRowLanes * 8;
  const float infinity = __uint_as_float(0x7f800000u);
  float low[8], high[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) low[i] = infinity, high[i] = -infinity;
#pragma unroll 8
  for (int token = lane / kRowLanes; token < kPage; token += 32 / kRowLanes) {
    uint32_t words[4];
    Key::words(Key::load(keys + token * slot_bytes + column * Key::kBytes), words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 v = Key::pair(Key::finite(words[i]));
      low[2 * i] = fminf(low[2 * i], v.x), high[2 * i] = fmaxf(high[2 * i], v.x);
      low[2 * i + 1] = fminf(low[2 * i + 1], v.y), high[2 * i + 1] = fmaxf(high[2 * i + 1], v.y);
    }
  }
  uint32_t lows[4], highs[4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int step = kRowLanes; step < 32; step *= 2) {
      low[i] = fminf(low[i], __shfl_xor_sync(kFullWarp, low[i], step));
      high[i] = fmaxf(high[i], __shfl_xor_sync(kFullWarp, high[i], step));
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    lows[i] = KeyType<kBf16>::pack(low[2 * i], low[2 * i + 1]);
    highs[i] = KeyType<kBf16>::pack(high[2 * i], high[2 * i + 1]);
  }
  if (lane < kRowLanes) {
    *reinterpret_cast<uint4*>(low_plane + column) = make_uint4(lows[0], lows[1], lows[2], lows[3]);
    *reinterpret_cast<uint4*>(high_plane + column) = make_uint4(highs[0], highs[1], highs[2], highs[3]);
  }
}

__global__ void __launch_bounds__(kThreads) envelope_kernel(Params params) {
  __shared__ int list[kMostSlots];
  __shared__ int count;
  wait_for_previous_kernel();
  int64_t first = static_cast<int64_t>(blockIdx.x) * kMostSlots, layer = blockIdx.y;
  int found = list_completed<kPage>(params.slots, params.count, first, kMostSlots, list, &count);
  if (found == 0) return;
  const unsigned char* keys = reinterpret_cast<const unsigned char*>(params.keys[layer]);
  for (int task = threadIdx.x / 32; task < found * params.kv_heads; task += kThreads / 32) {
    int64_t page = list[task / params.kv_heads];
    int head = task % params.kv_heads;
    int64_t record = ((layer * params.pages + page) * params.kv_heads + head) * kDim;
    envelope_of(keys + page * params.page_stride + head * params.head_stride, params.slot_stride, params.low + record,
                params.high + record);
  }
}

// Addresses and sizes as integers, strides in elements: the caller (cuda_summarize.py) has checked them.
void envelope(int64_t keys, int64_t layers, int64_t slots, int64_t count, int64_t page_stride, int64_t slot_stride,
              int64_t head_stride, int64_t low, int64_t high, int64_t pages, int64_t kv_heads, int64_t stream) {
  Params params{address<const int64_t>(keys),
                address<const int64_t>(slots),
                count,
                page_stride * Key::kBytes,
                slot_stride * Key::kBytes,
                head_stride * Key::kBytes,
                address<__nv_bfloat16>(low),
                address<__nv_bfloat16>(high),
                pages,
                static_cast<int>(kv_heads)};
  dim3 grid(static_cast<unsigned>((count + kMostSlots - 1) / kMostSlots), static_cast<unsigned>(layers));
  launch(envelope_kernel, grid, kThreads, 0, stream, 1, params);
}

}  // namespace locks

TVM_FFI_DLL_EXPORT_TYPED_FUNC(envelope, locks::envelope);
