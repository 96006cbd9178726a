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

#include <algorithm>

#include "select_search.cuh"

namespace locks {

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
