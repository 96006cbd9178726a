// Exact scores of one page from its keys (paper Eq. 1), by one warp.
#pragma once

#include "common.cuh"

namespace locks {

// Two neighbouring key elements as a packed pair of the query's type.
template <bool kHalf, bool kKeyFp8>
__device__ __forceinline__ uint32_t load_key_pair(const char* keys, int64_t index) {
  if constexpr (kKeyFp8) {
    uint16_t pair = *reinterpret_cast<const uint16_t*>(keys + index);
    __half2_raw half = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
    if constexpr (kHalf) return half.x | static_cast<uint32_t>(half.y) << 16;
    float2 wide = __half22float2(*reinterpret_cast<__half2*>(&half));
    __nv_bfloat162 narrow = __floats2bfloat162_rn(wide.x, wide.y);
    return *reinterpret_cast<uint32_t*>(&narrow);
  } else {
    return *reinterpret_cast<const uint32_t*>(keys + 2 * index);
  }
}

struct KeyPool {
  const char* data;
  int64_t page_stride, token_stride, head_stride;  // in elements
};

// Log-sum-exp over the first `tokens` slots of a page, for query heads n and 8 + n of the group
// (natural-log units, the same in all lanes of quad n).
template <int kDim, int kPage, bool kHalf, bool kKeyFp8>
__device__ __forceinline__ void exact_page_scores(float (&scores)[2], const uint16_t* queries, int64_t query_stride,
                                                  int group, const KeyPool& pool, int64_t page, int head, int tokens,
                                                  float sm_scale) {
  const int lane = threadIdx.x & 31, n = lane >> 2, c = lane & 3;
  constexpr int kTokenTiles = kPage / 8;
  float d[kTokenTiles][4] = {};
  const int64_t base = page * pool.page_stride + head * pool.head_stride;
#pragma unroll
  for (int k = 0; k < kDim; k += 16) {
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int row = n + (i & 1) * 8;
      a[i] = row < group
                 ? *reinterpret_cast<const uint32_t*>(queries + row * query_stride + k + 2 * c + (i >> 1) * 8)
                 : 0u;
    }
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      // Slots past the request's last token hold anything; they are left out.
      int token = tile * 8 + n;
      uint32_t b0 = 0, b1 = 0;
      if (token < tokens) {
        int64_t index = base + token * pool.token_stride + k + 2 * c;
        b0 = load_key_pair<kHalf, kKeyFp8>(pool.data, index);
        b1 = load_key_pair<kHalf, kKeyFp8>(pool.data, index + 8);
      }
      mma_f16_k16<!kHalf>(d[tile], a[0], a[1], a[2], a[3], b0, b1, d[tile]);
    }
  }
  const float scale = sm_scale * kLog2e;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = -INFINITY;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& logit = d[tile][2 * half + i];
        logit = tile * 8 + 2 * c + i < tokens ? logit * scale : -INFINITY;
        largest = fmaxf(largest, logit);
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
    float sum = 0.0f;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      sum += exp2_approx(d[tile][2 * half] - largest) + exp2_approx(d[tile][2 * half + 1] - largest);
    }
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    scores[half] = (largest + log2_approx(sum)) * kLn2;
  }
}

}  // namespace locks
