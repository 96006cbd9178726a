// A block's scores: their sums by query head, and the shares of its pages.
#pragma once

#include "select_search.cuh"

namespace locks {

// A block's scores, a row of `stride` for each query head.
struct Scores {
  const float* at;
  int64_t stride;
};

// Scores of the pages from `i` on, as far as there are; -infinity behind them.
using Run = float[kGroup][kRun];

// kPacked: aligned to 16 bytes, and there is memory behind a row's last page up to the next multiple of kRun.
template <bool kPacked>
__device__ __forceinline__ void load_run(Run& run, const Scores& scores, int i, int count) {
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    const float* from = scores.at + g * scores.stride + i;
    if constexpr (kPacked) {
      const float4 four = i < count ? __ldcg(reinterpret_cast<const float4*>(from)) : float4{};
      run[g][0] = four.x, run[g][1] = four.y, run[g][2] = four.z, run[g][3] = four.w;
    } else {
#pragma unroll
      for (int k = 0; k < kRun; ++k) run[g][k] = i < count ? __ldcg(from + min(k, count - 1 - i)) : 0.0f;
    }
  }
  if (i + kRun > count) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
#pragma unroll
      for (int k = 0; k < kRun; ++k) run[g][k] = i + k < count ? run[g][k] : -INFINITY;
    }
  }
}

// Each lane gets one head's result over the warp: the heads are dealt to groups of neighbouring lanes.
template <typename Join>
__device__ __forceinline__ float reduce_heads(float (&values)[kGroupPower], Join join) {
#pragma unroll
  for (int step = 0; step < 5; ++step) {
    const int mask = 16 >> step, left = kGroupPower >> (step + 1);  // heads that a lane keeps
    const bool upper = threadIdx.x & mask;
    if (left == 0) values[0] = join(values[0], __shfl_xor_sync(kFullWarp, values[0], mask));
#pragma unroll
    for (int i = 0; i < kGroupPower / 2; ++i) {
      if (i >= left) continue;
      const float low = values[i], high = values[i + left];
      values[i] = join(upper ? high : low, __shfl_xor_sync(kFullWarp, upper ? low : high, mask));
    }
  }
  return values[0];
}

// Log-sums of a warp's runs, by head as reduce_heads deals them.
__device__ __forceinline__ LogSum sum_run(const Run& run) {
  constexpr int kLanes = 32 / kGroupPower;
  float values[kGroupPower];
#pragma unroll
  for (int g = 0; g < kGroupPower; ++g) {
    values[g] = g < kGroup ? fmaxf(fmaxf(run[g % kGroup][0], run[g % kGroup][1]),
                                   fmaxf(run[g % kGroup][2], run[g % kGroup][3]))
                           : -INFINITY;
  }
  const float largest = kLog2e * reduce_heads(values, [](float a, float b) { return fmaxf(a, b); });
  const float shift = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
  for (int g = 0; g < kGroupPower; ++g) {
    const float of_head = __shfl_sync(kFullWarp, shift, g * kLanes);
    values[g] = 0.0f;
    if (g < kGroup) {
#pragma unroll
      for (int k = 0; k < kRun; ++k) values[g] += exp2_approx(run[g % kGroup][k] * kLog2e - of_head);
    }
  }
  return LogSum{largest, reduce_heads(values, [](float a, float b) { return a + b; })};
}

// Exponentials relative to the sink's score are used as long as the sums stay below 2^100 of it.
constexpr float kLeastScale = 0x1p-100f;

// What the lanes of a warp have summed, for join_team.
__device__ __forceinline__ void note_sums(Shared& shared, const LogSum& own) {
  constexpr int kLanes = 32 / kGroupPower;
  if (threadIdx.x % kLanes == 0) shared.partial[threadIdx.x / 32][threadIdx.x % 32 / kLanes] = own;
}

// Sums of a warp's runs relative to the heads' shifts, by head as reduce_heads deals them; the runs become
// the exponentials.
__device__ __forceinline__ LogSum exponentiate_run(Run& run, const Shared& shared) {
  constexpr int kLanes = 32 / kGroupPower;
  float values[kGroupPower];
#pragma unroll
  for (int g = 0; g < kGroupPower; ++g) {
    values[g] = 0.0f;
    if (g < kGroup) {
      const float shift = shared.shift[g];
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        run[g % kGroup][k] = exp2_approx(run[g % kGroup][k] * kLog2e - shift);
        values[g] += run[g % kGroup][k];
      }
    }
  }
  const int head = threadIdx.x % 32 / kLanes;
  const float sum = reduce_heads(values, [](float a, float b) { return a + b; });
  return head < kGroup ? LogSum{shared.shift[head], sum} : LogSum{-INFINITY, 0.0f};
}

// Shares of a run's pages, from its scores or their exponentials.  Equal scores give equal shares wherever they
// are, so that ties are ties.
template <bool kExponentials>
__device__ __forceinline__ void add_shares(const Shared& shared, const Run& run, float (&shares)[kRun]) {
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    const float by = kExponentials ? shared.scale[g] : shared.lse[g];
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      if constexpr (kExponentials) {
        shares[k] += run[g][k] * by;
      } else {
        shares[k] += exp2_approx(run[g][k] * kLog2e - by);
      }
    }
  }
}

// Keys of a run, their histogram and limits; the sink and the current page are always chosen.
__device__ __forceinline__ uint4 make_keys(Shared& shared, const float (&shares)[kRun], int i, int begin, int count,
                                           int last_page, unsigned& lowest, unsigned& highest) {
  const KeyRange ranked = kRankedKeys;
  unsigned keys[kRun];
#pragma unroll
  for (int k = 0; k < kRun; ++k) {
    const int page = begin + i + k;
    keys[k] = page == 0 || page == last_page ? kFixed : __float_as_uint(shares[k]);
    if (i + k < count && ranked.holds(keys[k])) {
      atomicAdd(&shared.local[share_bin(keys[k])], 1u);
      lowest = min(lowest, keys[k]);
      highest = max(highest, keys[k]);
    }
  }
  return make_uint4(keys[0], keys[1], keys[2], keys[3]);
}

// The limits of this block from those of its threads.
__device__ __forceinline__ void note_limits(Shared& shared, unsigned lowest, unsigned highest) {
  lowest = __reduce_min_sync(kFullWarp, lowest);
  highest = __reduce_max_sync(kFullWarp, highest);
  if (threadIdx.x % 32 == 0) {
    atomicMin(&shared.own_limits.lowest, lowest);
    atomicMax(&shared.own_limits.highest, highest);
  }
}

}  // namespace locks
