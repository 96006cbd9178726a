// summarize for the quest selector: element-wise minimum and maximum of complete pages, bf16.
//
// variant: HEAD_DIM=128 PAGE=16 KEY_TYPE=0
// variant: HEAD_DIM=64 PAGE=64 KEY_TYPE=3
#include "keys.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#define PAGE 16
#define KEY_TYPE 0
#endif

namespace locks {

constexpr int kDim = HEAD_DIM;
constexpr int kPage = PAGE;
using Source = KeySource<KEY_TYPE, kDim, kPage>;

struct Params {
  const int64_t* keys;  // address of every layer's page view
  const int64_t* slots;
  int64_t page_stride, slot_stride, head_stride;  // of the keys, in elements
  __nv_bfloat16 *low, *high;
  int64_t pages;  // of the record pool
  int kv_heads;
};

// One warp a (slot, layer, KV head); most slots complete no page.
__global__ void envelope_kernel(Params params) {
  wait_for_previous_kernel();
  int64_t slot = params.slots[blockIdx.x];
  if (slot < 0 || slot % kPage != kPage - 1) return;
  int64_t page = slot / kPage, layer = blockIdx.y;
  int head = blockIdx.z, lane = threadIdx.x;
  Source source(params.keys[layer], page * params.page_stride + head * params.head_stride, params.slot_stride);
  int column = lane % Source::kRowLanes * 8, row = lane / Source::kRowLanes;
  typename Source::Cache cache;
  source.fill(cache, row, column);
  float low[8], high[8];
  source.get(cache, 0, row, column, low);
  source.get(cache, 0, row, column, high);
#pragma unroll(Source::kUnroll)
  for (int step = 1; step < Source::kSteps; ++step) {
    float v[8];
    source.get(cache, step, row, column, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      low[i] = fminf(low[i], v[i]);
      high[i] = fmaxf(high[i], v[i]);
    }
  }
  int64_t at = ((layer * params.pages + page) * params.kv_heads + head) * kDim + column;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    for (int step = Source::kRowLanes; step < 32; step *= 2) {
      low[i] = fminf(low[i], __shfl_xor_sync(kFullWarp, low[i], step));
      high[i] = fmaxf(high[i], __shfl_xor_sync(kFullWarp, high[i], step));
    }
    if (row == 0) {
      params.low[at + i] = __float2bfloat16_rn(low[i]);
      params.high[at + i] = __float2bfloat16_rn(high[i]);
    }
  }
}

// Addresses and sizes as integers: the caller (cuda_summarize.py) has checked the tensors.
void envelope(int64_t keys, int64_t layers, int64_t slots, int64_t count, int64_t page_stride, int64_t slot_stride,
              int64_t head_stride, int64_t low, int64_t high, int64_t pages, int64_t kv_heads, int64_t stream) {
  Params params{address<const int64_t>(keys),
                address<const int64_t>(slots),
                page_stride,
                slot_stride,
                head_stride,
                address<__nv_bfloat16>(low),
                address<__nv_bfloat16>(high),
                pages,
                static_cast<int>(kv_heads)};
  dim3 grid(static_cast<unsigned>(count), static_cast<unsigned>(layers), static_cast<unsigned>(kv_heads));
  launch(envelope_kernel, grid, 32, 0, stream, 1, params);
}

}  // namespace locks

TVM_FFI_DLL_EXPORT_TYPED_FUNC(envelope, locks::envelope);
