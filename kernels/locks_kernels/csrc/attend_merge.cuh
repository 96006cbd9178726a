// Merging the warps of a block and the blocks of a cluster, and writing the output.
#pragma once

#include "attend_warp.cuh"

namespace locks {

constexpr int kMostPeers = 16;
constexpr int kMostItems = kHeads * kDim / 4;  // of four floats of the output each

struct Shared {
  alignas(16) float output[kWarps][kHeads * kPitch];
  float peak[kWarps][kHeads];
  float total[kWarps][kHeads];
  // What the blocks of the cluster send: this block's slice of their outputs, all their sums.
  alignas(16) float4 inbox[kMostItems + kMostPeers];
  float2 inbox_sums[kMostPeers][kHeads];
  int last;
};

// ---- merging --------------------------------------------------------------------------------------

// The warps' outputs, relative to the block's maxima, to shared memory.
__device__ __forceinline__ void stage_warps(Shared& shared, Accumulator& acc) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) acc.total[n][j] += __shfl_xor_sync(kFullWarp, acc.total[n][j], step);
      if (g == 0) shared.peak[warp][8 * n + 2 * t + j] = acc.peak[n][j];
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int head = 8 * n + 2 * t + j;
      float top = kLow;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared.peak[w][head]);
      float weight = exp2_approx(acc.peak[n][j] - top);
      if (g == 0) shared.total[warp][head] = acc.total[n][j] * weight;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          float2 both = make_float2(acc.output[n][c][pair][j] * weight, acc.output[n][c][pair][j + 2] * weight);
          *reinterpret_cast<float2*>(&shared.output[warp][head * kPitch + 64 * c + 8 * g + 2 * pair]) = both;
        }
      }
    }
  }
  __syncthreads();
}

// ---- clusters -------------------------------------------------------------------------------------

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ uint32_t peer_address(const void* pointer, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
  return address;
}

__device__ __forceinline__ void send(float4* target, int rank, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(peer_address(target, rank)), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
}

__device__ __forceinline__ void send(float2* target, int rank, float2 v) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(peer_address(target, rank)), "f"(v.x), "f"(v.y)
               : "memory");
}

// How the items (fours) of [group x kDim] are dealt to the blocks of a cluster.
struct Slices {
  int items, peers, stride;
  __device__ __forceinline__ Slices(int items, int peers)
      : items(items), peers(peers), stride((items + peers - 1) / peers) {}
  __device__ __forceinline__ int begin(int rank) const { return min(items, stride * rank); }
  __device__ __forceinline__ int owner(int item) const { return item / stride; }
};

// Sums the block's warps and sends every peer its slice.
__device__ __forceinline__ void send_slices(Shared& shared, const Slices& slices, int rank, int group) {
  for (int item = threadIdx.x; item < slices.items; item += kThreads) {
    int at = item / (kDim / 4) * kPitch + item % (kDim / 4) * 4;
    float4 sum = *reinterpret_cast<float4*>(&shared.output[0][at]);
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      float4 v = *reinterpret_cast<float4*>(&shared.output[w][at]);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    int owner = slices.owner(item);
    send(&shared.inbox[rank * slices.stride + item - slices.begin(owner)], owner, sum);
  }
  for (int i = threadIdx.x; i < slices.peers * group; i += kThreads) {
    int head = i % group;
    float top = kLow, total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      top = fmaxf(top, shared.peak[w][head]);
      total += shared.total[w][head];
    }
    send(&shared.inbox_sums[rank][head], i / group, make_float2(top, total));
  }
}

// Running combination of parts that are each relative to their own maximum.
struct Merged {
  float peak = kLow, total = 0.f;
  float4 output = make_float4(0.f, 0.f, 0.f, 0.f);
  __device__ __forceinline__ void add(float2 sums, float4 v) {
    float top = fmaxf(peak, sums.x);
    float keep = exp2_approx(peak - top), weight = exp2_approx(sums.x - top);
    peak = top;
    total = total * keep + sums.y * weight;
    output.x = output.x * keep + v.x * weight;
    output.y = output.y * keep + v.y * weight;
    output.z = output.z * keep + v.z * weight;
    output.w = output.w * keep + v.w * weight;
  }
};

// All parts in order, the loads of kBatch of them in flight together.
template <int kBatch, typename Load>
__device__ __forceinline__ Merged merge_parts(int parts, const Load& load) {
  Merged merged;
  for (int first = 0; first < parts; first += kBatch) {
    float2 sums[kBatch];
    float4 v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) load(min(first + i, parts - 1), sums[i], v[i]);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < parts) merged.add(sums[i], v[i]);
    }
  }
  return merged;
}

__device__ __forceinline__ void write_output(const Params& params, const Merged& merged, int64_t row_head, int member,
                                             int dim) {
  float inverse = merged.total > 0.f ? params.v_scale / merged.total : 0.f;
  int64_t head = row_head * params.group + member;
  float v[4] = {merged.output.x * inverse, merged.output.y * inverse, merged.output.z * inverse,
                merged.output.w * inverse};
  int64_t at = head * kDim + dim;
  if constexpr (Q_TYPE == kBf16) {
    __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(v[0], v[1]), __floats2bfloat162_rn(v[2], v[3])};
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(params.output) + at) = *reinterpret_cast<uint2*>(pairs);
  } else {
    __half2 pairs[2] = {__floats2half2_rn(v[0], v[1]), __floats2half2_rn(v[2], v[3])};
    *reinterpret_cast<uint2*>(static_cast<__half*>(params.output) + at) = *reinterpret_cast<uint2*>(pairs);
  }
  if (dim == 0) {
    params.lse[head] =
        merged.total > 0.f ? (merged.peak + log2_approx(merged.total)) * kLn2 : -__uint_as_float(0x7f800000u);
  }
}

}  // namespace locks
