// page_scores: page scores of the selectors that the paper compares with, for the same `select`:
// `oracle` (exact, from every key) and `quest` (a bound from per-dimension minima and maxima),
// and the log-sum-exp over dense scores.  Clear rather than fast.
//
// variant: HEAD_DIM=128 PAGE=16
// variant: HEAD_DIM=64 PAGE=32 QUEST=1 QUERY_HALF=1 KEY_FP8=1

#include "exact_page.cuh"
#include "schedule.cuh"

#ifndef QUEST
#define QUEST 0
#endif
#ifndef QUERY_HALF
#define QUERY_HALF 0
#endif
#ifndef KEY_FP8
#define KEY_FP8 0
#endif

namespace locks {

constexpr int kDim = HEAD_DIM;
constexpr int kPage = PAGE;
constexpr bool kHalf = QUERY_HALF != 0;
constexpr int kThreads = 256;
constexpr int kValues = kDim / 32;  // dimensions a lane of the quest scorer has

struct PageScoreParams {
  const uint16_t* queries;
  int64_t query_row_stride, query_head_stride;
  KeyPool keys;
  const __nv_bfloat16 *low, *high;  // [pages, kv_heads, d]
  const int* page_table;
  int64_t table_stride;
  Lengths lengths;
  const int* budgets;
  float* scores;
  int64_t score_row_stride, score_head_stride;
  int rows, kv_heads, group, capacity;
  float sm_scale;
};

__device__ __forceinline__ float* score_address(const PageScoreParams& params, const int* first, int row, int q_head) {
  if (params.score_row_stride) {
    return params.scores + row * params.score_row_stride + q_head * params.score_head_stride;
  }
  int64_t q_heads = params.kv_heads * params.group;
  return params.scores + kTile * (first[row] * q_heads + static_cast<int64_t>(first[row + 1] - first[row]) * q_head);
}

__device__ __forceinline__ float load_query_value(const uint16_t* source) {
  if constexpr (kHalf) return __half2float(*reinterpret_cast<const __half*>(source));
  return __uint_as_float(static_cast<uint32_t>(*source) << 16);
}

__device__ __forceinline__ float load_key(const PageScoreParams& params, int64_t index) {
  if constexpr (KEY_FP8) {
    return __half2float(__nv_cvt_fp8_to_halfraw(static_cast<uint8_t>(params.keys.data[index]), __NV_E4M3));
  } else {
    return load_query_value(reinterpret_cast<const uint16_t*>(params.keys.data) + index);
  }
}

// Bound of a page for every query head of the group: sum over dimensions of max(q low, q high).
__device__ void quest_page(const PageScoreParams& params, const int* first, int row, int head, int page, int tokens) {
  const int lane = threadIdx.x % 32, at = lane * kValues;
  const int64_t physical = params.page_table[row * params.table_stride + page];
  float low[kValues], high[kValues];
  if (tokens == kPage && page < (params.lengths[row] - 1) / kPage) {
    const int64_t record = (physical * params.kv_heads + head) * kDim + at;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      low[i] = __bfloat162float(params.low[record + i]);
      high[i] = __bfloat162float(params.high[record + i]);
    }
  } else {
    const int64_t base = physical * params.keys.page_stride + head * params.keys.head_stride + at;
#pragma unroll
    for (int i = 0; i < kValues; ++i) low[i] = INFINITY, high[i] = -INFINITY;
    for (int token = 0; token < tokens; ++token) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        float value = load_key(params, base + token * params.keys.token_stride + i);
        value = fabsf(value) < INFINITY ? value : 0.0f;
        low[i] = fminf(low[i], value);
        high[i] = fmaxf(high[i], value);
      }
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      low[i] = __bfloat162float(__float2bfloat16_rn(low[i]));
      high[i] = __bfloat162float(__float2bfloat16_rn(high[i]));
    }
  }
  for (int g = 0; g < params.group; ++g) {
    const uint16_t* query =
        params.queries + row * params.query_row_stride + (head * params.group + g) * params.query_head_stride + at;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      float q = load_query_value(query + i);
      sum += fmaxf(q * low[i], q * high[i]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    if (lane == 0) score_address(params, first, row, head * params.group + g)[page] = sum * params.sm_scale;
  }
}

__device__ void exact_page(const PageScoreParams& params, const int* first, int row, int head, int page, int tokens) {
  const int lane = threadIdx.x % 32, n = lane / 4, c = lane % 4;
  float scores[2];
  exact_page_scores<kDim, kPage, kHalf, KEY_FP8 != 0>(
      scores, params.queries + row * params.query_row_stride + head * params.group * params.query_head_stride,
      params.query_head_stride, params.group, params.keys, params.page_table[row * params.table_stride + page], head,
      tokens, params.sm_scale);
  for (int half = 0; half < 2; ++half) {
    int query = 8 * half + n;
    if (c == 0 && query < params.group) {
      score_address(params, first, row, head * params.group + query)[page] = scores[half];
    }
  }
}

__global__ void __launch_bounds__(kThreads) page_scores_kernel(const __grid_constant__ PageScoreParams params) {
  extern __shared__ int first[];
  wait_for_previous_kernel();
  let_next_kernel_start();
  schedule_rows(first, params.rows, params.lengths, params.budgets, kPage, params.capacity);
  const int warps = gridDim.x * (kThreads / 32);
  const int64_t units = static_cast<int64_t>(first[params.rows]) * params.kv_heads;
  int row = 0;
  for (int64_t unit = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; unit < units; unit += warps) {
    const int tile = static_cast<int>(unit / params.kv_heads), head = static_cast<int>(unit % params.kv_heads);
    while (tile >= first[row + 1]) ++row;
    const int length = params.lengths[row], present = pages_of(length, kPage);
    const int begin = (tile - first[row]) * kTile;
    for (int page = begin; page < min(begin + kTile, present); ++page) {
      const int tokens = min(kPage, length - page * kPage);
      if constexpr (QUEST) {
        quest_page(params, first, row, head, page, tokens);
      } else {
        exact_page(params, first, row, head, page, tokens);
      }
    }
  }
}

struct LseParams {
  const float* scores;
  int64_t score_row_stride, score_head_stride;
  float* lse;
  Lengths lengths;
  int q_heads, page_size;
};

// One block a (row, query head), fixed order: the same result whatever else runs.
__global__ void __launch_bounds__(1024) lse_kernel(const __grid_constant__ LseParams params) {
  __shared__ float part[32];
  const int row = blockIdx.x / params.q_heads, head = blockIdx.x % params.q_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_previous_kernel();
  const float* scores = params.scores + row * params.score_row_stride + head * params.score_head_stride;
  const int pages = pages_of(params.lengths[row], params.page_size);
  float largest = -INFINITY;
  for (int page = threadIdx.x; page < pages; page += 1024) largest = fmaxf(largest, scores[page]);
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, step));
  if (lane == 0) part[warp] = largest;
  __syncthreads();
  largest = part[lane];
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, step));
  __syncthreads();
  float sum = 0.0f;
  if (largest > -INFINITY) {
    for (int page = threadIdx.x; page < pages; page += 1024) sum += exp2_approx((scores[page] - largest) * kLog2e);
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
  if (lane == 0) part[warp] = sum;
  __syncthreads();
  sum = part[lane];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
  if (threadIdx.x == 0) params.lse[blockIdx.x] = largest + log2_approx(sum) * kLn2;
}

// Pointers are addresses; `low` and `high` are read by the quest scorer only.
void page_scores(int64_t queries, int64_t query_row_stride, int64_t query_head_stride, int64_t keys,
                 int64_t page_stride, int64_t token_stride, int64_t head_stride, int64_t low, int64_t high,
                 int64_t page_table, int64_t table_stride, int64_t lengths, bool wide_lengths, int64_t budgets,
                 int64_t scores, int64_t score_row_stride, int64_t score_head_stride, int64_t rows,
                 int64_t kv_heads, int64_t group, int64_t capacity, double sm_scale, int64_t stream) {
  PageScoreParams params;
  params.queries = address<const uint16_t>(queries);
  params.query_row_stride = query_row_stride;
  params.query_head_stride = query_head_stride;
  params.keys = KeyPool{address<const char>(keys), page_stride, token_stride, head_stride};
  params.low = address<const __nv_bfloat16>(low);
  params.high = address<const __nv_bfloat16>(high);
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
  launch(page_scores_kernel, dim3(4 * multiprocessors(current_device())), kThreads, sizeof(int) * (rows + 1), stream,
         1, params);
}

void lse(int64_t scores, int64_t score_row_stride, int64_t score_head_stride, int64_t result, int64_t lengths,
         bool wide_lengths, int64_t rows, int64_t q_heads, int64_t page_size, int64_t stream) {
  LseParams params;
  params.scores = address<const float>(scores);
  params.score_row_stride = score_row_stride;
  params.score_head_stride = score_head_stride;
  params.lse = address<float>(result);
  params.lengths = Lengths{address<const void>(lengths), wide_lengths};
  params.q_heads = static_cast<int>(q_heads);
  params.page_size = static_cast<int>(page_size);
  launch(lse_kernel, dim3(static_cast<unsigned>(rows * q_heads)), 1024, 0, stream, 1, params);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(page_scores, page_scores);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lse, lse);

}  // namespace locks
