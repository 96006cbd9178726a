// Merging the warps of a block and the blocks of a cluster, and writing the output.
#pragma once

#include "attend_warp.cuh"

namespace locks {

constexpr int kMostPeers = 16;
constexpr int kMostItems = kHeads * kDim / 4;  // of four floats of the output each

// How the items (fours) of [group x kDim] are dealt to the blocks of a cluster.
struct alignas(16) Slices {
  static constexpr int kShift = 20;
  int items, peers, stride, inverse;
  __device__ __forceinline__ void deal(int all, int blocks) {
    items = all, peers = blocks;
    stride = (items + peers - 1) / peers;
    inverse = ((1 << kShift) + stride - 1) / stride;
  }
  __device__ __forceinline__ int begin(int rank) const { return min(items, stride * rank); }
  // item / stride: exact for the 2^10 items that there are at most.
  __device__ __forceinline__ int owner(int item) const { return item * inverse >> kShift; }
};
static_assert(kMostItems <= 1 << 10, "Slices::owner");

struct Shared {
  Queries queries;
  alignas(16) float output[kWarps][kHeads * kPitch];
  alignas(16) float peak[kHeads][kWarps];
  alignas(16) float total[kHeads][kWarps];
  // What the blocks of the cluster send: this block's slice of their outputs, all their sums.
  alignas(16) float4 inbox[kMostItems + kMostPeers];
  float2 inbox_sums[kMostPeers][kHeads];
  uint64_t arrived;  // barrier that counts the bytes of the two
  Slices slices;     // here since registers are short while tiles are worked on
  int last;
};

// ---- merging the warps ----------------------------------------------------------------------------

static_assert(kWarps % 4 == 0, "the warps' values of a head are read four at a time");

// The warps' values of a head, one by one.
template <typename Take>
__device__ __forceinline__ void for_each_warp(const float (&values)[kWarps], const Take& take) {
#pragma unroll
  for (int w = 0; w < kWarps; w += 4) {
    float4 v = *reinterpret_cast<const float4*>(&values[w]);
    take(v.x), take(v.y), take(v.z), take(v.w);
  }
}

// The warps' outputs, relative to the block's maxima, to shared memory.
__device__ __forceinline__ void stage_warps(Shared& shared, Accumulator& acc) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (g == 0) shared.peak[8 * n + 2 * t + j][warp] = acc.peak[n][j];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) acc.total[n][j] += __shfl_xor_sync(kFullWarp, acc.total[n][j], step);
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int head = 8 * n + 2 * t + j;
      float top = kLow;
      for_each_warp(shared.peak[head], [&](float peak) { top = fmaxf(top, peak); });
      float weight = exp2_approx(acc.peak[n][j] - top);
      if (g == 0) shared.total[head][warp] = acc.total[n][j] * weight;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float4 half[2];  // dimensions 64 c + 8 g + {0..3} and {4..7}
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float(&low)[4] = acc.output[n][c][2 * i], (&high)[4] = acc.output[n][c][2 * i + 1];
          half[i] = make_float4(low[j] * weight, low[j + 2] * weight, high[j] * weight, high[j + 2] * weight);
        }
        // Odd g write their second half first, where even ones write other banks.
        bool odd = g % 2;
        float* at = &shared.output[warp][head * kPitch + 64 * c + 8 * g];
        *reinterpret_cast<float4*>(at + (odd ? 4 : 0)) = odd ? half[1] : half[0];
        *reinterpret_cast<float4*>(at + (odd ? 0 : 4)) = odd ? half[0] : half[1];
      }
    }
  }
  __syncthreads();
}

// ---- clusters -------------------------------------------------------------------------------------

// Tells the peers that this block has started and its barrier is there; nothing else needs to be visible.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ uint32_t peer_address(const void* pointer, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
  return address;
}

// Asynchronous stores to a peer, whose barrier counts their bytes.
__device__ __forceinline__ void send(Shared& shared, float4* target, int rank, float4 v) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(
          peer_address(target, rank)),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(peer_address(&shared.arrived, rank))
      : "memory");
}

__device__ __forceinline__ void send(Shared& shared, float2* target, int rank, float2 v) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(
          peer_address(target, rank)),
      "f"(v.x), "f"(v.y), "r"(peer_address(&shared.arrived, rank))
      : "memory");
}

// Deals the slices and makes the barrier ready for everything that the peers send.  One thread calls it.
__device__ __forceinline__ void open_inbox(Shared& shared, int peers, int rank, int group) {
  uint32_t arrived = shared_address(&shared.arrived);
  Slices slices;
  slices.deal(group * (kDim / 4), peers);
  shared.slices = slices;
  int items = slices.begin(rank + 1) - slices.begin(rank);
  int bytes = slices.peers * (items * static_cast<int>(sizeof(float4)) + group * static_cast<int>(sizeof(float2)));
  barrier_init(arrived, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived), "r"(bytes) : "memory");
}

// Waits until all of it is there, and can be read.
__device__ __forceinline__ void wait_for_inbox(Shared& shared) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again%=;\n"
      "}\n" ::"r"(shared_address(&shared.arrived))
      : "memory");
}

// Sums the block's warps and sends every peer its slice.
__device__ __forceinline__ void send_slices(Shared& shared, const Slices& slices, int rank, int group) {
#pragma unroll 1
  for (int item = threadIdx.x; item < slices.items; item += kThreads) {
    int at = item / (kDim / 4) * kPitch + item % (kDim / 4) * 4;
    float4 sum = *reinterpret_cast<float4*>(&shared.output[0][at]);
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      float4 v = *reinterpret_cast<float4*>(&shared.output[w][at]);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    int owner = slices.owner(item);
    send(shared, &shared.inbox[rank * slices.stride + item - slices.begin(owner)], owner, sum);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < slices.peers * kHeads; i += kThreads) {
    int head = i % kHeads;
    if (head >= group) continue;
    float top = kLow, total = 0.f;
    for_each_warp(shared.peak[head], [&](float peak) { top = fmaxf(top, peak); });
    for_each_warp(shared.total[head], [&](float sum) { total += sum; });
    send(shared, &shared.inbox_sums[rank][head], i / kHeads, make_float2(top, total));
  }
}

// ---- merging the parts of an item -----------------------------------------------------------------

constexpr int kItemLanes = 4;                // that share the parts of an item
constexpr int kWarpItems = 32 / kItemLanes;  // items of a warp: lane % kWarpItems is the item, the rest the part

// Combination of parts that are each relative to their own maximum.
struct Merged {
  float peak = kLow, total = 0.f;
  float4 output = make_float4(0.f, 0.f, 0.f, 0.f);

  __device__ __forceinline__ void scale(float weight) {
    total *= weight;
    output.x *= weight, output.y *= weight, output.z *= weight, output.w *= weight;
  }
  template <int kParts>
  __device__ __forceinline__ void add(const float2 (&sums)[kParts], const float4 (&v)[kParts]) {
    float top = peak;
#pragma unroll
    for (int i = 0; i < kParts; ++i) top = fmaxf(top, sums[i].x);
    scale(exp2_approx(peak - top));
    peak = top;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      float weight = exp2_approx(sums[i].x - top);
      total += sums[i].y * weight;
      output.x += v[i].x * weight;
      output.y += v[i].y * weight;
      output.z += v[i].z * weight;
      output.w += v[i].w * weight;
    }
  }
  // With the other lanes of the item; all of them get the result.
  __device__ __forceinline__ void join() {
    float top = peak;
#pragma unroll
    for (int step = kWarpItems; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, step));
    scale(exp2_approx(peak - top));
    peak = top;
#pragma unroll
    for (int step = kWarpItems; step < 32; step *= 2) {
      total += __shfl_xor_sync(kFullWarp, total, step);
      output.x += __shfl_xor_sync(kFullWarp, output.x, step);
      output.y += __shfl_xor_sync(kFullWarp, output.y, step);
      output.z += __shfl_xor_sync(kFullWarp, output.z, step);
      output.w += __shfl_xor_sync(kFullWarp, output.w, step);
    }
  }
};

// All parts of the lane's item, always in the same order.  A lane has four loads in flight.
template <typename Load>
__device__ __forceinline__ Merged merge_parts(int parts, const Load& load) {
  constexpr int kBatch = 4;
  Merged merged;
#pragma unroll 1
  for (int first = threadIdx.x % 32 / kWarpItems; first < parts; first += kBatch * kItemLanes) {
    float2 sums[kBatch];
    float4 v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      sums[i] = make_float2(kLow, 0.f);
      v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (first + i * kItemLanes < parts) load(first + i * kItemLanes, sums[i], v[i]);
    }
    merged.add(sums, v);
  }
  merged.join();
  return merged;
}

// Calls body(item, whether this lane writes its result) in whole warps; no item is left out.
template <typename Body>
__device__ __forceinline__ void for_each_item(int first, int stop, const Body& body) {
  int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int at = first + threadIdx.x / 32 * kWarpItems; at < stop; at += kWarps * kWarpItems) {
    int item = at + lane % kWarpItems;
    body(min(item, stop - 1), lane < kWarpItems && item < stop);
  }
}

__device__ __forceinline__ void write_output(const Params& params, const Merged& merged, int64_t row_head, int item) {
  int member = item / (kDim / 4), dim = item % (kDim / 4) * 4;
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
