// Finding the last chosen page: histograms over ever smaller ranges of keys, then a ranking.
//
// A key is the bit pattern of a page's share (a positive float), which sorts as the share does.
#pragma once

#include "select_team.cuh"

namespace locks {

// Keys from `low` to `high`, both included.
struct KeyRange {
  unsigned low, high;
  __device__ __forceinline__ bool holds(unsigned key) const { return low <= key && key <= high; }
};

// The key of pages that are always chosen is above all ranges.
constexpr unsigned kFixed = ~0u;
constexpr KeyRange kNoKeys{kFixed - 1, kFixed - 1};

// Bins of the first histogram: 16 an octave of shares from 2^-32 to 1, the ends take the rest.
constexpr unsigned kLowest = (127u - 32u) << 23;
constexpr int kBinShift = 19;

__device__ __forceinline__ unsigned share_bin(unsigned key) {
  return key <= kLowest ? 0u : min((key - kLowest) >> kBinShift, kBins - 1u);
}

__device__ __forceinline__ KeyRange range_of_bin(unsigned bin) {
  return KeyRange{bin == 0 ? 0u : kLowest + (bin << kBinShift),
                  bin == kBins - 1 ? kNoKeys.low - 1u : kLowest + ((bin + 1) << kBinShift) - 1u};
}

// The block that keeps a bin of a joint histogram: eight neighbours (32 bytes) together, dealt round.
__device__ __forceinline__ int bin_owner(const Team& team, unsigned bin) { return (bin >> 3) & (team.size - 1); }

// Adds this block's histogram to the joint one and clears it; the first time all blocks get its limits.
__device__ __forceinline__ void add_histogram(Shared& shared, Team& team, unsigned* histogram, bool first) {
  __syncthreads();
  const unsigned bin = threadIdx.x, found = shared.local[bin];
  if (found) {
    atomicAdd(team.at(&histogram[bin], bin_owner(team, bin)), found);
    shared.local[bin] = 0;
  }
  if (first && threadIdx.x < team.size) {
    atomicMin(team.at(&shared.limits.lowest, threadIdx.x), shared.own_limits.lowest);
    atomicMax(team.at(&shared.limits.highest, threadIdx.x), shared.own_limits.highest);
  }
  team.sync();
}

// Finds, in a joint histogram, the bin that holds the `need`-th largest key: shared.found_bin, in
// shared.found_above the keys in higher bins, in shared.found_count those in it.
__device__ __forceinline__ void find_bin(Shared& shared, Team& team, unsigned* histogram, unsigned need) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // The first thread has the highest bin.
  const unsigned bin = kBins - 1 - threadIdx.x;
  const unsigned own = *team.at(&histogram[bin], bin_owner(team, bin));
  const unsigned sum = sum_to_lane(own);
  if (lane == 31) shared.warp_sums[warp] = sum;
  __syncthreads();
  const unsigned before =
      sum - own + __reduce_add_sync(kFullWarp, lane < warp ? shared.warp_sums[lane] : 0u);
  if (before < need && need <= before + own) {
    shared.found_bin = bin;
    shared.found_above = before;
    shared.found_count = own;
  }
  __syncthreads();
}

struct Threshold {
  KeyRange range;  // holds the last chosen page; all pages above it are chosen
  int need;        // how many of the pages in the range are
  bool tied;       // the range is one key with too many pages to rank: the lower pages are chosen
};

// What the first histogram counts: all but the pages that are always chosen.
constexpr KeyRange kRankedKeys{0u, kNoKeys.low - 1u};

// Narrows the keys down to a range that holds the `need`-th largest one (need >= 1) and few others.
// shared.local holds the first histogram of this block; the team has synchronised since the first
// two joint ones were cleared.
__device__ __forceinline__ Threshold find_threshold(Shared& shared, Team& team, const unsigned* keys, int count,
                                                    int need) {
  KeyRange range = kRankedKeys;
#pragma unroll 1
  for (int level = 0;; ++level) {
    const int shift = max(0, 23 - __clz(range.high - range.low));
    static_assert(kBins == 1 << 9, "a range is split into at most kBins parts");
    if (level > 0) {
#pragma unroll 1
      for (int i = threadIdx.x; i < count; i += kSelectThreads) {
        const unsigned key = keys[i];
        if (range.holds(key)) atomicAdd(&shared.local[(key - range.low) >> shift], 1u);
      }
    }
    unsigned* histogram = shared.histogram[level % 3];
    add_histogram(shared, team, histogram, level == 0);
    // All blocks have read the one of the level before: it is the next but one.
    shared.histogram[(level + 2) % 3][threadIdx.x] = 0;
    find_bin(shared, team, histogram, need);
    need -= shared.found_above;
    if (level == 0) {
      // No wider than the keys are apart: flat attention needs few further levels, equal keys none.
      range = range_of_bin(shared.found_bin);
      range = KeyRange{max(range.low, shared.limits.lowest), min(range.high, shared.limits.highest)};
    } else {
      range.low += shared.found_bin << shift;
      range.high = range.low + min(range.high - range.low, (1u << shift) - 1u);
    }
    const bool few = shared.found_count <= kMostCandidates;
    if (few || range.low == range.high) return Threshold{range, need, !few};
  }
}

// What each block learns of the blocks before it: pages above the range, and pages in it.
__device__ __forceinline__ void count_before(Shared& shared, Team& team) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) {
    int count = 0, equal = 0, above = 0;
    if (lane < team.size) {
      count = *team.at(&shared.candidates, lane);
      equal = *team.at(&shared.equal, lane);
      above = *team.at(&shared.above, lane);
    }
    const int sum = sum_to_lane<kMaxCluster>(count);
    if (lane < team.size) shared.from[lane + 1] = sum;
    above = __reduce_add_sync(kFullWarp, lane < team.rank ? above : 0);
    equal = __reduce_add_sync(kFullWarp, lane < team.rank ? equal : 0);
    if (lane == 0) {
      shared.from[0] = 0;
      shared.above_before = above;
      shared.equal_before = equal;
      shared.chosen_before = 0;
    }
  }
  __syncthreads();
}

// Ranks the candidates of all blocks, in shared.all: shared.last becomes the `need`-th best, and
// shared.chosen_before the chosen ones of earlier blocks.
__device__ __forceinline__ void rank_candidates(Shared& shared, Team& team, int need) {
  const int total = shared.from[team.size];
  Candidate mine{0u, 0};
  int block = 0;
  if (threadIdx.x < total) {
    while (threadIdx.x >= shared.from[block + 1]) ++block;
    mine = *team.at(&shared.own[threadIdx.x - shared.from[block]], block);
    shared.all[threadIdx.x] = mine;
  }
  __syncthreads();
  if (threadIdx.x < total) {
    int better = 0;
#pragma unroll 4
    for (int i = 0; i < total; ++i) {
      const Candidate other = shared.all[i];
      better += other.key > mine.key || (other.key == mine.key && other.page < mine.page);
    }
    if (better == need - 1) shared.last = mine;
    if (better < need && block < team.rank) atomicAdd(&shared.chosen_before, 1);
  }
  __syncthreads();
}

}  // namespace locks
