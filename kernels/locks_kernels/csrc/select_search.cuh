// Finding the pages to choose: histograms and candidates, or a radix search for any case.
#pragma once

#include "select_team.cuh"

namespace locks {

struct List {
  const int* table;
  int *pages, *logical;
  __device__ __forceinline__ void put(int slot, int page, int physical) const {
    pages[slot] = physical;
    if (logical) logical[slot] = page;
  }
  __device__ __forceinline__ void put(int slot, int page) const { put(slot, page, table[page]); }
};

// Bin of a share in the first histogram: 64 an octave from 2^-32 to 1, the ends take the rest.
__device__ __forceinline__ unsigned share_bin(unsigned key) {
  constexpr unsigned kLowest = (127u - 32u) << 23;
  return key <= kLowest ? 0u : min((key - kLowest) >> 17, kBins - 1u);
}

// The block that keeps a bin of a joint histogram: four neighbours together, dealt round.
__device__ __forceinline__ int bin_owner(const Team& team, unsigned bin) { return (bin >> 2) & (team.size - 1); }

// Adds this block's histogram to the joint one and clears it.
__device__ __forceinline__ void add_histogram(Shared& shared, Team& team, unsigned* histogram) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kBins / kSelectThreads; ++i) {
    const int bin = i * kSelectThreads + threadIdx.x;
    const unsigned found = shared.local[bin];
    if (found) {
      atomicAdd(team.at(&histogram[bin], bin_owner(team, bin)), found);
      shared.local[bin] = 0;
    }
  }
  team.sync();
}

// Finds, in the joint histogram of one digit, the bin that holds the `need`-th largest key:
// shared.found_bin, and in shared.found_above the keys in higher bins.
__device__ void find_bin(Shared& shared, Team& team, unsigned* histogram, unsigned need) {
  constexpr int kPerThread = kBins / kSelectThreads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Thread t has the bins from the top: kBins - 1 - kPerThread * t and below.
  const int top = kBins - kPerThread * (threadIdx.x + 1);
  const uint4 counts = *reinterpret_cast<const uint4*>(team.at(histogram, bin_owner(team, top)) + top);
  const unsigned bins[kPerThread] = {counts.w, counts.z, counts.y, counts.x};
  unsigned own = bins[0] + bins[1] + bins[2] + bins[3];
  unsigned sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    unsigned other = __shfl_up_sync(kFullWarp, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) shared.warp_sums[warp] = sum;
  __syncthreads();
  unsigned before = sum - own;
#pragma unroll
  for (int i = 0; i < kSelectWarps; ++i) before += i < warp ? shared.warp_sums[i] : 0;
  if (before < need && need <= before + own) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (before < need && need <= before + bins[i]) {
        shared.found_bin = top + kPerThread - 1 - i;
        shared.found_above = before;
        shared.found_count = bins[i];
      }
      before += bins[i];
    }
  }
  __syncthreads();
}

struct Threshold {
  unsigned key;
  unsigned ties;  // how many of the pages with exactly this key are chosen
};

// The key of the `need`-th largest of the team's keys (need >= 1 and at most their number).
__device__ Threshold find_threshold(Shared& shared, Team& team, const unsigned* keys, int count, unsigned need) {
  constexpr int kShifts[3] = {21, 10, 0};
  constexpr unsigned kMasks[3] = {2047, 2047, 1023};
  unsigned prefix = 0, prefix_mask = 0;
#pragma unroll
  for (int pass = 0; pass < 3; ++pass) {
    for (int i = threadIdx.x; i < count; i += kSelectThreads) {
      unsigned key = keys[i];
      if (key != ~0u && (key & prefix_mask) == prefix) {
        atomicAdd(&shared.local[(key >> kShifts[pass]) & kMasks[pass]], 1u);
      }
    }
    add_histogram(shared, team, shared.histogram[pass]);
    find_bin(shared, team, shared.histogram[pass], need);
    prefix |= shared.found_bin << kShifts[pass];
    prefix_mask |= kMasks[pass] << kShifts[pass];
    need -= shared.found_above;
  }
  return Threshold{prefix, need};
}

// Position of this thread's item among the marked items of the block before it, and their number.
__device__ __forceinline__ unsigned rank_in_block(Shared& shared, bool marked, unsigned& total) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned votes = __ballot_sync(kFullWarp, marked);
  __syncthreads();
  if (lane == 0) shared.warp_sums[warp] = __popc(votes);
  __syncthreads();
  unsigned before = 0;
  total = 0;
#pragma unroll
  for (int i = 0; i < kSelectWarps; ++i) {
    before += i < warp ? shared.warp_sums[i] : 0;
    total += shared.warp_sums[i];
  }
  return before + __popc(votes & ((1u << lane) - 1));
}

// Chooses by exact keys of all pages in shared memory: any number of pages, any ties.
__device__ void choose_by_radix(Shared& shared, Team& team, const unsigned* keys, int begin, int end, int budget,
                                const List& list) {
  for (int i = threadIdx.x; i < kBins; i += kSelectThreads) {
    shared.histogram[0][i] = shared.histogram[1][i] = shared.histogram[2][i] = 0;
    shared.local[i] = 0;
  }
  team.sync();
  Threshold threshold{~0u, 0};
  if (budget > 2) threshold = find_threshold(shared, team, keys, end - begin, budget - 2);

  // Chosen pages of this block, then of the blocks before it.
  int above = 0, equal = 0;
  for (int i = threadIdx.x; i < end - begin; i += kSelectThreads) {
    bool fixed = keys[i] == ~0u;
    above += fixed || keys[i] > threshold.key;
    equal += !fixed && keys[i] == threshold.key;
  }
  if (threadIdx.x == 0) shared.above = shared.equal = 0;
  __syncthreads();
  above = __reduce_add_sync(kFullWarp, above);
  equal = __reduce_add_sync(kFullWarp, equal);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&shared.above, above);
    atomicAdd(&shared.equal, equal);
  }
  team.sync();
  unsigned position = 0, ties_before = 0;
  for (int block = 0; block < team.rank; ++block) {
    position += *team.at(&shared.above, block);
    ties_before += *team.at(&shared.equal, block);
  }
  position += min(ties_before, threshold.ties);

  for (int base = 0; base < end - begin; base += kSelectThreads) {
    const int i = base + threadIdx.x;
    const unsigned key = i < end - begin ? keys[i] : 0u;
    const bool fixed = key == ~0u;
    const bool tie = i < end - begin && !fixed && key == threshold.key;
    unsigned ties, chosen;
    const unsigned tie_rank = rank_in_block(shared, tie, ties);
    const bool take = fixed || key > threshold.key || (tie && ties_before + tie_rank < threshold.ties);
    const unsigned rank = rank_in_block(shared, take, chosen);
    if (take) list.put(position + rank, begin + i);
    position += chosen;
    ties_before += ties;
  }
}

// Chooses the best `need` of the candidates that all blocks have in the bin of the threshold, in
// shared.all; sets shared.last to the last one chosen, and counts the chosen pages of earlier blocks.
__device__ __forceinline__ void choose_candidates(Shared& shared, Team& team, int need) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Candidates and chosen pages of each block, by the first warp.
  if (warp == 0) {
    int count = 0, above = 0;
    if (lane < team.size) {
      count = *team.at(&shared.candidates, lane);
      above = *team.at(&shared.above, lane);
    }
    int sum = count;
#pragma unroll
    for (int step = 1; step < kMaxCluster; step *= 2) {
      int other = __shfl_up_sync(kFullWarp, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane < team.size) shared.from[lane + 1] = sum;
    above = __reduce_add_sync(kFullWarp, lane < team.rank ? above : 0);
    if (lane == 0) {
      shared.from[0] = 0;
      shared.above_before = above;
      shared.chosen_before = 0;
    }
  }
  __syncthreads();
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
