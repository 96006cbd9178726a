// select: page scores -> the pages that each KV head attends (paper sections 2 and 4).
//
// A cluster of blocks takes one (row, KV head).  Each block has a run of consecutive pages; the
// blocks agree through distributed shared memory on (1) the log-sum-exp of each query head,
// (2) the share that the last chosen page has, by a radix search of 11 + 11 + 10 bits over the
// shares' bit patterns, and (3) where each block's chosen pages go in the list, which is in
// ascending order.  Rows that attend everything are done before the scores are waited for.

#include <cooperative_groups.h>

#include <algorithm>

#include "schedule.cuh"

namespace locks {

namespace cg = cooperative_groups;

constexpr int kSelectThreads = 512;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kMaxCluster = 16;
constexpr int kMaxGroup = 16;
constexpr int kBins = 2048;
// Fewest pages worth a block of their own.
constexpr int kPagesPerBlock = 1024;

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
  int kv_heads, group, page_size, width;
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

struct Shared {
  unsigned histogram[3][kBins];  // of all blocks; a block owns kBins / blocks consecutive bins
  unsigned local[kBins];
  unsigned warp_sums[kSelectWarps];
  LogSum partial[kSelectWarps * 2];
  LogSum block_sums[kMaxGroup];
  float lse[kMaxGroup];
  unsigned found_bin, found_above;
  int chosen_above, chosen_equal;  // pages of this block above the threshold and equal to it
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
  template <typename T>
  __device__ T* at(T* address, int block) {
    return size > 1 ? cluster.map_shared_rank(address, block) : address;
  }
};

// LSE of each query head over the pages [begin, end) of this block, joined over the team.
__device__ void sum_scores(Shared& shared, Team& team, const float* scores, int64_t head_stride, int group, int begin,
                           int end) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Warps split the heads, and the pages of a head where there are more warps than heads.
  const int parts = kSelectWarps / group;
  const int pages = (end - begin + parts - 1) / parts;
  if (warp < parts * group) {
    const int head = warp / parts, part = warp % parts;
    const float* source = scores + head * head_stride;
    const int first = begin + part * pages, last = min(end, first + pages);
    LogSum total{-INFINITY, 0.0f};
    constexpr int kUnroll = 8;
    for (int base = first + lane; base < last; base += 32 * kUnroll) {
      float x[kUnroll];
      float largest = total.largest;
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        x[i] = base + 32 * i < last ? source[base + 32 * i] * kLog2e : -INFINITY;
        largest = fmaxf(largest, x[i]);
      }
      if (largest > -INFINITY) {
        float sum = total.sum * exp2_approx(total.largest - largest);
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) sum += exp2_approx(x[i] - largest);
        total = LogSum{largest, sum};
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      total = join(total, LogSum{__shfl_xor_sync(kFullWarp, total.largest, step),
                                 __shfl_xor_sync(kFullWarp, total.sum, step)});
    }
    if (lane == 0) shared.partial[head * parts + part] = total;
  }
  __syncthreads();
  if (threadIdx.x < group) {
    LogSum total{-INFINITY, 0.0f};
    for (int part = 0; part < parts; ++part) total = join(total, shared.partial[threadIdx.x * parts + part]);
    shared.block_sums[threadIdx.x] = total;
  }
  team.sync();
  if (threadIdx.x < group) {
    LogSum total{-INFINITY, 0.0f};
    for (int block = 0; block < team.size; ++block) total = join(total, *team.at(&shared.block_sums[threadIdx.x], block));
    shared.lse[threadIdx.x] = total.largest + log2_approx(total.sum);
  }
  __syncthreads();
}

// Finds, in the joint histogram of one digit, the bin that holds the `need`-th largest key:
// shared.found_bin, and in shared.found_above the keys in higher bins.
__device__ void find_bin(Shared& shared, Team& team, unsigned* histogram, unsigned need) {
  constexpr int kPerThread = kBins / kSelectThreads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Thread t has the bins from the top: kBins - 1 - kPerThread * t and below.
  const int top = kBins - kPerThread * (threadIdx.x + 1);
  const int owned = kBins / team.size;
  const uint4 counts = *reinterpret_cast<const uint4*>(team.at(histogram, top / owned) + top);
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
  const int owned = kBins / team.size;
  unsigned prefix = 0, prefix_mask = 0;
#pragma unroll
  for (int pass = 0; pass < 3; ++pass) {
    for (int i = threadIdx.x; i < count; i += kSelectThreads) {
      unsigned key = keys[i];
      if (key != ~0u && (key & prefix_mask) == prefix) {
        atomicAdd(&shared.local[(key >> kShifts[pass]) & kMasks[pass]], 1u);
      }
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < kBins; bin += kSelectThreads) {
      unsigned found = shared.local[bin];
      if (found) {
        atomicAdd(team.at(&shared.histogram[pass][bin], bin / owned), found);
        shared.local[bin] = 0;
      }
    }
    team.sync();
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

__global__ void __launch_bounds__(kSelectThreads) select_kernel(const __grid_constant__ SelectParams params) {
  extern __shared__ __align__(16) char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  unsigned* keys = reinterpret_cast<unsigned*>(raw + sizeof(Shared));
  let_next_kernel_start();

  const int row = blockIdx.y / params.kv_heads, head = blockIdx.y % params.kv_heads;
  Team team{cg::this_cluster(), static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};

  const int present = pages_of(params.lengths[row], params.page_size);
  const int budget = params.budgets[row];
  const int* table = params.page_table + row * params.table_stride;
  const int64_t list = (static_cast<int64_t>(row) * params.kv_heads + head) * params.width;
  int* pages = params.pages + list;
  int* logical = params.logical ? params.logical + list : nullptr;

  bool scored = needs_scores(present, budget);
  if (!scored) {
    if (present <= params.width) {
      for (int i = team.rank * kSelectThreads + threadIdx.x; i < present; i += team.size * kSelectThreads) {
        pages[i] = table[i];
        if (logical) logical[i] = i;
      }
    }
    if (team.rank == 0 && head == 0 && threadIdx.x == 0) params.counts[row] = present;
    wait_for_previous_kernel();
    return;
  }

  // Blocks that take part: a power of two, each with at least kPagesPerBlock pages.
  int size = team.size;
  while (size > 1 && (size / 2) * kPagesPerBlock >= present) size /= 2;
  team.size = size;
  for (int i = threadIdx.x; i < kBins; i += kSelectThreads) {
    shared.histogram[0][i] = shared.histogram[1][i] = shared.histogram[2][i] = shared.local[i] = 0;
  }
  wait_for_previous_kernel();

  const float* scores;
  int64_t head_stride;
  if (params.score_row_stride) {
    head_stride = params.score_head_stride;
    scores = params.scores + row * params.score_row_stride + head * params.group * head_stride;
  } else {
    const int first = params.row_tiles[row], tiles = params.row_tiles[row + 1] - first;
    head_stride = static_cast<int64_t>(tiles) * kTile;
    scores = params.scores + (static_cast<int64_t>(first) * kTile) * (params.kv_heads * params.group) +
             head * params.group * head_stride;
    scored = tiles > 0;
  }
  // The row did not fit the workspace: it attends everything.
  if (!scored) {
    if (present <= params.width) {
      for (int i = team.rank * kSelectThreads + threadIdx.x; i < present; i += team.size * kSelectThreads) {
        pages[i] = table[i];
        if (logical) logical[i] = i;
      }
    }
    if (team.rank == 0 && head == 0 && threadIdx.x == 0) params.counts[row] = present;
    return;
  }
  if (team.rank >= team.size) return;
  if (team.rank == 0 && head == 0 && threadIdx.x == 0) params.counts[row] = budget;

  const int chunk = (present + team.size - 1) / team.size;
  const int begin = min(present, team.rank * chunk), end = min(present, begin + chunk);
  if (params.lse == nullptr) {
    sum_scores(shared, team, scores, head_stride, params.group, begin, end);
  } else {
    if (threadIdx.x < params.group) {
      shared.lse[threadIdx.x] =
          params.lse[(static_cast<int64_t>(row) * params.kv_heads + head) * params.group + threadIdx.x] * kLog2e;
    }
    team.sync();
  }

  // Shares as bit patterns, which sort as the shares do.  The sink and the current page are out.
  for (int page = begin + threadIdx.x; page < end; page += kSelectThreads) {
    float share = 0.0f;
#pragma unroll 8
    for (int g = 0; g < params.group; ++g) {
      share += exp2_approx(fmaf(scores[g * head_stride + page], kLog2e, -shared.lse[g]));
    }
    bool fixed = page == 0 || page == present - 1;
    keys[page - begin] = fixed ? ~0u : __float_as_uint(share);
  }
  __syncthreads();

  Threshold threshold{~0u, 0};
  if (budget > 2) threshold = find_threshold(shared, team, keys, end - begin, budget - 2);

  // Chosen pages of this block, then of the blocks before it.
  int above = 0, equal = 0;
  for (int i = threadIdx.x; i < end - begin; i += kSelectThreads) {
    bool fixed = keys[i] == ~0u;
    above += fixed || keys[i] > threshold.key;
    equal += !fixed && keys[i] == threshold.key;
  }
  if (threadIdx.x == 0) shared.chosen_above = shared.chosen_equal = 0;
  __syncthreads();
  above = __reduce_add_sync(kFullWarp, above);
  equal = __reduce_add_sync(kFullWarp, equal);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&shared.chosen_above, above);
    atomicAdd(&shared.chosen_equal, equal);
  }
  team.sync();
  unsigned position = 0, ties_before = 0;
  for (int block = 0; block < team.rank; ++block) {
    position += *team.at(&shared.chosen_above, block);
    ties_before += *team.at(&shared.chosen_equal, block);
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
    if (take) {
      const unsigned slot = position + rank;
      pages[slot] = table[begin + i];
      if (logical) logical[slot] = begin + i;
    }
    position += chosen;
    ties_before += ties;
  }
  // No block may leave while another one still reads its shared memory.
  team.sync();
}

// `lse` and `logical` may be 0; `row_tiles` is read where the row stride of the scores is 0.
void select(int64_t scores, int64_t score_row_stride, int64_t score_head_stride, int64_t lse, int64_t row_tiles,
            int64_t page_table, int64_t table_stride, int64_t lengths, bool wide_lengths, int64_t budgets,
            int64_t pages, int64_t logical, int64_t counts, int64_t rows, int64_t kv_heads, int64_t group,
            int64_t page_size, int64_t width, int64_t max_pages, int64_t stream) {
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
  params.group = static_cast<int>(group);
  params.page_size = static_cast<int>(page_size);
  params.width = static_cast<int>(width);

  const int device = current_device();
  const int lists = static_cast<int>(rows * kv_heads);
  int cluster = 1;
  while (cluster < kMaxCluster && cluster * kPagesPerBlock < max_pages &&
         (cluster * 2 * lists <= 2 * multiprocessors(device) || cluster * 32768 < max_pages)) {
    cluster *= 2;
  }
  const int64_t most = std::max<int64_t>((max_pages + cluster - 1) / cluster, kPagesPerBlock);
  const size_t shared = sizeof(Shared) + sizeof(unsigned) * most;
  constexpr size_t kMostShared = 227 * 1024;
  if (shared > kMostShared) {
    TVM_FFI_THROW(ValueError) << max_pages << " pages a request are more than select holds ("
                              << kMaxCluster * ((kMostShared - sizeof(Shared)) / 4 - 4) << ")";
  }
  static bool prepared[kMaxDevices] = {};
  if (!prepared[device]) {
    check_cuda(cudaFuncSetAttribute(select_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared),
               "shared memory of the select kernel");
    check_cuda(cudaFuncSetAttribute(select_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               "cluster size of the select kernel");
    prepared[device] = true;
  }
  launch(select_kernel, dim3(cluster, lists), kSelectThreads, shared, stream, cluster, params);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(select, select);

}  // namespace locks
