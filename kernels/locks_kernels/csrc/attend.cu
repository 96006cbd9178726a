// attend: decode attention over the pages of a list (or all pages of a row), one launch.
//
// The tokens of a (row, KV head) are split over blocks and, within a block, over warps, in tiles
// of 16.  A warp keeps a tile's K and V in registers only: the order in which dimensions enter a
// dot product is free, so 16-byte loads give operands of the tensor cores without shared memory.
// The list of a sparse step has about as many tiles as a cluster has warps.
//   S^T [16 tokens x 8 heads] = K q^T        A = K, B = q
//   O^T [16 dims x 8 heads]  += V^T P^T      A = V^T (byte permutes), B = P^T (movmatrix)
// Blocks of a cluster merge through each other's shared memory, each a slice of the output, and wait for
// what the others send, not for them; clusters of one (row, KV head) merge through global memory, the
// last to finish doing it, always in the same order.
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
  // Blocks start in the order x, y, z: the first cluster of every (row, KV head), which all need, is there
  // before those that only long lists need.
  int64_t row_head = blockIdx.y;
  int row = blockIdx.y / params.kv_heads, head = blockIdx.y % params.kv_heads;
  int rank = blockIdx.x, cluster = blockIdx.z, split = cluster * params.cluster + rank;
  bool chained = params.budgets != nullptr;
  if (!chained) wait_for_previous_kernel();

  QueryPart part(params, row, head);
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

  const int peers = min(splits, params.cluster);
  Accumulator acc;
  acc.clear();
  attend_tiles(params, shared.queries, list, head, share, acc, [&] {
    part.store(shared.queries);
    if (threadIdx.x == 0) open_inbox(shared, peers, rank, params.group);
    if (peers > 1) cluster_arrive();
    __syncthreads();
  });
  let_next_kernel_start();
  stage_warps(shared, acc);

  // Every block of the cluster merges one slice of [group x kDim] over the blocks.
  const Slices slices = shared.slices;
  if (peers > 1) cluster_wait();  // all peers have started, so their barriers are there
  send_slices(shared, slices, rank, params.group);
  // Also where a slice is empty: a block has to be there as long as its peers send.
  wait_for_inbox(shared);

  const int first = slices.begin(rank), stop = slices.begin(rank + 1);
  auto merge_peers = [&](int item) {
    int member = item / (kDim / 4);
    return merge_parts(slices.peers, [&](int peer, float2& sums, float4& v) {
      sums = shared.inbox_sums[peer][member];
      v = shared.inbox[peer * slices.stride + item - first];
    });
  };
  if (splits <= params.cluster) {
    for_each_item(first, stop, [&](int item, bool writes) {
      Merged merged = merge_peers(item);
      if (writes) write_output(params, merged, row_head, item);
    });
  } else {
    int clusters = splits / params.cluster;
    int64_t slots = gridDim.z;  // clusters that a row has room for
    // Where a cluster leaves an item and its sums.  The heads of a slice belong to it alone or hold equal
    // values in its neighbour's entry.
    auto place = [&](int of, int item, int64_t& output, int64_t& sums) {
      int64_t slot = row_head * slots + of;
      output = slot * params.group * kDim + item * 4;
      sums = (slot * params.cluster + rank) * params.group + item / (kDim / 4);
    };
    for_each_item(first, stop, [&](int item, bool writes) {
      Merged merged = merge_peers(item);
      int64_t output, sums;
      place(cluster, item, output, sums);
      if (!writes) return;
      *reinterpret_cast<float4*>(params.partial_output + output) = merged.output;
      params.partial_sums[sums] = make_float2(merged.peak, merged.total);
    });
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
      for_each_item(first, stop, [&](int item, bool writes) {
        Merged merged = merge_parts(clusters, [&](int other, float2& sums, float4& v) {
          int64_t output_at, sums_at;
          place(other, item, output_at, sums_at);
          sums = __ldcg(&params.partial_sums[sums_at]);
          v = __ldcg(reinterpret_cast<const float4*>(params.partial_output + output_at));
        });
        if (writes) write_output(params, merged, row_head, item);
      });
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

// A stride of the pool as the kernel takes it, which multiplies it by less than `times`: products with 32 bits
// are one instruction.
int stride_bytes(int64_t elements, int64_t times) {
  int64_t bytes = elements * Kv::kBytes;
  if (bytes * times > INT32_MAX) {
    TVM_FFI_THROW(ValueError) << "pages or tokens of the pool lie " << bytes << " bytes apart; legal: less than "
                              << INT32_MAX / times;
  }
  return static_cast<int>(bytes);
}

// Addresses, strides (in elements) and sizes as integers: the caller (cuda_attend.py) has checked them.
void attend(int64_t queries, int64_t q_row, int64_t q_head, int64_t keys, int64_t k_page, int64_t k_slot,
            int64_t k_head, int64_t values, int64_t v_page, int64_t v_slot, int64_t v_head, int64_t pages,
            int64_t width, int64_t counts, int64_t page_table, int64_t table_row, int64_t lengths, int64_t wide_lengths,
            double sm_scale, double v_scale, int64_t output, int64_t lse, int64_t partial_output, int64_t partial_sums,
            int64_t arrivals, int64_t rows, int64_t kv_heads, int64_t group, int64_t splits, int64_t cluster,
            int64_t tiles_a_warp, int64_t budgets, [[maybe_unused]] int64_t hot_keys,
            [[maybe_unused]] int64_t hot_values, int64_t stream) {
  if (cluster < 2 || cluster > kMostPeers) {
    TVM_FFI_THROW(ValueError) << "clusters of " << cluster << " blocks; legal: 2 to " << kMostPeers;
  }
  Params params{address<const void>(queries),
                q_row,
                q_head,
                address<const unsigned char>(keys),
                address<const unsigned char>(values),
                k_head * Kv::kBytes,
                v_head * Kv::kBytes,
                stride_bytes(k_page, 1),
                stride_bytes(k_slot, kPage),
                stride_bytes(v_page, 1),
                stride_bytes(v_slot, kPage),
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
  dim3 grid(static_cast<unsigned>(cluster), static_cast<unsigned>(rows * kv_heads),
            static_cast<unsigned>(splits / cluster));
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
