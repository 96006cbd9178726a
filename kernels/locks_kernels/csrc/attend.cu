// attend: decode attention over the pages of a list (or all pages of a row), one launch.
//
// The tokens of a (row, KV head) are split over blocks and, within a block, over warps, in tiles
// of 16.  A warp keeps a tile's K and V in registers only: the order in which dimensions enter a
// dot product is free, so 16-byte loads give operands of the tensor cores without shared memory.
//   S^T [16 tokens x 8 heads] = K q^T        A = K, B = q
//   O^T [16 dims x 8 heads]  += V^T P^T      A = V^T (byte permutes), B = P^T (movmatrix)
// Blocks of a cluster merge through each other's shared memory; clusters of one (row, KV head)
// through global memory, the last to finish doing it, always in the same order.
//
// variant: HEAD_DIM=128 PAGE=16 KV_TYPE=0 Q_TYPE=0 HEAD_TILES=1
// variant: HEAD_DIM=128 PAGE=16 KV_TYPE=0 Q_TYPE=0 HEAD_TILES=2
// variant: HEAD_DIM=64 PAGE=32 KV_TYPE=3 Q_TYPE=1 HEAD_TILES=1
// variant: HEAD_DIM=256 PAGE=64 KV_TYPE=1 Q_TYPE=1 HEAD_TILES=2
// variant: HEAD_DIM=128 PAGE=16 KV_TYPE=0 Q_TYPE=0 HEAD_TILES=1 HOT=1
#include "attend_merge.cuh"

namespace locks {

// ---- the kernel -----------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, kBlocks) attend_kernel(Params params) {
  extern __shared__ __align__(16) unsigned char storage[];
  Shared& shared = *reinterpret_cast<Shared*>(storage);
  int64_t row_head = blockIdx.y;
  int row = blockIdx.y / params.kv_heads, head = blockIdx.y % params.kv_heads;
  int split = blockIdx.x;
  bool chained = params.budgets != nullptr;
  if (!chained) wait_for_previous_kernel();

  Queries queries;
  queries.load(params, row, head);
  int length = params.lengths[row], present = (length + kPage - 1) / kPage;
  int budget = chained ? params.budgets[row] : params.width;
  bool everything = chained && present <= budget;
  // The length of the list is known beforehand but for rows that had no room to be scored, so the list
  // is read with the count, not after it.
  int guess = everything ? present : min(min(budget, present), static_cast<int>(params.width));
  Share share(params, guess, length, split);
  const int* listed = params.pages + row_head * params.width;
  const int* table = params.page_table + row * params.table_row;
  if (chained && !everything) wait_for_previous_kernel();
  PageList list(everything ? table : listed, share.begin, share.end);
  int count = everything ? present : params.counts[row];
  if (count != guess) {
    share = Share(params, count, length, split);
    list = PageList(count > params.width ? table : listed, share.begin, share.end);
  }
  const int splits = share.splits;
  if (split >= splits) return;
  int peers = min(splits, params.cluster), rank = split % params.cluster;
  if (peers > 1) cluster_arrive();

  Accumulator acc;
  acc.clear();
  if (share.begin < share.end) attend_tiles(params, queries, list, head, share, acc);
  let_next_kernel_start();
  stage_warps(shared, acc);

  // Every block of the cluster merges one slice of [group x kDim] over the blocks.
  Slices slices(params.group * (kDim / 4), peers);
  if (peers > 1) cluster_wait();  // all peers have started, so their shared memory is there
  send_slices(shared, slices, rank, params.group);
  if (peers > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  int clusters = splits / peers, cluster = split / params.cluster;
  int first = slices.begin(rank), stop = slices.begin(rank + 1);
  int64_t slots = params.splits / params.cluster;  // clusters that a row has room for
  int64_t slot = row_head * slots + cluster;
  for (int item = first + threadIdx.x; item < stop; item += kThreads) {
    int member = item / (kDim / 4), dim = item % (kDim / 4) * 4;
    Merged merged = merge_parts<4>(peers, [&](int peer, float2& sums, float4& v) {
      sums = shared.inbox_sums[peer][member];
      v = shared.inbox[peer * slices.stride + item - first];
    });
    if (clusters == 1) {
      write_output(params, merged, row_head, member, dim);
    } else {
      *reinterpret_cast<float4*>(params.partial_output + (slot * params.group + member) * kDim + dim) = merged.output;
      // The heads of a slice belong to it alone or hold equal values in its neighbour's entry.
      params.partial_sums[(slot * params.cluster + rank) * params.group + member] =
          make_float2(merged.peak, merged.total);
    }
  }
  if (clusters > 1) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      // Wraps to zero at the last arrival, ready for the next launch.
      unsigned before = atomicInc(&params.arrivals[row_head * params.cluster + rank], clusters - 1);
      shared.last = before == static_cast<unsigned>(clusters - 1);
    }
    __syncthreads();
    if (shared.last) {
      __threadfence();
      for (int item = first + threadIdx.x; item < stop; item += kThreads) {
        int member = item / (kDim / 4), dim = item % (kDim / 4) * 4;
        Merged merged = merge_parts<8>(clusters, [&](int other, float2& sums, float4& v) {
          int64_t from = row_head * slots + other;
          sums = __ldcg(&params.partial_sums[(from * params.cluster + rank) * params.group + member]);
          v = __ldcg(reinterpret_cast<const float4*>(params.partial_output +
                                                     (from * params.group + member) * kDim + dim));
        });
        write_output(params, merged, row_head, member, dim);
      }
    }
  }
  // A kernel that is complete tells the next one that all before it are.
  if (params.budgets != nullptr) wait_for_previous_kernel();
}

void prepare() {
  check_cuda(cudaFuncSetAttribute(attend_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)),
             "shared memory of attend");
  check_cuda(cudaFuncSetAttribute(attend_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
             "clusters of attend");
}

// Addresses, strides (in elements) and sizes as integers: the caller (cuda_attend.py) has checked them.
void attend(int64_t queries, int64_t q_row, int64_t q_head, int64_t keys, int64_t k_page, int64_t k_slot,
            int64_t k_head, int64_t values, int64_t v_page, int64_t v_slot, int64_t v_head, int64_t pages,
            int64_t width, int64_t counts, int64_t page_table, int64_t table_row, int64_t lengths, int64_t wide_lengths,
            double sm_scale, double v_scale, int64_t output, int64_t lse, int64_t partial_output, int64_t partial_sums,
            int64_t arrivals, int64_t rows, int64_t kv_heads, int64_t group, int64_t splits, int64_t cluster,
            int64_t tiles_a_warp, int64_t budgets, [[maybe_unused]] int64_t hot_keys,
            [[maybe_unused]] int64_t hot_values, int64_t stream) {
  Params params{address<const void>(queries),
                q_row,
                q_head,
                address<const unsigned char>(keys),
                address<const unsigned char>(values),
                k_page * Kv::kBytes,
                k_slot * Kv::kBytes,
                k_head * Kv::kBytes,
                v_page * Kv::kBytes,
                v_slot * Kv::kBytes,
                v_head * Kv::kBytes,
                address<const int>(pages),
                width,
                address<const int>(counts),
                address<const int>(page_table),
                table_row,
                Lengths{address<const void>(lengths), wide_lengths != 0},
                static_cast<float>(sm_scale) * kLog2e,
                static_cast<float>(v_scale),
                address<void>(output),
                address<float>(lse),
                address<float>(partial_output),
                address<float2>(partial_sums),
                address<unsigned>(arrivals),
                static_cast<int>(kv_heads),
                static_cast<int>(group),
                static_cast<int>(splits),
                static_cast<int>(cluster),
                static_cast<int>(tiles_a_warp),
                address<const int>(budgets)};
#if HOT
  params.hot_keys = address<const unsigned char>(hot_keys);
  params.hot_values = address<const unsigned char>(hot_values);
#endif
  static const bool prepared = (prepare(), true);
  (void)prepared;
  dim3 grid(static_cast<unsigned>(splits), static_cast<unsigned>(rows * kv_heads));
  launch(attend_kernel, grid, kThreads, sizeof(Shared), stream,
         static_cast<int>(cluster), params);
}

// Clusters of that many blocks that the GPU holds at a time; 0 where it cannot.
int64_t clusters_at_a_time(int64_t cluster) {
  prepare();
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, attend_kernel, &config) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return clusters;
}

}  // namespace locks

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend, locks::attend);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(clusters_at_a_time, locks::clusters_at_a_time);
