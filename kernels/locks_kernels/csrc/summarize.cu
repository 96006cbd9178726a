// summarize: complete pages of K -> records, all layers in one launch (paper section 4).
//
// A block looks at a chunk of slots of one layer, lists the pages that they complete and hands
// (page, KV head) tasks to its warps, up to 64 / PAGE at a time:
//   1. the Gram matrix of the page's keys (tensor cores, straight from the pool's bytes), centred
//      afterwards: row means out, which is the same as centring the keys
//   2. its eigenvectors U, of all the warp's tasks at once (jacobi.cuh)
//   3. V = K^T U / sigma and C = U sigma; quantised and stored (summary_store.cuh, refit.cuh)
// The keys are read twice or three times, the first time from memory, then from L2, and never
// staged in shared memory.
//
// variant: HEAD_DIM=128 PAGE=16 RANK=4 BASIS_BITS=4 ROTATED=0 KEY_TYPE=0
// variant: HEAD_DIM=128 PAGE=16 RANK=6 BASIS_BITS=4 ROTATED=1 KEY_TYPE=0
// variant: HEAD_DIM=64 PAGE=32 RANK=8 BASIS_BITS=8 ROTATED=0 KEY_TYPE=3
// variant: HEAD_DIM=256 PAGE=64 RANK=16 BASIS_BITS=16 ROTATED=0 KEY_TYPE=1
#include "completed.cuh"
#include "jacobi.cuh"
#include "refit.cuh"

namespace locks {

constexpr float kRankTolerance = 1e-6f;  // RANK_TOLERANCE in reference.py
// Rounding errors of a Gram matrix of uncentred keys, as a share of the largest squared norm.
constexpr float kGramNoise = 5e-7f;
constexpr int kTasks = 64 / kPage;       // of a warp at a time
constexpr int kMostSlots = 4 * kPage;    // of a block
constexpr int kGramPitch = kPage + 1;
constexpr int kGramStride = kPage * kGramPitch + 8;  // floats from one task's matrix to the next's

struct WarpStorage {
  // Gram matrices, then what replaces them: the leading eigenvectors [task][column][token].
  alignas(16) float gram[kTasks * kGramStride];
  float mean[kTasks][kPage];      // of the rows of a Gram matrix
  float total[kTasks];            // mean of those
  float noise[kTasks];            // rounding errors of the matrix
  float value[kTasks][kColumns];  // eigenvalues, then the factors of C
  int broken[kTasks];             // the keys hold non-finite elements
  union {
    float factor[kTasks * kGramStride];  // step 2
    Refit refit;                         // step 3, rotated formats
  };
};
static_assert(kGramStride >= kColumns * kPage, "eigenvectors fit over the Gram matrix");

constexpr int kWarpBytes = (sizeof(WarpStorage) + 15) / 16 * 16;
constexpr int kWarps = kWarpBytes <= 50 * 1024 ? 4 : 2;
constexpr int kThreads = 32 * kWarps;
constexpr int kSharedBytes = kWarps * kWarpBytes + (kMostSlots + 4) * sizeof(int);

struct Params {
  const int64_t* keys;  // address of every layer's page view
  const int64_t* slots;
  int64_t count;
  int64_t page_stride, slot_stride, head_stride;  // of the keys, in bytes
  unsigned char *basis, *coefficients;
  signed char* centroid;
  __nv_bfloat16* scales;
  int64_t pages;  // of the record pool
  int kv_heads;
  int chunk;  // slots of a block
};

// The keys of one page and KV head.
struct Page {
  const unsigned char* base;
  int64_t slot_bytes;

  // Tokens 16 tile + g + {0, 8} as operands [half of the tile][32 dimensions][words].
  __device__ __forceinline__ void rows(int tile, bool broken, uint32_t (&w)[2][kDim / 32][4]) const {
    TokenRows<KEY_TYPE, kDim> keys;
    keys.load(base + 16 * tile * slot_bytes, slot_bytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int c = 0; c < kDim / 32; ++c) {
        Key::words(keys.v[i][c], w[i][c]);
        if (broken) clean(w[i][c]);
      }
    }
  }

  static __device__ __forceinline__ void clean(uint32_t (&w)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = Key::finite(w[i]);
  }
};

// ---- 1. Gram matrix -----------------------------------------------------------------------------

// K K^T to shared memory; false if an element is not finite.
__device__ __forceinline__ bool gram_matrix(const Page& page, bool broken, float* gram) {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float check = 0.f;
#pragma unroll 1
  for (int row = 0; row < kPage / 16; ++row) {
    uint32_t a[2][kDim / 32][4];
    page.rows(row, broken, a);
#pragma unroll 1
    for (int column = 0; column < kPage / 16; ++column) {
      float d[2][4] = {};
      auto multiply = [&](const uint32_t(&b)[2][kDim / 32][4]) {
#pragma unroll
        for (int c = 0; c < kDim / 32; ++c) {
#pragma unroll
          for (int h = 0; h < 4; h += 2) {
            Key::mma(d[0], a[0][c][h], a[1][c][h], a[0][c][h + 1], a[1][c][h + 1], b[0][c][h], b[0][c][h + 1]);
            Key::mma(d[1], a[0][c][h], a[1][c][h], a[0][c][h + 1], a[1][c][h + 1], b[1][c][h], b[1][c][h + 1]);
          }
        }
      };
      if constexpr (kPage == 16) {
        multiply(a);
      } else {
        uint32_t b[2][kDim / 32][4];
        page.rows(column, broken, b);
        multiply(b);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float* at = &gram[(16 * row + g) * kGramPitch + 16 * column + 8 * n + 2 * t];
        at[0] = d[n][0];
        at[1] = d[n][1];
        at[8 * kGramPitch] = d[n][2];
        at[8 * kGramPitch + 1] = d[n][3];
        check += fabsf(d[n][0]) + fabsf(d[n][1]) + fabsf(d[n][2]) + fabsf(d[n][3]);
      }
    }
  }
  return !__any_sync(kFullWarp, !(check <= 1e38f));
}

__device__ __forceinline__ void prepare_task(const Page& page, WarpStorage& shared, int task) {
  int lane = threadIdx.x % 32;
  float* gram = &shared.gram[task * kGramStride];
  bool broken = !gram_matrix(page, false, gram);
  if (broken) {
    __syncwarp();
    bool finite = gram_matrix(page, true, gram);
    __syncwarp();
    // Squares past fp32's range: the page is represented by its centroid.
    if (!finite) {
      for (int i = lane; i < kGramStride; i += 32) gram[i] = 0.f;
    }
  }
  __syncwarp();
  float total = 0.f, largest = 0.f;
  for (int row = lane; row < kPage; row += 32) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPage; ++i) sum += gram[row * kGramPitch + i];
    sum *= 1.f / kPage;
    shared.mean[task][row] = sum;
    total += sum;
    largest = fmaxf(largest, gram[row * kGramPitch + row]);
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    total += __shfl_xor_sync(kFullWarp, total, step);
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, step));
  }
  if (lane == 0) {
    shared.noise[task] = kGramNoise * largest;
    shared.total[task] = total * (1.f / kPage);
    shared.broken[task] = broken;
  }
}

__device__ __forceinline__ void clear_task(WarpStorage& shared, int task) {
  int lane = threadIdx.x % 32;
  for (int i = lane; i < kGramStride; i += 32) shared.gram[task * kGramStride + i] = 0.f;
  for (int i = lane; i < kPage; i += 32) shared.mean[task][i] = 0.f;
  if (lane == 0) shared.total[task] = shared.noise[task] = 0.f;
}

// ---- 2. eigenvectors ------------------------------------------------------------------------------

// Replaces the warp's Gram matrices by their leading eigenvectors [column][token] and values.
__device__ __forceinline__ void eigenvectors(WarpStorage& shared) {
  using Solver = Jacobi<kPage>;
  int lane = threadIdx.x % 32, task = lane / Solver::kLanes;
  float* matrix = &shared.gram[task * kGramStride];
  float* factor = &shared.factor[task * kGramStride];
  const float* mean = shared.mean[task];
  float total = shared.total[task];
  auto centred = [&](int row, int column) {
    return (matrix[row * kGramPitch + column] - mean[row]) - (mean[column] - total);
  };
  Solver::factorise(centred, shared.noise[task], factor, kGramPitch);
  Solver solver;
  solver.load(factor, kGramPitch);
  for (int i = lane; i < kTasks * kGramStride; i += 32) shared.gram[i] = 0.f;
  for (int i = lane; i < kTasks * kColumns; i += 32) (&shared.value[0][0])[i] = 0.f;
  solver.solve();
  float x_norm = 0.f, y_norm = 0.f;
#pragma unroll
  for (int i = 0; i < kPage; ++i) {
    x_norm = fmaf(solver.x[i], solver.x[i], x_norm);
    y_norm = fmaf(solver.y[i], solver.y[i], y_norm);
  }
  int x_rank, y_rank;
  solver.rank(x_norm, y_norm, x_rank, y_rank);
  __syncwarp();
  auto keep = [&](const float(&vector)[kPage], float norm, int rank) {
    if (rank >= kRank || !(norm > 0.f)) return;
    float scale = rsqrtf(norm);
    shared.value[task][rank] = norm;
#pragma unroll
    for (int i = 0; i < kPage; ++i) matrix[rank * kPage + i] = vector[i] * scale;
  };
  keep(solver.x, x_norm, x_rank);
  keep(solver.y, y_norm, y_rank);
  __syncwarp();
}

// ---- 3. the record --------------------------------------------------------------------------------

// K^T U, the same as (K - mean)^T U for eigenvectors of the centred Gram matrix but for rounding,
// which the last step takes out; and the mean.
__device__ __forceinline__ void project(const Page& page, bool broken, const float* vectors, Basis& basis,
                                        float (&mean)[kChunks][8]) {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t average = Key::pack(1.f / kPage, 1.f / kPage);  // exact
  float sums[kTiles] = {};  // of the rounded eigenvector g, this lane's tokens
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int e = 0; e < 8; ++e) basis.v[n][j][c][e] = mean[c][e] = 0.f;
      }
    }
  }
#pragma unroll 1
  for (int tile = 0; tile < kPage / 16; ++tile) {
    TokenColumns<KEY_TYPE, kDim> keys;
    keys.load(page.base + 16 * tile * page.slot_bytes, page.slot_bytes);
    uint32_t high[kTiles][2], low[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float* u = &vectors[(8 * n + g) * kPage + 16 * tile + 2 * t];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float a = u[8 * i], b = u[8 * i + 1];
        high[n][i] = Key::pack(a, b);
        float2 kept = Key::pair(high[n][i]);
        low[n][i] = Key::pack(a - kept.x, b - kept.y);
        float2 rest = Key::pair(low[n][i]);
        sums[n] += (kept.x + rest.x) + (kept.y + rest.y);
      }
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      uint32_t w[4][4];
      keys.words(c, w);
      if (broken) {
#pragma unroll
        for (int i = 0; i < 4; ++i) Page::clean(w[i]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t a[4];
        keys.operand(w, j, a);
        // Accumulators: (dimension 2 j, columns 2 t + {0, 1}), (dimension 2 j + 1, the same).
        float d[4] = {mean[c][2 * j], mean[c][2 * j], mean[c][2 * j + 1], mean[c][2 * j + 1]};
        Key::mma(d, a[0], a[1], a[2], a[3], average, average);
        mean[c][2 * j] = d[0];
        mean[c][2 * j + 1] = d[2];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          float(&left)[8] = basis.v[n][0][c];
          float(&right)[8] = basis.v[n][1][c];
          float v[4] = {left[2 * j], right[2 * j], left[2 * j + 1], right[2 * j + 1]};
          Key::mma(v, a[0], a[1], a[2], a[3], low[n][0], low[n][1]);
          Key::mma(v, a[0], a[1], a[2], a[3], high[n][0], high[n][1]);
          left[2 * j] = v[0], right[2 * j] = v[1], left[2 * j + 1] = v[2], right[2 * j + 1] = v[3];
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float sum = sums[n];
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float own = __shfl_sync(kFullWarp, sum, 4 * (2 * t + j));
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int e = 0; e < 8; ++e) basis.v[n][j][c][e] = fmaf(-own, mean[c][e], basis.v[n][j][c][e]);
      }
    }
  }
}

// Makes the columns unit vectors, or zero where the page has no such direction.  Leaves in
// `value` the factors that turn U into C = D V: lambda / |D^T u|.
__device__ __forceinline__ void normalise(Basis& basis, float* value) {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float largest = value[0], lambda[kTiles][2];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) lambda[n][j] = value[8 * n + 2 * t + j];
  }
  __syncwarp();
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float square = dot(basis.v[n][j], basis.v[n][j]);
      bool present = lambda[n][j] > kRankTolerance * largest && square > 0.f && square <= 1e38f;
      float inverse = present ? rsqrtf(square) : 0.f;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int e = 0; e < 8; ++e) basis.v[n][j][c][e] = present ? basis.v[n][j][c][e] * inverse : 0.f;
      }
      if (g == 0) value[8 * n + 2 * t + j] = lambda[n][j] * inverse;
    }
  }
  __syncwarp();
}

__device__ __forceinline__ void build_record(const Params& params, WarpStorage& shared, int task, const Page& page,
                                             int64_t record) {
  __nv_bfloat16* scales = params.scales + record * kScaleCount;
  unsigned char* basis_plane = params.basis + record * kBasisBytes;
  unsigned char* coefficient_plane = params.coefficients + record * kCoefficientBytes;
  signed char* centroid_plane = params.centroid + record * kDim;
  bool broken = shared.broken[task];
  const float* vectors = &shared.gram[task * kGramStride];
  float* value = shared.value[task];

  Basis basis;
  float mean[kChunks][8];
  project(page, broken, vectors, basis, mean);
  normalise(basis, value);
  if constexpr (kRotated) {
    hadamard(basis);
    store_basis<true>(basis, basis_plane, scales);
    float offset[kChunks][8];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int e = 0; e < 8; ++e) offset[c][e] = mean[c][e];
    }
    hadamard(offset);
    store_centroid(offset, centroid_plane, scales);
    auto rows = [&](int tile, uint32_t(&w)[2][kDim / 32][4]) { page.rows(tile, broken, w); };
    refit_coefficients(shared.refit, basis, mean, offset, rows, coefficient_plane, scales + 1);
  } else {
    store_basis<false>(basis, basis_plane, scales + 1 + kPage);
    store_centroid(mean, centroid_plane, scales);
    store_coefficients_by_row(vectors, value, coefficient_plane, scales + 1);
  }
}

// ---- the kernel -----------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, kPage == 16 && kDim <= 128 && kRank <= 8 ? 4 : 1)
    summarize_kernel(Params params) {
  extern __shared__ __align__(16) unsigned char storage[];
  wait_for_previous_kernel();
  WarpStorage& shared = *reinterpret_cast<WarpStorage*>(storage + threadIdx.x / 32 * kWarpBytes);
  int* list = reinterpret_cast<int*>(storage + kWarps * kWarpBytes);
  int64_t first_slot = static_cast<int64_t>(blockIdx.x) * params.chunk;
  int found = list_completed<kPage>(params.slots, params.count, first_slot, params.chunk, list, list + kMostSlots);
  int tasks = found * params.kv_heads;
  if (tasks == 0) return;

  int64_t layer = blockIdx.y;
  const unsigned char* keys = reinterpret_cast<const unsigned char*>(params.keys[layer]);
  auto page_of = [&](int task) {
    int64_t page = list[task / params.kv_heads];
    return Page{keys + page * params.page_stride + task % params.kv_heads * params.head_stride, params.slot_stride};
  };
  // Few tasks (a decode step) are spread over the warps before any warp takes several.
  int a_warp = min(kTasks, (tasks + kWarps - 1) / kWarps);
  for (int first = threadIdx.x / 32 * a_warp; first < tasks; first += kWarps * a_warp) {
    int own = min(a_warp, tasks - first);
#pragma unroll 1
    for (int i = 0; i < kTasks; ++i) {
      if (i < own) prepare_task(page_of(first + i), shared, i);
      else clear_task(shared, i);
    }
    __syncwarp();
    eigenvectors(shared);
#pragma unroll 1
    for (int i = 0; i < own; ++i) {
      int task = first + i;
      int64_t page = list[task / params.kv_heads];
      int64_t record = (layer * params.pages + page) * params.kv_heads + task % params.kv_heads;
      build_record(params, shared, i, page_of(task), record);
    }
    __syncwarp();
  }
}

// Addresses and sizes as integers, strides in elements: the caller (cuda_summarize.py) has checked them.
void summarize(int64_t keys, int64_t layers, int64_t slots, int64_t count, int64_t page_stride, int64_t slot_stride,
               int64_t head_stride, int64_t basis, int64_t coefficients, int64_t centroid, int64_t scales,
               int64_t pages, int64_t kv_heads, int64_t stream) {
  // A decode step's few slots are spread over more blocks.
  int chunk = count <= 1024 ? kPage : kMostSlots;
  Params params{address<const int64_t>(keys),
                address<const int64_t>(slots),
                count,
                page_stride * Key::kBytes,
                slot_stride * Key::kBytes,
                head_stride * Key::kBytes,
                address<unsigned char>(basis),
                address<unsigned char>(coefficients),
                address<signed char>(centroid),
                address<__nv_bfloat16>(scales),
                pages,
                static_cast<int>(kv_heads),
                chunk};
  static const cudaError_t raised =
      cudaFuncSetAttribute(summarize_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  check_cuda(raised, "shared memory of summarize");
  dim3 grid(static_cast<unsigned>((count + chunk - 1) / chunk), static_cast<unsigned>(layers));
  launch(summarize_kernel, grid, kThreads, kSharedBytes, stream, 1, params);
}

}  // namespace locks

TVM_FFI_DLL_EXPORT_TYPED_FUNC(summarize, locks::summarize);
