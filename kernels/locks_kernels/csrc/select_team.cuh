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
constexpr int kBins = kSelectThreads;  // a thread each
// More than this are ranked (every one against all) more slowly than their range is split.
constexpr int kMostCandidates = 128;
// A thread takes 4 neighbouring pages at a time, whose scores of all heads it holds in registers.
constexpr int kRun = 4;
// Pages that a block takes at a time, and that are worth a block of their own.
constexpr int kPagesPerBlock = kRun * kSelectThreads;

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
  unsigned histogram[3][kBins];  // of all blocks, a bin on one of them
  unsigned local[kBins];
  unsigned warp_sums[kSelectWarps];
  LogSum partial[kSelectWarps][kGroupPower];
  LogSum block_sums[kGroupPower];
  float lse[kGroupPower];
  // What exponentials are relative to until the log-sum-exps are known, and what makes them shares then.
  float shift[kGroupPower], scale[kGroupPower];
  // Keys that are ranked lie between these: this block's, and those of all blocks.
  struct { unsigned lowest, highest; } own_limits, limits;
  unsigned found_bin, found_above, found_count;
  int above, equal;  // pages of this block above the threshold, and at it
  int candidates;    // pages of this block in the range of the threshold
  Candidate own[kMostCandidates];
  Candidate all[kMostCandidates];
  int from[kMaxCluster + 1];  // where each block's candidates begin in `all`
  int above_before, equal_before, chosen_before;
  Candidate last;  // the last chosen candidate
  unsigned counts[2][kSelectWarps];
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

// LSE of each query head over the team's pages, from the warps' sums in shared.partial.
__device__ __forceinline__ void join_team(Shared& shared, Team& team) {
  // Thread (head, warp or block): 16 neighbouring lanes hold what they join.
  const int head = threadIdx.x / 16, other = threadIdx.x % 16;
  const bool takes_part = head < kGroupPower;
  LogSum total{-INFINITY, 0.0f};
  auto join_16 = [&] {
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
      total = join(total, LogSum{__shfl_xor_sync(kFullWarp, total.largest, step),
                                 __shfl_xor_sync(kFullWarp, total.sum, step)});
    }
  };
  static_assert(kSelectWarps == 16 && kMaxCluster == 16, "join_16");
  __syncthreads();
  if (takes_part) total = shared.partial[other][head];
  join_16();
  if (team.size > 1) {
    if (takes_part && other == 0) shared.block_sums[head] = total;
    team.sync();
    total = LogSum{-INFINITY, 0.0f};
    if (takes_part && other < team.size) total = *team.at(&shared.block_sums[head], other);
    join_16();
  }
  if (takes_part && other == 0) {
    const float lse = total.largest + log2_approx(total.sum);
    shared.lse[head] = lse;
    shared.scale[head] = exp2_approx(total.largest - lse);
  }
  __syncthreads();
}

}  // namespace locks
