// score: page scores of the `locks` selector from summary records (paper Eq. 2).
//
// A block is kTeams teams of scoring warps, and kCopyWarps warps that copy.  A team walks over its
// units, a tile of 8 pages of kTogether KV heads each.  A warp scores one KV head of a unit for up
// to 8 query heads; where a KV head has more, two warps read its records.  A team's ring of stages
// in shared memory is kept full by a copying warp, which runs ahead as far as there are free
// stages, so the memory system has work all the time and the scoring warps spend no instruction
// on addresses.  Teams never wait for each other.  When they have issued everything, the copying
// warps score the pages of the current tokens from their keys.
//
// variant: HEAD_DIM=128 RANK=4
// variant: HEAD_DIM=64 RANK=6 ROTATED=1 HEADS_TOGETHER=1 OPEN_PAGES=1
// variant: HEAD_DIM=128 RANK=8 BLOCKS=2 HEADS_TOGETHER=2 QUERY_HALF=1 KEY_FP8=1

#include "exact_page.cuh"
#include "record.cuh"
#include "schedule.cuh"
#include "score_tile.cuh"

#ifndef QUERY_HALF
#define QUERY_HALF 0
#endif
#ifndef KEY_FP8
#define KEY_FP8 0
#endif
#ifndef OPEN_PAGES  // whether the current pages' keys lie at places of their own
#define OPEN_PAGES 0
#endif

namespace locks {

constexpr int kThreads = 32 * (kWarps + kCopyWarps);

struct ScoreParams {
  const uint16_t* queries;
  int64_t query_row_stride, query_head_stride;
  KeyPool keys;
  const char *basis, *coefficients, *centroid, *scales, *scales_end;
  int basis_page, coefficient_page, centroid_page, scale_page;  // bytes of all heads of a page
  const int* page_table;
  int64_t table_stride;
  Lengths lengths;
  const int* budgets;
  float* scores;
  // Dense scores [rows, q_heads, pages] have strides; packed ones (row stride 0) lay the tiles of
  // all rows end to end, a row's heads one after the other.
  int64_t score_row_stride, score_head_stride;
  int rows, kv_heads, group, capacity;
  float sm_scale;
  // The tables and records were complete before the kernel before this one began: only the queries
  // and the current page's keys are waited for.
  bool settled;
#if OPEN_PAGES
  const int* open_pages;
#endif
};

struct Rows {
  const int* first;   // first tile of every row
  const int* closed;  // complete pages of every row
};

// A unit: a tile and a set of kTogether KV heads.  Teams of a block take turns, heads innermost.
struct Cursor {
  int tile, set, row, row_begin, row_end, closed;

  __device__ __forceinline__ void enter(const Rows& rows) {
    row_begin = rows.first[row];
    row_end = rows.first[row + 1];
    closed = rows.closed[row];
  }

  __device__ __forceinline__ void advance(int tile_step, int set_step, int sets, int end, const Rows& rows) {
    tile += tile_step;
    set += set_step;
    if (set >= sets) {
      set -= sets;
      ++tile;
    }
    if (tile < end && tile >= row_end) {
      while (tile >= rows.first[row + 1]) ++row;
      enter(rows);
    }
  }
};

// Physical page of page lane % 8 of the tile; pages past the row's last repeat it.
__device__ __forceinline__ int load_page(const ScoreParams& params, const Cursor& cursor) {
  int page = (cursor.tile - cursor.row_begin) * kTile + (threadIdx.x & 7);
  page = max(min(page, cursor.closed - 1), 0);
  return __ldg(params.page_table + cursor.row * params.table_stride + page);
}

// Start the copies of kRun bytes of every page at `plane`, pages being `page_bytes` apart.
template <int kRun, int kStride, int kPiece>
__device__ __forceinline__ void copy_plane(uint32_t target, const char* plane, int pages, int page_bytes,
                                           uint64_t policy) {
  constexpr int kPieces = kRun / kPiece, kAll = kTile * kPieces;
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < (kAll + 31) / 32; ++i) {
    int page, part;
    if constexpr (kPieces % 32 == 0) {
      page = i / (kPieces / 32), part = i % (kPieces / 32) * 32 + lane;
    } else {
      page = (i * 32 + lane) / kPieces, part = (i * 32 + lane) % kPieces;
    }
    const int64_t physical = __shfl_sync(kFullWarp, pages, page & 7);
    if (kAll % 32 == 0 || i * 32 + lane < kAll) {
      copy_async<kPiece>(target + page * kStride + part * kPiece, plane + part * kPiece + physical * page_bytes,
                         policy);
    }
  }
}

// The scales of single heads: the 16-byte pieces around them, and where the scales start in these.
__device__ __forceinline__ void copy_shifted_scales(const ScoreParams& params, uint32_t target, int* shifts, int pages,
                                                    int head, uint64_t policy) {
  constexpr int kPieces = kScaleRun / 16, kAll = kTile * kPieces;
  const int lane = threadIdx.x & 31;
  const char* plane = params.scales + head * kScaleBytes;
#pragma unroll
  for (int i = 0; i < (kAll + 31) / 32; ++i) {
    const int page = (i * 32 + lane) / kPieces, part = (i * 32 + lane) % kPieces;
    const int64_t physical = __shfl_sync(kFullWarp, pages, page & 7);
    const char* start = plane + physical * params.scale_page;
    const int shift = reinterpret_cast<uintptr_t>(start) & 15;
    const char* source = start - shift + part * 16;
    if (kAll % 32 == 0 || i * 32 + lane < kAll) {
      if (part == 0) shifts[page] = shift;
      const uint32_t piece = target + page * kScaleStride + part * 16;
      if (source + 16 <= params.scales_end) {
        copy_async<16>(piece, source, policy);
      } else {
        // The last pieces of a pool: nothing past its end is read.
        const int64_t left = params.scales_end - source;
        copy_async_partial(piece, left > 0 ? source : start, left > 0 ? static_cast<int>(left) : 0);
      }
    }
  }
}

// Start the copies of a unit's records into a stage, by one warp.
__device__ __forceinline__ void copy_records(const ScoreParams& params, uint32_t stage, int* shifts, int pages,
                                             int head, uint64_t policy) {
  copy_plane<kTogether * kBasisBytes, kBasisStride, 16>(stage + kBasisAt, params.basis + head * kBasisBytes, pages,
                                                        params.basis_page, policy);
  copy_plane<kTogether * kCentroidBytes, kCentroidStride, 16>(
      stage + kCentroidAt, params.centroid + head * kCentroidBytes, pages, params.centroid_page, policy);
  copy_plane<kCoefficientRun, kCoefficientStride, kCoefficientPiece>(
      stage + kCoefficientsAt, params.coefficients + head * kCoefficientBytes, pages, params.coefficient_page, policy);
  if constexpr (kScalesShift) {
    copy_shifted_scales(params, stage + kScalesAt, shifts, pages, head, policy);
  } else {
    copy_plane<kScaleRun, kScaleStride, kScalePiece>(stage + kScalesAt, params.scales + head * kScaleBytes, pages,
                                                     params.scale_page, policy);
  }
}

__device__ __forceinline__ float* score_address(const ScoreParams& params, const Rows& rows, int row, int q_head) {
  if (params.score_row_stride) {
    return params.scores + row * params.score_row_stride + q_head * params.score_head_stride;
  }
  int first = rows.first[row], tiles = rows.first[row + 1] - first;
  int64_t q_heads = params.kv_heads * params.group;
  return params.scores + kTile * (first * q_heads + static_cast<int64_t>(tiles) * q_head);
}

// The tiles of this block, in equal shares for all blocks.
struct Range {
  int begin, end;
  __device__ explicit Range(int total)
      : begin(static_cast<int>(static_cast<int64_t>(total) * blockIdx.x / gridDim.x)),
        end(static_cast<int>(static_cast<int64_t>(total) * (blockIdx.x + 1) / gridDim.x)) {}
};

__device__ __forceinline__ uint32_t full_barrier(uint32_t shared, int ring) { return shared + kBarriersAt + 16 * ring; }
__device__ __forceinline__ uint32_t free_barrier(uint32_t shared, int ring) { return full_barrier(shared, ring) + 8; }

// One warp keeps the rings of its teams full, in the order in which the teams need the tiles.
__device__ __forceinline__ void copy_units(const ScoreParams& params, const Rows& rows, char* shared, int copy_warp) {
  const uint32_t base = shared_address(shared);
  const int sets = params.kv_heads / kTogether;
  const Range range(rows.first[params.rows]);
  const uint64_t policy = read_once_policy();
  const int first_team = copy_warp * kTeamsPerCopyWarp;

  Cursor cursor{range.begin + first_team / sets, first_team % sets, 0};
  if (cursor.tile >= range.end) return;
  while (cursor.tile >= rows.first[cursor.row + 1]) ++cursor.row;
  cursor.enter(rows);
  // Page numbers are fetched one unit ahead of the copies.
  int pages = load_page(params, cursor);
#pragma unroll 1
  for (int round = 0, team = 0; cursor.tile < range.end;) {
    const int ring = (first_team + team) * kStages + round % kStages;
    const int head = cursor.set * kTogether, ready = pages;
    // To the next team's unit; after the last team to the first one's in the next round.
    const bool wrap = team + 1 == kTeamsPerCopyWarp;
    const int step = wrap ? kTeams - kTeamsPerCopyWarp + 1 : 1;
    cursor.advance(step / sets, step % sets, sets, range.end, rows);
    if (cursor.tile < range.end) pages = load_page(params, cursor);

    if (round >= kStages) barrier_wait(free_barrier(base, ring), (round / kStages - 1) & 1);
    int* shifts = reinterpret_cast<int*>(shared + kShiftsAt) + ring * kTile;
    copy_records(params, base + ring * kStageBytes, shifts, ready, head, policy);
    barrier_arrive_after_copies(full_barrier(base, ring));
    if constexpr (kScalesShift) {
      __syncwarp();
      if ((threadIdx.x & 31) == 0) barrier_arrive(full_barrier(base, ring));
    }
    round += wrap;
    team = wrap ? 0 : team + 1;
  }
}

__device__ __forceinline__ void score_units(const ScoreParams& params, const Rows& rows, char* shared) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n = lane >> 2, c = lane & 3;
  const int team = warp / kTeamWarps, member = warp % kTeamWarps / kBlocks, block = warp % kBlocks;
  const int heads = params.group - 8 * block;  // query heads of the group from this warp's first on
  const int sets = params.kv_heads / kTogether;
  const int tile_step = kTeams / sets, set_step = kTeams % sets;
  const Range range(rows.first[params.rows]);

  int ring = team * kStages, parity = 0;
  int tile = range.begin + team / sets, set = team % sets, row = 0;
  while (tile < range.end) {
    // The run of tiles that this warp has of one row and head.
    while (tile >= rows.first[row + 1]) ++row;
    const int row_begin = rows.first[row], row_end = min(rows.first[row + 1], range.end);
    int count = set_step == 0 ? (row_end - tile + tile_step - 1) / tile_step : 1;
    const int head = set * kTogether + member, page = (tile - row_begin) * kTile + 2 * c;
    int left = rows.closed[row] - page;  // complete pages from this lane's first one on
    const int q_head = head * params.group + 8 * block;
    // Scores of this lane's query head and pages.
    float* target = score_address(params, rows, row, q_head + n) + page;
    Query query;
    load_query<QUERY_HALF != 0>(query,
                                params.queries + row * params.query_row_stride + q_head * params.query_head_stride,
                                params.query_head_stride, heads, params.sm_scale * kLog2e);
    tile += count * tile_step;
    set += set_step;
    if (set >= sets) {
      set -= sets;
      ++tile;
    }

#pragma unroll 1
    for (; count > 0; --count) {
      const char* stage = shared + ring * kStageBytes;
      barrier_wait(full_barrier(shared_address(shared), ring), parity);
      int offset = member * kScaleBytes;
      if constexpr (kScalesShift) {
        offset = reinterpret_cast<const int*>(shared + kShiftsAt)[ring * kTile + (lane & 7)];
      }
      float scores[2];
      score_tile(scores, stage, member, offset, query);
      __syncwarp();
      if (lane == 0) barrier_arrive(free_barrier(shared_address(shared), ring));
      if (++ring == (team + 1) * kStages) {
        ring = team * kStages;
        parity ^= 1;
      }
      if (n < heads) {
        if (left >= 2) {
          *reinterpret_cast<float2*>(target) = make_float2(scores[0], scores[1]);
        } else if (left == 1) {
          *target = scores[0];
        }
      }
      target += kTile * tile_step;
      left -= kTile * tile_step;
    }
  }
}

// Exact scores of the pages of the current tokens, which have no record yet.
__device__ __forceinline__ void score_current_pages(const ScoreParams& params, const Rows& rows, int copy_warp) {
  const int lane = threadIdx.x & 31, n = lane >> 2, c = lane & 3;
  const int units = params.rows * params.kv_heads;
#pragma unroll 1
  for (int unit = copy_warp * gridDim.x + blockIdx.x; unit < units; unit += kCopyWarps * gridDim.x) {
    int row = unit / params.kv_heads, head = unit % params.kv_heads;
    if (rows.first[row + 1] == rows.first[row]) continue;
    int page = rows.closed[row], tokens = params.lengths[row] - page * kPage;
#if OPEN_PAGES
    int physical = __ldg(params.open_pages + row);
#else
    int physical = __ldg(params.page_table + row * params.table_stride + page);
#endif
    float scores[2];
    exact_page_scores<kDim, kPage, QUERY_HALF != 0, KEY_FP8 != 0>(
        scores,
        params.queries + row * params.query_row_stride + head * params.group * params.query_head_stride,
        params.query_head_stride, params.group, params.keys, physical, head, tokens, params.sm_scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int query = 8 * half + n;
      if (c == 0 && query < params.group) {
        score_address(params, rows, row, head * params.group + query)[page] = scores[half];
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1) score_kernel(const __grid_constant__ ScoreParams params) {
  extern __shared__ __align__(128) char shared[];
  int* first = reinterpret_cast<int*>(shared + kRowsAt);
  int* closed = first + params.rows + 1;
  if (threadIdx.x < kRings) {
    barrier_init(full_barrier(shared_address(shared), threadIdx.x), 32 + kScalesShift);
    barrier_init(free_barrier(shared_address(shared), threadIdx.x), kTeamWarps);
  }
  if (!params.settled) wait_for_previous_kernel();
#pragma unroll 1
  for (int row = threadIdx.x; row < params.rows; row += blockDim.x) closed[row] = (params.lengths[row] - 1) / kPage;
  schedule_rows(first, params.rows, params.lengths, params.budgets, kPage, params.capacity);
  Rows rows{first, closed};
  if (threadIdx.x < 32 * kWarps) {
    wait_for_previous_kernel();
    // Not earlier: what the next kernels read ahead of their own wait must be there when they start.
    let_next_kernel_start();
    score_units(params, rows, shared);
  } else {
    const int copy_warp = threadIdx.x / 32 - kWarps;
    copy_units(params, rows, shared, copy_warp);
    wait_for_previous_kernel();
    score_current_pages(params, rows, copy_warp);
  }
}

// Pointers are addresses; strides are in elements; see ScoreParams.
void score(int64_t queries, int64_t query_row_stride, int64_t query_head_stride, int64_t keys, int64_t page_stride,
           int64_t token_stride, int64_t head_stride, int64_t basis, int64_t coefficients, int64_t centroid,
           int64_t scales, int64_t scales_end, int64_t page_table, int64_t table_stride, int64_t lengths,
           bool wide_lengths, int64_t budgets, int64_t scores, int64_t score_row_stride, int64_t score_head_stride,
           int64_t rows, int64_t kv_heads, int64_t group, int64_t capacity, double sm_scale,
           bool settled, [[maybe_unused]] int64_t open_pages, int64_t stream) {
  ScoreParams params;
  params.queries = address<const uint16_t>(queries);
  params.query_row_stride = query_row_stride;
  params.query_head_stride = query_head_stride;
  params.keys = KeyPool{address<const char>(keys), page_stride, token_stride, head_stride};
  params.basis = address<const char>(basis);
  params.coefficients = address<const char>(coefficients);
  params.centroid = address<const char>(centroid);
  params.scales = address<const char>(scales);
  params.scales_end = address<const char>(scales_end);
  params.basis_page = static_cast<int>(kv_heads * kBasisBytes);
  params.coefficient_page = static_cast<int>(kv_heads * kCoefficientBytes);
  params.centroid_page = static_cast<int>(kv_heads * kCentroidBytes);
  params.scale_page = static_cast<int>(kv_heads * kScaleBytes);
  params.page_table = address<const int>(page_table);
  params.table_stride = table_stride;
  params.lengths = Lengths{address<const void>(lengths), wide_lengths};
  params.budgets = address<const int>(budgets);
  params.scores = address<float>(scores);
  params.score_row_stride = score_row_stride;
  params.score_head_stride = score_head_stride;
  params.rows = static_cast<int>(rows);
  params.kv_heads = static_cast<int>(kv_heads);
  params.group = static_cast<int>(group);
  params.capacity = static_cast<int>(capacity);
  params.sm_scale = static_cast<float>(sm_scale);
  params.settled = settled;
#if OPEN_PAGES
  params.open_pages = address<const int>(open_pages);
#endif

  const int device = current_device();
  static bool prepared[kMaxDevices] = {};
  if (!prepared[device]) {
    check_cuda(cudaFuncSetAttribute(score_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    kRowsAt + static_cast<int>(sizeof(int)) * (2 * kMaxRows + 1)),
               "shared memory of the score kernel");
    prefer_shared_memory(score_kernel);
    prepared[device] = true;
  }
  const size_t shared = kRowsAt + sizeof(int) * (2 * rows + 1);
  launch(score_kernel, dim3(multiprocessors(device)), kThreads, shared, stream, 1, params);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(score, score);

}  // namespace locks
