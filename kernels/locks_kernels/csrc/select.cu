// select: page scores -> the pages that each KV head attends (paper sections 2 and 4).
//
// A cluster of blocks takes one (row, KV head), each block a run of consecutive pages.  Through
// distributed shared memory they agree on
//   (1) the log-sum-exp of each query head over all pages,
//   (2) a histogram of the shares, 64 bins an octave, and so the bin of the last chosen page, which
//       is split into finer histograms as long as it holds many pages,
//   (3) the few pages left there, among which the exact order (share, then lower page) decides,
// and every block writes its part of the list, which is in ascending order.
//
// Latency is all that matters here, and between two calls the model's weights push this code out
// of the caches: short loops over shared memory are faster than unrolled code over registers.
//
// variant: GROUP=8

#include <algorithm>
#include <map>
#include <utility>

#include "select_search.cuh"

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
  int64_t score_row_stride, score_head_stride;  // row stride 0: packed by row_tiles
  const float* lse;                             // [rows, q_heads], or null: computed here
  const int* row_tiles;
  const int* page_table;
  int64_t table_stride;
  Lengths lengths;
  const int* budgets;
  int *pages, *logical, *counts;  // logical may be null
  int kv_heads, page_size, width;
  int staged_pages;  // most pages of a block whose scores go to shared memory
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

// A block's scores, a row of `stride` for each query head.
struct Scores {
  const float* at;
  int64_t stride;
};

// Starts copying the scores of this block's pages to shared memory; `aligned` allows 16 bytes at a time.
__device__ __forceinline__ void stage(const Scores& scores, float* target, int count, bool aligned) {
  const uint64_t policy = read_once_policy();
#pragma unroll 1
  for (int g = 0; g < kGroup; ++g) {
    const float* from = scores.at + g * scores.stride;
    const uint32_t to = shared_address(target + g * count_pitch(count));
    if (aligned) {
      for (int i = 4 * threadIdx.x; i < count; i += 4 * kSelectThreads) copy_async<16>(to + 4 * i, from + i, policy);
    } else {
      for (int i = threadIdx.x; i < count; i += kSelectThreads) copy_async<4>(to + 4 * i, from + i, policy);
    }
  }
}

// Each warp takes every kParts-th run of 32 pages of one query head: the largest score and the sum
// of exp2(score - largest) of these go to shared.partial.
__device__ __forceinline__ void sum_scores(Shared& shared, const Scores& scores, int count) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = warp % kGroupPower, part = warp / kGroupPower;
  if (head >= kGroup) return;
  const float* from = scores.at + head * scores.stride;
  LogSum own{-INFINITY, 0.0f};
#pragma unroll 4
  for (int i = 32 * part + lane; i < count; i += 32 * kParts) own.largest = fmaxf(own.largest, from[i]);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) own.largest = fmaxf(own.largest, __shfl_xor_sync(kFullWarp, own.largest, step));
  own.largest *= kLog2e;
#pragma unroll 4
  for (int i = 32 * part + lane; i < count; i += 32 * kParts) {
    own.sum += exp2_approx(from[i] * kLog2e - own.largest);
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) own.sum += __shfl_xor_sync(kFullWarp, own.sum, step);
  if (lane == 0) shared.partial[part][head] = own;
}

// Keys of this block's pages, their histogram and limits; the sink and the current page are always chosen.
// Equal scores give equal keys wherever they are, so that ties are ties.
__device__ __forceinline__ void make_keys(Shared& shared, const Scores& scores, unsigned* keys, int begin,
                                          int count, int last_page) {
  float lse[kGroup];
#pragma unroll
  for (int g = 0; g < kGroup; ++g) lse[g] = shared.lse[g];
  const KeyRange ranked = kRankedKeys;
  unsigned lowest = ~0u, highest = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kSelectThreads) {
    float share = 0.0f;
#pragma unroll
    for (int g = 0; g < kGroup; ++g) share += exp2_approx(scores.at[g * scores.stride + i] * kLog2e - lse[g]);
    const int page = begin + i;
    const unsigned key = page == 0 || page == last_page ? kFixed : __float_as_uint(share);
    keys[i] = key;
    if (ranked.holds(key)) {
      atomicAdd(&shared.local[share_bin(key)], 1u);
      lowest = min(lowest, key);
      highest = max(highest, key);
    }
  }
  lowest = __reduce_min_sync(kFullWarp, lowest);
  highest = __reduce_max_sync(kFullWarp, highest);
  if (threadIdx.x % 32 == 0) {
    atomicMin(&shared.own_limits.lowest, lowest);
    atomicMax(&shared.own_limits.highest, highest);
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
  for (int base = 0, turn = 0; base < count; base += kSelectThreads, turn ^= 1) {
    const int i = base + threadIdx.x, page = begin + i;
    const unsigned key = i < count ? keys[i] : 0u;
    const bool inside = i < count && threshold.range.holds(key);
    const bool best = key > last.key || (key == last.key && page <= last.page);
    const bool sure = i < count && (key > threshold.range.high || (inside && !threshold.tied && best));
    const bool tie = inside && threshold.tied;
    const unsigned sure_votes = __ballot_sync(kFullWarp, sure), tie_votes = __ballot_sync(kFullWarp, tie);
    if (lane == 0) shared.counts[turn][warp] = __popc(sure_votes) | __popc(tie_votes) << 16;
    __syncthreads();
    const unsigned counts = lane < kSelectWarps ? shared.counts[turn][lane] : 0u;
    const unsigned all = __reduce_add_sync(kFullWarp, counts);
    const unsigned before = __reduce_add_sync(kFullWarp, lane < warp ? counts : 0u);
    const unsigned lower = (1u << lane) - 1u;
    const int ties = ties_before + (before >> 16) + __popc(tie_votes & lower);
    if (sure || (tie && ties < most_ties)) {
      const int slot = sure_before + (before & 0xffffu) + __popc(sure_votes & lower) + min(ties, most_ties);
      list.put(slot, page, physical ? physical[i] : list.table[page]);
    }
    sure_before += all & 0xffffu;
    ties_before += all >> 16;
  }
}

__global__ void __launch_bounds__(kSelectThreads) select_kernel(const __grid_constant__ SelectParams params) {
  extern __shared__ __align__(16) char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  // Keys take the place of the first head's scores where these are staged: each is written by the
  // thread that has just read the scores of its page for the last time.
  float* room = reinterpret_cast<float*>(raw + kSharedBytes);
  unsigned* keys = reinterpret_cast<unsigned*>(room);
  int* physical = reinterpret_cast<int*>(room + kGroup * params.staged_pages);

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
  const bool staged = count <= params.staged_pages;
  if (staged) {
    // Physical pages are needed last; fetched here, they are not waited for.
    const uint64_t policy = read_once_policy();
    for (int i = threadIdx.x; i < count; i += kSelectThreads) {
      copy_async<4>(shared_address(physical + i), list.table + begin + i, policy);
    }
  }
  for (int i = threadIdx.x; i < kBins; i += kSelectThreads) {
    shared.histogram[0][i] = shared.histogram[1][i] = shared.local[i] = 0;
  }
  if (threadIdx.x == 0) {
    shared.above = shared.equal = shared.candidates = 0;
    shared.last = Candidate{kFixed, -1};
    shared.own_limits.lowest = shared.limits.lowest = ~0u;
    shared.own_limits.highest = shared.limits.highest = 0;
  }
  wait_for_previous_kernel();
  // Not earlier: attend's blocks would take the multiprocessors that later blocks of this kernel need.
  let_next_kernel_start();

  Scores scores{nullptr, params.score_head_stride};
  const bool packed = params.score_row_stride == 0;
  if (packed) {
    const int first = params.row_tiles[row], tiles = params.row_tiles[row + 1] - first;
    // A row that did not fit the workspace attends everything.
    if (tiles == 0) {
      copies_wait();
      list_everything(params, list, present, row, head, team.size);
      return;
    }
    scores.stride = static_cast<int64_t>(tiles) * kTile;
    scores.at = params.scores + (static_cast<int64_t>(first) * kTile) * (params.kv_heads * kGroup) +
                head * kGroup * scores.stride + begin;
  } else {
    scores.at = params.scores + row * params.score_row_stride + head * kGroup * scores.stride + begin;
  }
  if (team.rank == 0 && head == 0 && threadIdx.x == 0) params.counts[row] = budget;

  if (staged) {
    stage(scores, room, count, packed);
    scores = Scores{room, count_pitch(count)};
    copies_wait();
    __syncthreads();
  }
  sum_scores(shared, scores, count);
  if (params.lse != nullptr) {
    if (threadIdx.x < kGroup) {
      const int64_t q_head = (static_cast<int64_t>(row) * params.kv_heads + head) * kGroup + threadIdx.x;
      shared.lse[threadIdx.x] = params.lse[q_head] * kLog2e;
    }
    team.sync();
  } else {
    join_team(shared, team);
  }
  make_keys(shared, scores, keys, begin, count, present - 1);

  Threshold threshold{kNoKeys, 0, false};
  // A thread reads the keys that it has written itself.
  if (budget > 2) threshold = find_threshold(shared, team, keys, count, budget - 2);

  int above = 0, equal = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kSelectThreads) {
    const unsigned key = keys[i];
    above += key > threshold.range.high;
    if (threshold.range.holds(key)) {
      ++equal;
      if (!threshold.tied) shared.own[atomicAdd(&shared.candidates, 1)] = Candidate{key, begin + i};
    }
  }
  above = __reduce_add_sync(kFullWarp, above);
  equal = __reduce_add_sync(kFullWarp, equal);
  if (threadIdx.x % 32 == 0) {
    if (above) atomicAdd(&shared.above, above);
    if (equal) atomicAdd(&shared.equal, equal);
  }
  team.sync();
  count_before(shared, team);
  if (threshold.need > 0 && !threshold.tied) rank_candidates(shared, team, threshold.need);
  // This block reads no other's shared memory from here on, and may not leave before all are there.
  team.arrive();
  write_list(shared, list, staged ? physical : nullptr, keys, begin, count, threshold);
  team.wait();
}

constexpr int kMostShared = 227 * 1024;
constexpr int kSharedOfTwo = 113 * 1024;  // of each of two blocks on a multiprocessor

// How a launch divides a list: blocks of a cluster, and what one of them has in shared memory.
struct Shape {
  int cluster, staged_pages, bytes;
  int least_bytes;  // with no scores staged

  // `alone`: no second block is to be on the multiprocessor.
  Shape(int64_t max_pages, int cluster, bool alone) : cluster(cluster) {
    const int most_pages =
        count_pitch(static_cast<int>(std::max<int64_t>((max_pages + cluster - 1) / cluster, kPagesPerBlock)));
    // Scores of all heads and physical pages, or keys only.
    const int room = (kMostShared - kSharedBytes) / (4 * (kGroup + 1)) / 4 * 4;
    staged_pages = std::min({most_pages, alone ? 2 * kPagesPerBlock : kPagesPerBlock, room});
    least_bytes = kSharedBytes + 4 * most_pages;
    bytes = std::max(least_bytes, kSharedBytes + 4 * (kGroup + 1) * staged_pages);
    if (alone) bytes = std::max(bytes, kSharedOfTwo + 16);
  }
};

void prepare(int device) {
  static bool prepared[kMaxDevices] = {};
  if (prepared[device]) return;
  check_cuda(cudaFuncSetAttribute(select_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared),
             "shared memory of the select kernel");
  check_cuda(cudaFuncSetAttribute(select_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
             "cluster size of the select kernel");
  prefer_shared_memory(select_kernel);
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
    if (cudaOccupancyMaxActiveClusters(&found->second, select_kernel, &config) != cudaSuccess) cudaGetLastError();
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
    // Longer runs of pages, whose keys take more than half of a multiprocessor, gain nothing.  Scores of
    // more than 8 heads take more than that in any case, and then too many blocks only wait.
    if (cluster == 1 || Shape(max_pages, cluster / 2, false).least_bytes > kSharedOfTwo) {
      return Shape(max_pages, cluster, false);
    }
  }
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
  prepare(device);
  const int lists = static_cast<int>(rows * kv_heads);
  const Shape shape = choose_shape(device, max_pages, lists);
  params.staged_pages = shape.staged_pages;
  launch(select_kernel, dim3(shape.cluster, lists), kSelectThreads, shape.bytes, stream, shape.cluster, params);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(select, select);

}  // namespace locks
