// select: page scores -> the pages that each KV head attends (paper sections 2 and 4).
//
// A cluster of blocks takes one (row, KV head), each block a run of consecutive pages.  Through
// distributed shared memory they agree on
//   (1) the log-sum-exp of each query head over all pages,
//   (2) a histogram of the shares, 16 bins an octave, and so the bin of the last chosen page, which
//       is split into finer histograms as long as it holds many pages,
//   (3) the few pages left there, among which the exact order (share, then lower page) decides,
// and every block writes its part of the list, which is in ascending order.
//
// Latency is all that matters here: a thread has the scores of a few neighbouring pages in registers from
// the sums to the keys, and between two calls the model's weights push this code out of the caches, so
// that everything else is short loops.
//
// variant: GROUP=8

#include <algorithm>
#include <map>
#include <utility>

#include "select_scores.cuh"

namespace locks {

constexpr int kSharedBytes = (sizeof(Shared) + 15) / 16 * 16;

// Pages of a block, in whole vectors of four.
__host__ __device__ __forceinline__ int count_pitch(int count) { return (count + 3) / 4 * 4; }

struct List {
  const int* table;
  int *pages, *logical;
  __device__ __forceinline__ void put(int slot, int page, int physical) const {
    pages[slot] = physical;
    if (logical) logical[slot] = page;
  }
};

struct SelectParams {
  const float* scores;
  int64_t score_row_stride, score_head_stride;  // row stride 0: packed as schedule_rows lays them out,
  int capacity;                                 // in so many tiles
  const float* lse;                             // [rows, q_heads], or null: computed here
  const int* page_table;
  int64_t table_stride;
  Lengths lengths;
  const int* budgets;
  int *pages, *logical, *counts;  // logical may be null
  int kv_heads, page_size, width;
  int staged_pages;  // most pages of a block whose physical pages are fetched to shared memory
};

// All pages of a row, where they fit the list, by the first `blocks` blocks of the cluster.
__device__ __forceinline__ void list_everything(const SelectParams& params, const List& list, int present, int row,
                                                int head, int blocks) {
  if (present <= params.width) {
#pragma unroll 1
    for (int i = blockIdx.x * kSelectThreads + threadIdx.x; i < present; i += blocks * kSelectThreads) {
      list.put(i, i, list.table[i]);
    }
  }
  if (blockIdx.x == 0 && head == 0 && threadIdx.x == 0) params.counts[row] = present;
}

// Calls `each` for the run of keys that this thread has of every kPagesPerBlock pages.
template <typename Each>
__device__ __forceinline__ void for_own_keys(const unsigned* keys, int i, int count, Each each) {
  const uint4 four = *reinterpret_cast<const uint4*>(keys + i);
  const unsigned own[kRun] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int k = 0; k < kRun; ++k) {
    if (i + k < count) each(k, own[k]);
  }
}

// Writes the chosen pages of this block behind those of the blocks before it.
__device__ __forceinline__ void write_list(Shared& shared, const List& list, const int* physical, const unsigned* keys,
                                           int begin, int count, const Threshold& threshold) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Candidate last = shared.last;
  const int most_ties = threshold.tied ? threshold.need : 0;
  int sure_before = shared.above_before + shared.chosen_before, ties_before = shared.equal_before;
#pragma unroll 1
  for (int base = 0, turn = 0; base < count; base += kPagesPerBlock, turn ^= 1) {
    const int i = base + kRun * threadIdx.x;
    // Bit k: page i + k is chosen; bit 16 + k: it is tied with the last one chosen.
    unsigned chosen = 0;
    if (i < count) {
      for_own_keys(keys, i, count, [&](int k, unsigned key) {
        const bool inside = threshold.range.holds(key);
        const bool best = key > last.key || (key == last.key && begin + i + k <= last.page);
        if (key > threshold.range.high || (inside && !threshold.tied && best)) chosen |= 1u << k;
        if (inside && threshold.tied) chosen |= 0x10000u << k;
      });
    }
    const unsigned own = __popc(chosen & 0xffffu) | __popc(chosen >> 16) << 16;
    const unsigned sum = sum_to_lane(own);
    if (lane == 31) shared.counts[turn][warp] = sum;
    __syncthreads();
    const unsigned counts = lane < kSelectWarps ? shared.counts[turn][lane] : 0u;
    const unsigned all = __reduce_add_sync(kFullWarp, counts);
    const unsigned before = __reduce_add_sync(kFullWarp, lane < warp ? counts : 0u) + sum - own;
    if (chosen) {
      int sure = sure_before + (before & 0xffffu), ties = ties_before + (before >> 16);
#pragma unroll 1
      for (int k = 0; k < kRun; ++k, chosen >>= 1) {
        const bool tie = chosen & 0x10000u;
        if ((chosen & 1u) || (tie && ties < most_ties)) {
          const int page = begin + i + k;
          list.put(sure + min(ties, most_ties), page, physical ? physical[i + k] : list.table[page]);
        }
        sure += chosen & 1u;
        ties += tie;
      }
    }
    sure_before += all & 0xffffu;
    ties_before += all >> 16;
  }
}

// Two blocks a multiprocessor where their scores' registers allow it.
constexpr int kBlocksAtOnce = kGroupPower <= 8 ? 2 : 1;

template <bool kPacked>
__global__ void __launch_bounds__(kSelectThreads, kBlocksAtOnce)
    select_kernel(const __grid_constant__ SelectParams params) {
  extern __shared__ __align__(16) char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  unsigned* keys = reinterpret_cast<unsigned*>(raw + kSharedBytes);

  const int row = blockIdx.y / params.kv_heads, head = blockIdx.y % params.kv_heads;
  Team team{cg::this_cluster(), static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  const int present = pages_of(params.lengths[row], params.page_size);
  const int budget = params.budgets[row];
  const int64_t at = (static_cast<int64_t>(row) * params.kv_heads + head) * params.width;
  const List list{params.page_table + row * params.table_stride, params.pages + at,
                  params.logical ? params.logical + at : nullptr};
  if (!needs_scores(present, budget)) {
    // The lists may still be read by the attention of the layer before.
    wait_for_previous_kernel();
    list_everything(params, list, present, row, head, team.size);
    return;
  }

  // Blocks that take part: a power of two, each with kPagesPerBlock pages or more.  The others may
  // leave: the grid is complete only when those that stay are, and they wait for the scores.
  while (team.size > 1 && (team.size / 2) * kPagesPerBlock >= present) team.size /= 2;
  if (team.rank >= team.size) return;
  const int chunk = count_pitch((present + team.size - 1) / team.size);
  const int begin = min(present, team.rank * chunk), count = min(present, begin + chunk) - begin;
  int* physical = count <= params.staged_pages ? reinterpret_cast<int*>(keys + count_pitch(count)) : nullptr;
  if (physical) {
    // Physical pages are needed last; fetched here, they are not waited for.
    const uint64_t policy = read_once_policy();
    for (int i = threadIdx.x; i < count; i += kSelectThreads) {
      copy_async<4>(shared_address(physical + i), list.table + begin + i, policy);
    }
  }
  // Where the scores lie follows from what score was given, too: nothing to wait for.
  Scores scores{nullptr, params.score_head_stride};
  bool fits = true;
  if constexpr (kPacked) {
    const int first = first_tile(row, params.lengths, params.budgets, params.page_size);
    const int tiles = tiles_of(present, budget);
    fits = first + tiles <= params.capacity;
    scores.stride = static_cast<int64_t>(tiles) * kTile;
    scores.at = params.scores + (static_cast<int64_t>(first) * kTile) * (params.kv_heads * kGroup) +
                head * kGroup * scores.stride + begin;
  } else {
    scores.at = params.scores + row * params.score_row_stride + head * kGroup * scores.stride + begin;
  }
  shared.histogram[0][threadIdx.x] = shared.histogram[1][threadIdx.x] = shared.local[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    shared.above = shared.equal = shared.candidates = 0;
    shared.last = Candidate{kFixed, -1};
    shared.own_limits.lowest = shared.limits.lowest = ~0u;
    shared.own_limits.highest = shared.limits.highest = 0;
  }
  wait_for_previous_kernel();
  // Not earlier: attend's blocks would take the multiprocessors that later blocks of this kernel need.
  let_next_kernel_start();

  // A row that did not fit the workspace attends everything.
  if (!fits) {
    copies_wait();
    list_everything(params, list, present, row, head, team.size);
    return;
  }
  if (team.rank == 0 && head == 0 && threadIdx.x == 0) params.counts[row] = budget;

  const int first_run = kRun * threadIdx.x;
  Run run;
  bool exponentials = false;
  if (params.lse != nullptr) {
    if (threadIdx.x < kGroup) {
      const int64_t q_head = (static_cast<int64_t>(row) * params.kv_heads + head) * kGroup + threadIdx.x;
      shared.lse[threadIdx.x] = params.lse[q_head] * kLog2e;
    }
    load_run<kPacked>(run, scores, first_run, count);
    team.sync();
  } else {
    // Where a block has one round of pages their exponentials are computed once, relative to the sink's score.
    exponentials = chunk <= kPagesPerBlock;
    if (exponentials) {
      load_run<kPacked>(run, scores, first_run, count);
      if (threadIdx.x < kGroup) {
        shared.shift[threadIdx.x] = kLog2e * __ldcg(scores.at + threadIdx.x * scores.stride - begin);
      }
      __syncthreads();
      note_sums(shared, exponentiate_run(run, shared));
      join_team(shared, team);
      // Not where another page's score is so far above the sink's (or is not finite) that they overflow.
#pragma unroll
      for (int g = 0; g < kGroup; ++g) exponentials &= shared.scale[g] > kLeastScale;
      if (!exponentials) team.sync();
    }
    if (!exponentials) {
      LogSum own{-INFINITY, 0.0f};
#pragma unroll 1
      for (int base = 0; base < count; base += kPagesPerBlock) {
        load_run<kPacked>(run, scores, base + first_run, count);
        own = join(own, sum_run(run));
      }
      note_sums(shared, own);
      join_team(shared, team);
    }
  }

  unsigned lowest = ~0u, highest = 0;
#pragma unroll 1
  for (int base = 0; base < count; base += kPagesPerBlock) {
    const int i = base + first_run;
    float shares[kRun] = {};
    if (exponentials) {
      add_shares<true>(shared, run, shares);
    } else {
      // The scores of the only round are still there.
      if (count > kPagesPerBlock) load_run<kPacked>(run, scores, i, count);
      add_shares<false>(shared, run, shares);
    }
    const uint4 four = make_keys(shared, shares, i, begin, count, present - 1, lowest, highest);
    if (i < count) *reinterpret_cast<uint4*>(keys + i) = four;
  }
  note_limits(shared, lowest, highest);

  Threshold threshold{kNoKeys, 0, false};
  if (budget > 2) threshold = find_threshold(shared, team, keys, count, budget - 2);

  // A thread reads the keys that it has written itself.
  int above = 0, equal = 0;
#pragma unroll 1
  for (int i = first_run; i < count; i += kPagesPerBlock) {
    for_own_keys(keys, i, count, [&](int k, unsigned key) {
      above += key > threshold.range.high;
      if (threshold.range.holds(key)) {
        ++equal;
        if (!threshold.tied) shared.own[atomicAdd(&shared.candidates, 1)] = Candidate{key, begin + i + k};
      }
    });
  }
  above = __reduce_add_sync(kFullWarp, above);
  equal = __reduce_add_sync(kFullWarp, equal);
  if (threadIdx.x % 32 == 0) {
    if (above) atomicAdd(&shared.above, above);
    if (equal) atomicAdd(&shared.equal, equal);
  }
  copies_wait();
  team.sync();
  count_before(shared, team);
  if (threshold.need > 0 && !threshold.tied) rank_candidates(shared, team, threshold.need);
  // This block reads no other's shared memory from here on, and may not leave before all are there.
  team.arrive();
  write_list(shared, list, physical, keys, begin, count, threshold);
  team.wait();
}

constexpr int kMostShared = 227 * 1024;
constexpr int kSharedOfTwo = 113 * 1024;  // of each of two blocks on a multiprocessor
constexpr int kMostKeyBytes = kBlocksAtOnce == 1 ? kMostShared : kSharedOfTwo;

// How a launch divides a list: blocks of a cluster, and what one of them has in shared memory.
struct Shape {
  int cluster, staged_pages, bytes;
  int least_bytes;  // with no physical pages staged

  // `alone`: no second block is to be on the multiprocessor.
  Shape(int64_t max_pages, int cluster, bool alone) : cluster(cluster) {
    const int most_pages =
        count_pitch(static_cast<int>(std::max<int64_t>((max_pages + cluster - 1) / cluster, kPagesPerBlock)));
    // Keys of all pages, and physical pages of a run that is not much longer than a block should have:
    // most requests are far shorter than the page table has room for.
    staged_pages = std::min(most_pages, 2 * kPagesPerBlock);
    least_bytes = kSharedBytes + 4 * most_pages;
    bytes = std::max(least_bytes, kSharedBytes + 8 * staged_pages);
    if (alone) bytes = std::max(bytes, kSharedOfTwo + 16);
  }
};

void prepare(int device) {
  static bool prepared[kMaxDevices] = {};
  if (prepared[device]) return;
  for (const auto kernel : {select_kernel<true>, select_kernel<false>}) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared),
               "shared memory of the select kernel");
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               "cluster size of the select kernel");
    prefer_shared_memory(kernel);
  }
  prepared[device] = true;
}

// Clusters of this shape that the GPU holds at a time, which is fewer than its multiprocessors
// suggest: a cluster lies within one GPC, and these are of different sizes.
int clusters_at_a_time(int device, const Shape& shape) {
  thread_local std::map<std::pair<int, int>, int> known[kMaxDevices];
  const auto [found, fresh] = known[device].try_emplace({shape.cluster, shape.bytes}, 0);
  if (fresh) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = shape.cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(shape.cluster);
    config.blockDim = dim3(kSelectThreads);
    config.dynamicSmemBytes = shape.bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    // None where the GPU has no clusters of that size.
    if (cudaOccupancyMaxActiveClusters(&found->second, select_kernel<true>, &config) != cudaSuccess) cudaGetLastError();
  }
  return found->second;
}

// As many blocks a list as let all lists be worked on at a time, on a multiprocessor each or two on
// one: a second wave would take as long again.
Shape choose_shape(int device, int64_t max_pages, int lists) {
  int cluster = 1;
  while (cluster < kMaxCluster && cluster * kPagesPerBlock < max_pages) cluster *= 2;
  for (;; cluster /= 2) {
    for (const bool alone : {true, false}) {
      const Shape shape(max_pages, cluster, alone);
      if (shape.bytes > kMostShared) {
        TVM_FFI_THROW(ValueError) << max_pages << " pages a request are more than select holds ("
                                  << kMaxCluster * ((kMostShared - kSharedBytes) / 4 - 4) << ")";
      }
      if (clusters_at_a_time(device, shape) >= lists) return shape;
    }
    // Longer runs of pages gain nothing where their keys would keep a second block off the multiprocessor.
    if (cluster == 1 || Shape(max_pages, cluster / 2, false).least_bytes > kMostKeyBytes) {
      return Shape(max_pages, cluster, false);
    }
  }
}

// `lse` and `logical` may be 0; `capacity` is of scores whose row stride is 0.
void select(int64_t scores, int64_t score_row_stride, int64_t score_head_stride, int64_t lse, int64_t capacity,
            int64_t page_table, int64_t table_stride, int64_t lengths, bool wide_lengths, int64_t budgets,
            int64_t pages, int64_t logical, int64_t counts, int64_t rows, int64_t kv_heads, int64_t page_size,
            int64_t width, int64_t max_pages, int64_t stream) {
  SelectParams params;
  params.scores = address<const float>(scores);
  params.score_row_stride = score_row_stride;
  params.score_head_stride = score_head_stride;
  params.lse = address<const float>(lse);
  params.capacity = static_cast<int>(capacity);
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
  prepare(device);
  const int lists = static_cast<int>(rows * kv_heads);
  const Shape shape = choose_shape(device, max_pages, lists);
  params.staged_pages = shape.staged_pages;
  const auto kernel = score_row_stride == 0 ? select_kernel<true> : select_kernel<false>;
  launch(kernel, dim3(shape.cluster, lists), kSelectThreads, shape.bytes, stream, shape.cluster, params);
}

// How many of a launch's lists the GPU works on at a time; where it is fewer than `lists`, the others wait.
int64_t lists_at_a_time(int64_t max_pages, int64_t lists) {
  const int device = current_device();
  prepare(device);
  return clusters_at_a_time(device, choose_shape(device, max_pages, static_cast<int>(lists)));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(select, select);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lists_at_a_time, lists_at_a_time);

}  // namespace locks
