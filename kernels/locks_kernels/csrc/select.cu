// select: page scores -> the pages that each KV head attends (paper sections 2 and 4).
//
// A cluster of blocks takes one (row, KV head), each block a run of consecutive pages.  Through
// distributed shared memory they agree on
//   (1) the log-sum-exp of each query head over all pages,
//   (2) a histogram of the shares, 64 bins an octave, and so the bin of the last chosen page,
//   (3) the few pages in that bin, among which the exact order (share, then lower page) decides,
// and every block writes its part of the list, which is in ascending order.  Latency is all that
// matters here, so a thread keeps its pages in registers and there are three cluster barriers.
// Where a bin has too many pages (equal shares) or a block too many for its registers, a radix
// search over the bit patterns (find_threshold) takes over.
//
// variant: GROUP=8
// variant: GROUP=3
// variant: GROUP=16

#include <cooperative_groups.h>

#include <algorithm>

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

struct SelectParams {
  const float* scores;
  int64_t score_row_stride, score_head_stride;  // row stride 0: packed by row_tiles
  const float* lse;                             // [rows, q_heads], or null: computed here
  const int* row_tiles;
  const int* page_table;
  int64_t table_stride;
  Lengths lengths;
  const int* budgets;
  int *pages, *logical, *counts;  // logical may be null
  int kv_heads, page_size, width;
};

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
  int counts[kMostHeld][kSelectWarps];         // chosen pages by warp
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

// Scores of a block's pages in registers, page begin + thread + i * kSelectThreads.
template <int kHeld>
struct HeldScores {
  float value[kHeld][kGroup];
};

template <int kHeld>
__device__ __forceinline__ void load_scores(HeldScores<kHeld>& held, const float* scores, int64_t head_stride, int begin,
                                            int end) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int page = begin + i * kSelectThreads + threadIdx.x;
#pragma unroll
    for (int g = 0; g < kGroup; ++g) held.value[i][g] = -INFINITY;
    if (page < end) {
#pragma unroll
      for (int g = 0; g < kGroup; ++g) held.value[i][g] = scores[g * head_stride + page] * kLog2e;
    }
  }
}

__device__ __forceinline__ float share_of(const float (&scores)[kGroup], const float (&lse)[kGroup]) {
  float share = 0.0f;
#pragma unroll
  for (int g = 0; g < kGroup; ++g) share += exp2_approx(scores[g] - lse[g]);
  return share;
}

// LSE over pages that are too many for registers.
__device__ void sum_scores(Shared& shared, Team& team, const float* scores, int64_t head_stride, int begin, int end) {
  LogSum own[kGroupPower];
#pragma unroll
  for (int g = 0; g < kGroupPower; ++g) own[g] = LogSum{-INFINITY, 0.0f};
  for (int page = begin + threadIdx.x; page < end; page += kSelectThreads) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) own[g] = join(own[g], LogSum{scores[g * head_stride + page] * kLog2e, 1.0f});
  }
  join_team(shared, team, own);
}

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

struct List {
  const int* table;
  int *pages, *logical;
  __device__ __forceinline__ void put(int slot, int page, int physical) const {
    pages[slot] = physical;
    if (logical) logical[slot] = page;
  }
  __device__ __forceinline__ void put(int slot, int page) const { put(slot, page, table[page]); }
};

// All pages of a row, where they fit the list.
__device__ __forceinline__ void list_everything(const SelectParams& params, const List& list, int present, int row,
                                                int head) {
  if (present <= params.width) {
    for (int i = blockIdx.x * kSelectThreads + threadIdx.x; i < present; i += gridDim.x * kSelectThreads) {
      list.put(i, i);
    }
  }
  if (blockIdx.x == 0 && head == 0 && threadIdx.x == 0) params.counts[row] = present;
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

template <int kHeld>
__global__ void __launch_bounds__(kSelectThreads) select_kernel(const __grid_constant__ SelectParams params) {
  extern __shared__ __align__(16) char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  unsigned* keys = reinterpret_cast<unsigned*>(raw + sizeof(Shared));
  let_next_kernel_start();

  const int row = blockIdx.y / params.kv_heads, head = blockIdx.y % params.kv_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Team team{cg::this_cluster(), static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};

  const int present = pages_of(params.lengths[row], params.page_size);
  const int budget = params.budgets[row];
  const int64_t at = (static_cast<int64_t>(row) * params.kv_heads + head) * params.width;
  const List list{params.page_table + row * params.table_stride, params.pages + at,
                  params.logical ? params.logical + at : nullptr};
  if (!needs_scores(present, budget)) {
    // The lists may still be read by the attention of the layer before.
    wait_for_previous_kernel();
    list_everything(params, list, present, row, head);
    return;
  }

  // Blocks that take part: a power of two, each with kPagesPerBlock pages or more.
  while (team.size > 1 && (team.size / 2) * kPagesPerBlock >= present) team.size /= 2;
  const int chunk = (present + team.size - 1) / team.size;
  const int begin = min(present, team.rank * chunk), end = min(present, begin + chunk);
  for (int i = threadIdx.x; i < kBins; i += kSelectThreads) shared.histogram[0][i] = shared.local[i] = 0;
  if (threadIdx.x == 0) shared.above = shared.candidates = 0;
  // Physical pages are needed last; fetched here, they are not waited for.
  int physical[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int page = begin + i * kSelectThreads + threadIdx.x;
    physical[i] = page < end ? list.table[page] : 0;
  }
  wait_for_previous_kernel();

  const float* scores;
  int64_t head_stride;
  if (params.score_row_stride) {
    head_stride = params.score_head_stride;
    scores = params.scores + row * params.score_row_stride + head * kGroup * head_stride;
  } else {
    const int first = params.row_tiles[row], tiles = params.row_tiles[row + 1] - first;
    // A row that did not fit the workspace attends everything.
    if (tiles == 0) {
      list_everything(params, list, present, row, head);
      return;
    }
    head_stride = static_cast<int64_t>(tiles) * kTile;
    scores = params.scores + (static_cast<int64_t>(first) * kTile) * (params.kv_heads * kGroup) +
             head * kGroup * head_stride;
  }
  if (team.rank >= team.size) return;
  if (team.rank == 0 && head == 0 && threadIdx.x == 0) params.counts[row] = budget;

  const bool held_fit = chunk <= kHeld * kSelectThreads;
  HeldScores<kHeld> held;
  if (held_fit) load_scores(held, scores, head_stride, begin, end);
  if (params.lse != nullptr) {
    if (threadIdx.x < kGroup) {
      const int64_t q_head = (static_cast<int64_t>(row) * params.kv_heads + head) * kGroup + threadIdx.x;
      shared.lse[threadIdx.x] = params.lse[q_head] * kLog2e;
    }
    team.sync();
  } else if (held_fit) {
    LogSum own[kGroupPower];
#pragma unroll
    for (int g = 0; g < kGroupPower; ++g) {
      own[g] = LogSum{-INFINITY, 0.0f};
      if (g < kGroup) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) own[g].largest = fmaxf(own[g].largest, held.value[i][g < kGroup ? g : 0]);
        const float largest = fmaxf(own[g].largest, -1e30f);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          // The same for the whole block: the special-function unit is what limits these loops.
          if (begin + i * kSelectThreads < end) {
            own[g].sum += exp2_approx(held.value[i][g < kGroup ? g : 0] - largest);
          }
        }
      }
    }
    join_team(shared, team, own);
  } else {
    sum_scores(shared, team, scores, head_stride, begin, end);
  }
  float lse[kGroup];
#pragma unroll
  for (int g = 0; g < kGroup; ++g) lse[g] = shared.lse[g];

  // Shares as bit patterns, which sort as the shares do.  The sink and the current page are out.
  if (!held_fit) {
    for (int page = begin + threadIdx.x; page < end; page += kSelectThreads) {
      float values[kGroup];
#pragma unroll
      for (int g = 0; g < kGroup; ++g) values[g] = scores[g * head_stride + page] * kLog2e;
      const bool fixed = page == 0 || page == present - 1;
      keys[page - begin] = fixed ? ~0u : __float_as_uint(share_of(values, lse));
    }
    choose_by_radix(shared, team, keys, begin, end, budget, list);
    team.sync();  // no block leaves while another one reads its shared memory
    return;
  }

  unsigned own_keys[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    own_keys[i] = 0u;
    if (begin + i * kSelectThreads >= end) continue;
    const int page = begin + i * kSelectThreads + threadIdx.x;
    const bool fixed = page == 0 || page == present - 1;
    own_keys[i] = fixed ? ~0u : __float_as_uint(share_of(held.value[i], lse));
    if (page < end && !fixed) atomicAdd(&shared.local[share_bin(own_keys[i])], 1u);
  }
  add_histogram(shared, team, shared.histogram[0]);
  unsigned bin = kBins;
  int need = budget - 2;
  if (need > 0) {
    find_bin(shared, team, shared.histogram[0], need);
    bin = shared.found_bin;
    need -= shared.found_above;
    if (shared.found_count > kMaxCandidates) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int page = begin + i * kSelectThreads + threadIdx.x;
        if (page < end) keys[page - begin] = own_keys[i];
      }
      team.sync();  // the first histogram is used again
      choose_by_radix(shared, team, keys, begin, end, budget, list);
      team.sync();
      return;
    }
  }

  // Pages above the bin are chosen, those in it are candidates.
  int above = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int page = begin + i * kSelectThreads + threadIdx.x;
    if (page >= end) continue;
    const bool fixed = own_keys[i] == ~0u;
    const unsigned own_bin = share_bin(own_keys[i]);
    above += fixed || own_bin > bin;
    if (!fixed && own_bin == bin) shared.own[atomicAdd(&shared.candidates, 1)] = Candidate{own_keys[i], page};
  }
  above = __reduce_add_sync(kFullWarp, above);
  if (lane == 0 && above) atomicAdd(&shared.above, above);
  team.sync();
  if (need > 0) {
    choose_candidates(shared, team, need);
  } else {
    if (warp == 0) {
      int sum = lane < team.rank ? *team.at(&shared.above, lane) : 0;
      sum = __reduce_add_sync(kFullWarp, sum);
      if (lane == 0) {
        shared.above_before = sum;
        shared.chosen_before = 0;
      }
    }
    __syncthreads();
  }

  // This block reads no other's shared memory from here on, and may not leave before all are there.
  team.arrive();

  // Where the chosen pages of each warp go.
  const Candidate last = shared.last;
  unsigned votes[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int page = begin + i * kSelectThreads + threadIdx.x;
    const bool fixed = own_keys[i] == ~0u;
    const unsigned own_bin = share_bin(own_keys[i]);
    const bool best = own_bin == bin && (own_keys[i] > last.key || (own_keys[i] == last.key && page <= last.page));
    votes[i] = __ballot_sync(kFullWarp, page < end && (fixed || own_bin > bin || best));
    if (lane == 0) shared.counts[i][warp] = __popc(votes[i]);
  }
  __syncthreads();
  int position = shared.above_before + shared.chosen_before;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int count = lane < kSelectWarps ? shared.counts[i][lane] : 0;
    const int before = __reduce_add_sync(kFullWarp, lane < warp ? count : 0);
    if (votes[i] >> lane & 1) {
      list.put(position + before + __popc(votes[i] & ((1u << lane) - 1)), begin + i * kSelectThreads + threadIdx.x,
               physical[i]);
    }
    position += __reduce_add_sync(kFullWarp, count);
  }
  team.wait();
}

// `lse` and `logical` may be 0; `row_tiles` is read where the row stride of the scores is 0.
void select(int64_t scores, int64_t score_row_stride, int64_t score_head_stride, int64_t lse, int64_t row_tiles,
            int64_t page_table, int64_t table_stride, int64_t lengths, bool wide_lengths, int64_t budgets,
            int64_t pages, int64_t logical, int64_t counts, int64_t rows, int64_t kv_heads, int64_t page_size,
            int64_t width, int64_t max_pages, int64_t stream) {
  SelectParams params;
  params.scores = address<const float>(scores);
  params.score_row_stride = score_row_stride;
  params.score_head_stride = score_head_stride;
  params.lse = address<const float>(lse);
  params.row_tiles = address<const int>(row_tiles);
  params.page_table = address<const int>(page_table);
  params.table_stride = table_stride;
  params.lengths = Lengths{address<const void>(lengths), wide_lengths};
  params.budgets = address<const int>(budgets);
  params.pages = address<int>(pages);
  params.logical = address<int>(logical);
  params.counts = address<int>(counts);
  params.kv_heads = static_cast<int>(kv_heads);
  params.page_size = static_cast<int>(page_size);
  params.width = static_cast<int>(width);

  const int device = current_device();
  const int lists = static_cast<int>(rows * kv_heads);
  int cluster = 1;
  while (cluster < kMaxCluster && cluster * kPagesPerBlock < max_pages) cluster *= 2;
  const int64_t most = std::max<int64_t>((max_pages + cluster - 1) / cluster, kPagesPerBlock);
  const size_t shared = sizeof(Shared) + sizeof(unsigned) * most;
  constexpr size_t kMostShared = 227 * 1024;
  if (shared > kMostShared) {
    TVM_FFI_THROW(ValueError) << max_pages << " pages a request are more than select holds ("
                              << kMaxCluster * ((kMostShared - sizeof(Shared)) / 4 - 4) << ")";
  }
  // Few pages a thread leave more registers to work with; more than fit are read twice.
  const bool few = most <= 4 * kSelectThreads;
  auto kernel = few ? select_kernel<4> : select_kernel<kMostHeld>;
  static bool prepared[2][kMaxDevices] = {};
  if (!prepared[few][device]) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared),
               "shared memory of the select kernel");
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               "cluster size of the select kernel");
    prefer_shared_memory(kernel);
    prepared[few][device] = true;
  }
  launch(kernel, dim3(cluster, lists), kSelectThreads, shared, stream, cluster, params);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(select, select);

}  // namespace locks
