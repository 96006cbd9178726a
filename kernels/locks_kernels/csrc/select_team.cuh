// The blocks that choose the pages of one (row, KV head) together, and what they share.
#pragma once

#include <cooperative_groups.h>

#include "schedule.cuh"

#ifndef GROUP
#define GROUP 8
#endif

namespace locks {

namespace cg = cooperative_groups;

constexpr int kGroup = GROUP;
static_assert(kGroup >= 1 && kGroup <= 16, "query heads a KV head");
constexpr int kGroupPower = kGroup <= 1 ? 1 : kGroup <= 2 ? 2 : kGroup <= 4 ? 4 : kGroup <= 8 ? 8 : 16;

constexpr int kSelectThreads = 512;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kMaxCluster = 16;
constexpr int kBins = 2048;
constexpr int kMaxCandidates = kSelectThreads;
// Most pages of a thread that stay in registers, and the pages that are worth a block of their own.
constexpr int kMostHeld = kGroup <= 8 ? 8 : 4;
constexpr int kPagesPerBlock = 2048;

struct LogSum {
  float largest, sum;  // in log2 units: log2(sum) + largest
};

__device__ __forceinline__ LogSum join(LogSum a, LogSum b) {
  float largest = fmaxf(a.largest, b.largest);
  if (largest == -INFINITY) return LogSum{-INFINITY, 0.0f};
  return LogSum{largest,
                a.sum * exp2_approx(a.largest - largest) + b.sum * exp2_approx(b.largest - largest)};
}

struct Candidate {
  unsigned key;
  int page;
};

struct Shared {
  unsigned histogram[3][kBins];  // of all blocks, a bin on one of them; the first one is the shares'
  unsigned local[kBins];
  unsigned warp_sums[kSelectWarps];
  LogSum partial[kSelectWarps][kGroupPower];
  LogSum block_sums[kGroupPower];
  float lse[kGroupPower];
  unsigned found_bin, found_above, found_count;
  int above, equal;                        // pages of this block above the threshold, and at it
  int candidates;                          // pages of this block in the bin of the threshold
  Candidate own[kMaxCandidates];
  Candidate all[kMaxCandidates];
  int from[kMaxCluster + 1];               // where each block's candidates begin in `all`
  int above_before, chosen_before;
  Candidate last;                          // the last chosen candidate
  int counts[kMostHeld][kSelectWarps];     // chosen pages by warp
};

// The blocks that work on one list.
struct Team {
  cg::cluster_group cluster;
  int rank, size;
  __device__ void sync() {
    if (size > 1) {
      cluster.sync();
    } else {
      __syncthreads();
    }
  }
  __device__ void arrive() {
    if (size > 1) cluster.barrier_arrive();
  }
  __device__ void wait() {
    if (size > 1) cluster.barrier_wait();
  }
  template <typename T>
  __device__ T* at(T* address, int block) {
    return size > 1 ? cluster.map_shared_rank(address, block) : address;
  }
};

// Joins the LogSums of a warp's lanes: afterwards lane i has the total of head i % kGroupPower.
__device__ __forceinline__ LogSum join_warp(const LogSum (&own)[kGroupPower]) {
  const int lane = threadIdx.x % 32;
  LogSum totals[kGroupPower];
#pragma unroll
  for (int g = 0; g < kGroupPower; ++g) totals[g] = own[g];
  // Halve the heads that a lane is responsible for while exchanging the other half.
#pragma unroll
  for (int half = kGroupPower / 2; half > 0; half /= 2) {
    const bool upper = lane & half;
#pragma unroll
    for (int g = 0; g < half; ++g) {
      LogSum keep = upper ? totals[g + half] : totals[g], give = upper ? totals[g] : totals[g + half];
      totals[g] = join(keep, LogSum{__shfl_xor_sync(kFullWarp, give.largest, half),
                                    __shfl_xor_sync(kFullWarp, give.sum, half)});
    }
  }
#pragma unroll
  for (int step = kGroupPower; step < 32; step *= 2) {
    totals[0] = join(totals[0], LogSum{__shfl_xor_sync(kFullWarp, totals[0].largest, step),
                                       __shfl_xor_sync(kFullWarp, totals[0].sum, step)});
  }
  return totals[0];
}

// LSE of each query head over the team's pages, from each thread's part.
__device__ __forceinline__ void join_team(Shared& shared, Team& team, const LogSum (&own)[kGroupPower]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  LogSum total = join_warp(own);
  if (lane < kGroupPower) shared.partial[warp][lane] = total;
  __syncthreads();
  // Thread (head, warp): 16 neighbouring lanes hold what they join.
  const int head = threadIdx.x / kSelectWarps, other = threadIdx.x % kSelectWarps;
  if (threadIdx.x < kGroupPower * kSelectWarps) {
    total = shared.partial[other][head];
  }
  auto join_16 = [&] {
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
      total = join(total, LogSum{__shfl_xor_sync(kFullWarp, total.largest, step),
                                 __shfl_xor_sync(kFullWarp, total.sum, step)});
    }
  };
  static_assert(kSelectWarps == 16 && kMaxCluster == 16, "join_16");
  join_16();
  if (team.size > 1) {
    if (threadIdx.x < kGroupPower * kSelectWarps && other == 0) shared.block_sums[head] = total;
    team.sync();
    total = LogSum{-INFINITY, 0.0f};
    if (threadIdx.x < kGroupPower * kSelectWarps && other < team.size) {
      total = *team.at(&shared.block_sums[head], other);
    }
    join_16();
  }
  if (threadIdx.x < kGroupPower * kSelectWarps && other == 0) {
    shared.lse[head] = total.largest + log2_approx(total.sum);
  }
  __syncthreads();
}

}  // namespace locks
