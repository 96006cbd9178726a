// score: page scores of the `locks` selector from summary records (paper Eq. 2).
//
// A block is kWarps scoring warps and one more for the pages of the current tokens.  A scoring
// warp walks over its units, a tile of 8 pages of one KV head each, with its own ring of stages
// in shared memory that asynchronous copies keep full: no barrier, the warps drift apart and
// the memory system always has work.  Warps of a block take the KV heads of the same pages, so
// that records that are neighbours in memory are read at about the same time.
//
// variant: HEAD_DIM=128 RANK=4
// variant: HEAD_DIM=128 RANK=8
// variant: HEAD_DIM=128 RANK=8 ROTATED=1
// variant: HEAD_DIM=64 RANK=6 ROTATED=1
// variant: HEAD_DIM=128 RANK=4 BLOCKS=2
// variant: HEAD_DIM=256 RANK=16 BASIS_BITS=8 PAGE=64 BLOCKS=2 QUERY_HALF=1 KEY_FP8=1

#include "exact_page.cuh"
#include "record.cuh"
#include "schedule.cuh"
#include "score_tile.cuh"

#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef QUERY_HALF
#define QUERY_HALF 0
#endif
#ifndef KEY_FP8
#define KEY_FP8 0
#endif

namespace locks {

constexpr int kBlocks = BLOCKS;  // blocks of 8 query heads in a group
constexpr int kThreads = 32 * (kWarps + 1);

struct ScoreParams {
  const uint16_t* queries;
  int64_t query_row_stride, query_head_stride;
  KeyPool keys;
  const char *basis, *coefficients, *centroid, *scales, *scales_end;
  const int* page_table;
  int64_t table_stride;
  Lengths lengths;
  const int* budgets;
  float* scores;
  // Dense scores [rows, q_heads, pages] have strides; packed ones (row stride 0) lay the tiles of
  // all rows end to end, a row's heads one after the other.
  int64_t score_row_stride, score_head_stride;
  int* row_tiles;  // written for `select`
  int rows, kv_heads, group, capacity;
  float sm_scale;
};

struct Unit {
  int tile, head, row;
};

struct Rows {
  const int* first;   // first tile of every row
  const int* closed;  // complete pages of every row
};

__device__ __forceinline__ void find_row(Unit& unit, const Rows& rows) {
  while (unit.tile >= rows.first[unit.row + 1]) ++unit.row;
}

// The next unit of this warp: kWarps units further, heads innermost.
__device__ __forceinline__ void advance(Unit& unit, int kv_heads, int end, const Rows& rows) {
  unit.head += kWarps;
  while (unit.head >= kv_heads) {
    unit.head -= kv_heads;
    ++unit.tile;
  }
  if (unit.tile < end) find_row(unit, rows);
}

// Physical page of page lane % 8 of the unit; pages past the row's last repeat it.
__device__ __forceinline__ int load_page(const ScoreParams& params, const Unit& unit, int end, const Rows& rows) {
  if (unit.tile >= end) return 0;
  int closed = rows.closed[unit.row];
  int page = (unit.tile - rows.first[unit.row]) * kTile + (threadIdx.x & 7);
  page = max(min(page, closed - 1), 0);
  return __ldg(params.page_table + unit.row * params.table_stride + page);
}

// Where the scales of a page start within their first 16-byte piece.
__device__ __forceinline__ const char* scales_of(const ScoreParams& params, int page, int head) {
  return params.scales + (static_cast<int64_t>(page) * params.kv_heads + head) * kScaleBytes;
}

// Start the copies of a unit's records into a stage.
__device__ __forceinline__ void copy_records(const ScoreParams& params, uint32_t stage, int pages, int head) {
  const int lane = threadIdx.x & 31;
  const int64_t heads = params.kv_heads;
  {
    constexpr int kPieces = kBasisBytes / 16, kAll = kTile * kPieces;
#pragma unroll
    for (int i = 0; i < (kAll + 31) / 32; ++i) {
      int piece = i * 32 + lane, page = piece / kPieces, part = piece % kPieces;
      int64_t record = __shfl_sync(kFullWarp, pages, page & 7) * heads + head;
      if (kAll % 32 == 0 || piece < kAll) {
        copy_async<16>(stage + kBasisAt + piece * 16, params.basis + record * kBasisBytes + part * 16);
      }
    }
  }
  {
    constexpr int kPieces = kCentroidBytes / 16, kAll = kTile * kPieces;
#pragma unroll
    for (int i = 0; i < kAll / 32; ++i) {
      int piece = i * 32 + lane, page = piece / kPieces, part = piece % kPieces;
      int64_t record = __shfl_sync(kFullWarp, pages, page) * heads + head;
      copy_async<16>(stage + kCentroidAt + page * kCentroidStride + part * 16,
                     params.centroid + record * kCentroidBytes + part * 16);
    }
  }
  {
    constexpr int kPieces = kCoefficientBytes / kCoefficientPiece, kAll = kTile * kPieces;
#pragma unroll
    for (int i = 0; i < (kAll + 31) / 32; ++i) {
      int piece = i * 32 + lane, page = piece / kPieces, part = piece % kPieces;
      int64_t record = __shfl_sync(kFullWarp, pages, page & 7) * heads + head;
      if (kAll % 32 == 0 || piece < kAll) {
        copy_async<kCoefficientPiece>(
            stage + kCoefficientsAt + page * kCoefficientStride + part * kCoefficientPiece,
            params.coefficients + record * kCoefficientBytes + part * kCoefficientPiece);
      }
    }
  }
  {
    constexpr int kAll = kTile * kScalePieces;
#pragma unroll
    for (int i = 0; i < (kAll + 31) / 32; ++i) {
      int piece = i * 32 + lane, page = piece / kScalePieces, part = piece % kScalePieces;
      const char* start = scales_of(params, __shfl_sync(kFullWarp, pages, page & 7), head);
      const char* source = start - (reinterpret_cast<uintptr_t>(start) & 15) + part * 16;
      int64_t left = params.scales_end - source;
      if (kAll % 32 == 0 || piece < kAll) {
        copy_async_partial(stage + kScalesAt + page * kScaleStride + part * 16, left > 0 ? source : start,
                           static_cast<int>(max(min(left, int64_t{16}), int64_t{0})));
      }
    }
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

__device__ __forceinline__ void store_scores(const ScoreParams& params, const Rows& rows, const Unit& unit,
                                             const float (&scores)[kBlocks][2]) {
  const int lane = threadIdx.x & 31, n = lane >> 2, c = lane & 3;
  int page = (unit.tile - rows.first[unit.row]) * kTile + 2 * c;
  int closed = rows.closed[unit.row];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    int head = block * 8 + n;
    if (head >= params.group) continue;
    float* target = score_address(params, rows, unit.row, unit.head * params.group + head) + page;
    if (page + 1 < closed) {
      *reinterpret_cast<float2*>(target) = make_float2(scores[block][0], scores[block][1]);
    } else if (page < closed) {
      *target = scores[block][0];
    }
  }
}

__device__ __forceinline__ void score_units(const ScoreParams& params, const Rows& rows, char* shared) {
  const int warp = threadIdx.x >> 5;
  const int total = rows.first[params.rows];
  const int begin = static_cast<int>(static_cast<int64_t>(total) * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(static_cast<int64_t>(total) * (blockIdx.x + 1) / gridDim.x);
  char* stages = shared + warp * kStages * kStageBytes;
  const uint32_t stages_address = shared_address(stages);

  Unit ahead{begin + warp / params.kv_heads, warp % params.kv_heads, 0};
  if (ahead.tile >= end) return;
  find_row(ahead, rows);
  Unit unit = ahead;

  // Page numbers are fetched one unit before the copies that need them.
  int offsets[kStages];  // of the scales, for the units in flight
  int pages = load_page(params, ahead, end, rows);
  int ahead_pages;
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    Unit next = ahead;
    if (ahead.tile < end) advance(next, params.kv_heads, end, rows);
    ahead_pages = load_page(params, next, end, rows);
    offsets[i] = reinterpret_cast<uintptr_t>(scales_of(params, pages, ahead.head)) & 15;
    if (ahead.tile < end) copy_records(params, stages_address + i * kStageBytes, pages, ahead.head);
    copy_async_commit();
    ahead = next;
    pages = ahead_pages;
  }

  Query<kBlocks> query;
  int query_row = -1, query_head = -1;
  int slot = 0;
  while (true) {
    if (unit.row != query_row || unit.head != query_head) {
      query_row = unit.row, query_head = unit.head;
      load_query<kBlocks, QUERY_HALF != 0>(query,
                                           params.queries + unit.row * params.query_row_stride +
                                               unit.head * params.group * params.query_head_stride,
                                           params.query_head_stride, params.group, params.sm_scale * kLog2e);
    }
    copy_async_wait<kStages - 2>();
    __syncwarp();
    {
      Unit next = ahead;
      if (ahead.tile < end) advance(next, params.kv_heads, end, rows);
      ahead_pages = load_page(params, next, end, rows);
      int fill = slot == 0 ? kStages - 1 : slot - 1;
      offsets[kStages - 1] = reinterpret_cast<uintptr_t>(scales_of(params, pages, ahead.head)) & 15;
      if (ahead.tile < end) copy_records(params, stages_address + fill * kStageBytes, pages, ahead.head);
      copy_async_commit();
      ahead = next;
      pages = ahead_pages;
    }
    float scores[kBlocks][2];
    score_tile<kBlocks>(scores, stages + slot * kStageBytes, offsets[0], query);
    store_scores(params, rows, unit, scores);
    advance(unit, params.kv_heads, end, rows);
    if (unit.tile >= end) break;
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) offsets[i] = offsets[i + 1];
    slot = slot + 1 == kStages ? 0 : slot + 1;
    __syncwarp();
  }
  copy_async_wait<0>();
}

// Exact scores of the pages of the current tokens, which have no record yet.
__device__ __forceinline__ void score_current_pages(const ScoreParams& params, const Rows& rows) {
  const int lane = threadIdx.x & 31, n = lane >> 2, c = lane & 3;
  for (int unit = blockIdx.x; unit < params.rows * params.kv_heads; unit += gridDim.x) {
    int row = unit / params.kv_heads, head = unit % params.kv_heads;
    if (rows.first[row + 1] == rows.first[row]) continue;
    int page = rows.closed[row], tokens = params.lengths[row] - page * kPage;
    int physical = __ldg(params.page_table + row * params.table_stride + page);
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
  int* first = reinterpret_cast<int*>(shared + kWarps * kStages * kStageBytes);
  int* closed = first + params.rows + 1;
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int row = threadIdx.x; row < params.rows; row += blockDim.x) closed[row] = (params.lengths[row] - 1) / kPage;
  schedule_rows(first, params.rows, params.lengths, params.budgets, kPage, params.capacity);
  if (blockIdx.x == 0 && params.score_row_stride == 0) {
    for (int row = threadIdx.x; row <= params.rows; row += blockDim.x) params.row_tiles[row] = first[row];
  }
  Rows rows{first, closed};
  if (threadIdx.x < 32 * kWarps) {
    score_units(params, rows, shared);
  } else {
    score_current_pages(params, rows);
  }
}

// Pointers are addresses; strides are in elements; see ScoreParams.
void score(int64_t queries, int64_t query_row_stride, int64_t query_head_stride, int64_t keys, int64_t page_stride,
           int64_t token_stride, int64_t head_stride, int64_t basis, int64_t coefficients, int64_t centroid,
           int64_t scales, int64_t scales_end, int64_t page_table, int64_t table_stride, int64_t lengths,
           bool wide_lengths, int64_t budgets, int64_t scores, int64_t score_row_stride, int64_t score_head_stride,
           int64_t row_tiles, int64_t rows, int64_t kv_heads, int64_t group, int64_t capacity, double sm_scale,
           int64_t stream) {
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
  params.page_table = address<const int>(page_table);
  params.table_stride = table_stride;
  params.lengths = Lengths{address<const void>(lengths), wide_lengths};
  params.budgets = address<const int>(budgets);
  params.scores = address<float>(scores);
  params.score_row_stride = score_row_stride;
  params.score_head_stride = score_head_stride;
  params.row_tiles = address<int>(row_tiles);
  params.rows = static_cast<int>(rows);
  params.kv_heads = static_cast<int>(kv_heads);
  params.group = static_cast<int>(group);
  params.capacity = static_cast<int>(capacity);
  params.sm_scale = static_cast<float>(sm_scale);

  const int device = current_device();
  constexpr int kRings = kWarps * kStages * kStageBytes;
  static bool prepared[kMaxDevices] = {};
  if (!prepared[device]) {
    check_cuda(cudaFuncSetAttribute(score_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    kRings + static_cast<int>(sizeof(int)) * (2 * kMaxRows + 1)),
               "shared memory of the score kernel");
    prepared[device] = true;
  }
  const size_t shared = kRings + sizeof(int) * (2 * rows + 1);
  launch(score_kernel, dim3(multiprocessors(device)), kThreads, shared, stream, 1, params);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(score, score);

}  // namespace locks
