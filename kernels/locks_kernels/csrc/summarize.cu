// summarize: complete pages of K -> records, all layers in one launch (paper section 4).
//
// A block looks at a chunk of slots of one layer, lists the pages that they complete and hands
// (page, KV head) tasks to its warps, up to 64 / PAGE at a time:
//   1. centred keys, as an exact sum of two fp16, to shared memory; their Gram matrix (tensor cores)
//   2. eigenvectors of all the warp's Gram matrices at once (jacobi.cuh)
//   3. basis, coefficients, quantisation, one task after the other
//
// variant: HEAD_DIM=128 PAGE=16 RANK=4 BASIS_BITS=4 ROTATED=0 KEY_TYPE=0
// variant: HEAD_DIM=128 PAGE=16 RANK=6 BASIS_BITS=4 ROTATED=1 KEY_TYPE=0
// variant: HEAD_DIM=64 PAGE=32 RANK=8 BASIS_BITS=8 ROTATED=0 KEY_TYPE=3
// variant: HEAD_DIM=256 PAGE=64 RANK=16 BASIS_BITS=16 ROTATED=0 KEY_TYPE=2
#include "jacobi.cuh"
#include "keys.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#define PAGE 16
#define RANK 4
#define BASIS_BITS 4
#define ROTATED 0
#define KEY_TYPE 0
#endif

namespace locks {

constexpr int kDim = HEAD_DIM;
constexpr int kPage = PAGE;
constexpr int kRank = RANK;
constexpr int kBasisBits = BASIS_BITS;
constexpr bool kRotated = ROTATED != 0;
static_assert(!kRotated || kBasisBits == 4, "rotated formats have an int4 basis");

constexpr float kRankTolerance = 1e-6f;  // RANK_TOLERANCE in reference.py
constexpr int kBasisMax = kBasisBits == 8 ? 127 : 7;
constexpr int kScaleCount = 1 + (kRotated ? 0 : kPage) + (kBasisBits == 16 ? 0 : kRank);
constexpr int kBasisBytes = kDim * kRank * kBasisBits / 8;
constexpr int kCoefficientBytes = kPage * kRank / (kRotated ? 2 : 1);

constexpr int kTasks = 64 / kPage;      // of a warp at a time
constexpr int kChunk = 4 * kPage;       // slots of a block
constexpr int kTiles = (kRank + 7) / 8;  // of 8 columns
constexpr int kColumns = 8 * kTiles;

// Shared memory of a warp.
constexpr int kKeyPitch = kDim + 8;  // halves; 16 bytes of padding against bank conflicts
constexpr int kGramPitch = kPage + 1;
constexpr int kGramStride = kPage * kGramPitch + 8;  // floats from one task's matrix to the next's
constexpr int kCodePitch = kDim + 4;                 // bytes
constexpr int kSystemPitch = kRank + kPage + 1;

struct WarpStorage {
  alignas(16) __half high[kPage * kKeyPitch];
  alignas(16) __half low[kPage * kKeyPitch];
  // Gram matrices, then what replaces them: the chosen eigenvectors [task][column][token].
  alignas(16) float gram[kTasks * kGramStride];
  float value[kTasks][kColumns];  // eigenvalues
  struct Refit {                   // rotated formats only
    __half high[kColumns * kKeyPitch];
    __half low[kColumns * kKeyPitch];
    float system[kRank * kSystemPitch];
  };
  alignas(16) unsigned char refit[kRotated ? sizeof(Refit) : 16];
  // Codes of the basis; where nothing reads the keys any more they lie over them.
  alignas(16) unsigned char own_codes[kRotated ? kColumns * kCodePitch : 16];
  __device__ __forceinline__ unsigned char* codes() {
    return kRotated ? own_codes : reinterpret_cast<unsigned char*>(high);
  }
  __device__ __forceinline__ Refit& refitting() { return *reinterpret_cast<Refit*>(refit); }
};
static_assert(kRotated || sizeof(__half) * 2 * kPage * kKeyPitch >=
                              kColumns * (kBasisBits == 16 ? 2 * kDim : kCodePitch) + kPage * kRank,
              "codes fit over the keys");
static_assert(kGramStride >= kColumns * kPage || kPage == 16, "eigenvectors fit over the Gram matrix");
static_assert(kGramStride >= kColumns * kPage, "eigenvectors fit over the Gram matrix");

constexpr int kWarpBytes = sizeof(WarpStorage);
constexpr int kWarps = kWarpBytes <= 40 * 1024 ? 4 : kWarpBytes <= 100 * 1024 ? 2 : 1;
constexpr int kThreads = 32 * kWarps;
constexpr int kSharedBytes = kWarps * kWarpBytes + (kChunk + 4) * sizeof(int);

struct Params {
  const int64_t* keys;  // address of every layer's page view
  const int64_t* slots;
  int64_t count;
  int64_t page_stride, slot_stride, head_stride;  // of the keys, in elements
  unsigned char *basis, *coefficients;
  signed char* centroid;
  __nv_bfloat16* scales;
  int64_t pages;  // of the record pool
  int kv_heads;
};

using Source = KeySource<KEY_TYPE, kDim, kPage>;

__device__ __forceinline__ float sum_warp(float v, int from) {
  for (int step = from; step < 32; step *= 2) v += __shfl_xor_sync(kFullWarp, v, step);
  return v;
}

__device__ __forceinline__ float max_warp(float v, int from, int to) {
  for (int step = from; step < to; step *= 2) v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, step));
  return v;
}

// Scale of symmetric quantisation, rounded to bf16 before the codes are computed from it.
__device__ __forceinline__ float quantisation_step(float largest, int top, __nv_bfloat16* target, bool write) {
  __nv_bfloat16 step = __float2bfloat16_rn(largest / static_cast<float>(top));
  if (write) *target = step;
  return __bfloat162float(step);
}

__device__ __forceinline__ int code_of(float value, float inverse_step, int top) {
  return max(-top, min(top, __float2int_rn(value * inverse_step)));
}

__device__ __forceinline__ float inverse_of(float step) { return step > 0.f ? 1.f / step : 0.f; }

__device__ __forceinline__ uint32_t pack_pair(__half a, __half b) {
  return static_cast<uint32_t>(__half_as_ushort(a)) | static_cast<uint32_t>(__half_as_ushort(b)) << 16;
}

// v = high + low to 22 bits, as packed halves of a pair.
__device__ __forceinline__ void split_pair(float a, float b, uint32_t& high, uint32_t& low) {
  __half ha = __float2half_rn(a), hb = __float2half_rn(b);
  high = pack_pair(ha, hb);
  low = pack_pair(__float2half_rn(a - __half2float(ha)), __float2half_rn(b - __half2float(hb)));
}

// ---- 1. keys and their Gram matrix --------------------------------------------------------------

// The centred page in units of its largest element, in shared memory; returns that unit.
// mean[i] is the centroid at dimension 8 * (lane % Source::kRowLanes) + i.
__device__ __forceinline__ float stage_keys(const Source& source, WarpStorage& shared, float (&mean)[8]) {
  int lane = threadIdx.x % 32;
  int column = lane % Source::kRowLanes * 8, row = lane / Source::kRowLanes;
  typename Source::Cache cache;
  source.fill(cache, row, column);
#pragma unroll
  for (int i = 0; i < 8; ++i) mean[i] = 0.f;
#pragma unroll(Source::kUnroll)
  for (int step = 0; step < Source::kSteps; ++step) {
    float v[8];
    source.get(cache, step, row, column, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) mean[i] += v[i];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) mean[i] = sum_warp(mean[i], Source::kRowLanes) * (1.f / kPage);

  float largest = 0.f;
#pragma unroll(Source::kUnroll)
  for (int step = 0; step < Source::kSteps; ++step) {
    float v[8];
    source.get(cache, step, row, column, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(v[i] - mean[i]));
  }
  largest = max_warp(largest, 1, 32);
  // A page of nearly equal keys has a unit too small to divide by: it is represented by its centroid.
  float inverse = largest > 1e-30f ? 1.f / largest : 0.f;

#pragma unroll(Source::kUnroll)
  for (int step = 0; step < Source::kSteps; ++step) {
    float v[8];
    source.get(cache, step, row, column, v);
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      split_pair((v[2 * i] - mean[2 * i]) * inverse, (v[2 * i + 1] - mean[2 * i + 1]) * inverse, high[i], low[i]);
    }
    int at = (row + step * Source::kRowsAStep) * kKeyPitch + column;
    *reinterpret_cast<uint4*>(&shared.high[at]) = make_uint4(high[0], high[1], high[2], high[3]);
    *reinterpret_cast<uint4*>(&shared.low[at]) = make_uint4(low[0], low[1], low[2], low[3]);
  }
  __syncwarp();
  return largest > 1e-30f ? largest : 0.f;
}

// 16 x 16 of the staged keys (rows from `row`, columns from `column`) as an A operand.
template <bool kTransposed>
__device__ __forceinline__ void load_matrix(uint32_t (&a)[4], const __half* keys, int row, int column) {
  int lane = threadIdx.x % 32;
  // Without transposition the four 8 x 8 blocks go down first; the transposed operand's rows are
  // the stored columns, so there they go right first.
  int r = kTransposed ? row + lane % 8 + lane / 16 * 8 : row + lane % 16;
  int c = kTransposed ? column + lane / 8 % 2 * 8 : column + lane / 16 * 8;
  uint32_t address = shared_address(&keys[r * kKeyPitch + c]);
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address));
  }
}

// d += (a + a_low) (b + b_low) without the product of the two low parts.
__device__ __forceinline__ void mma_split(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&a_low)[4],
                                          uint32_t b0, uint32_t b1, uint32_t b0_low, uint32_t b1_low) {
  mma_f16_k16(d, a_low[0], a_low[1], a_low[2], a_low[3], b0, b1, d);
  mma_f16_k16(d, a[0], a[1], a[2], a[3], b0_low, b1_low, d);
  mma_f16_k16(d, a[0], a[1], a[2], a[3], b0, b1, d);
}

__device__ __forceinline__ void gram_matrix(const WarpStorage& shared, float* gram) {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int row = 0; row < kPage; row += 16) {
#pragma unroll 1
    for (int other = 0; other < kPage; other += 16) {
      float d[2][4] = {};
#pragma unroll
      for (int k = 0; k < kDim; k += 16) {
        uint32_t a[4], a_low[4], b[4], b_low[4];
        load_matrix<false>(a, shared.high, row, k);
        load_matrix<false>(a_low, shared.low, row, k);
        load_matrix<false>(b, shared.high, other, k);
        load_matrix<false>(b_low, shared.low, other, k);
        mma_split(d[0], a, a_low, b[0], b[2], b_low[0], b_low[2]);
        mma_split(d[1], a, a_low, b[1], b[3], b_low[1], b_low[3]);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float* at = &gram[(row + g) * kGramPitch + other + 8 * n + 2 * t];
        at[0] = d[n][0];
        at[1] = d[n][1];
        at[8 * kGramPitch] = d[n][2];
        at[8 * kGramPitch + 1] = d[n][3];
      }
    }
  }
}

// ---- 2. eigenvectors ------------------------------------------------------------------------------

// Replaces the warp's Gram matrices by their leading eigenvectors [column][token] and values.
__device__ __forceinline__ void eigenvectors(WarpStorage& shared) {
  using Solver = Jacobi<kPage>;
  int lane = threadIdx.x % 32;
  int task = lane / Solver::kLanes;
  float* matrix = &shared.gram[task * kGramStride];
  Solver solver;
  solver.load(matrix, kGramPitch);
  __syncwarp();
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
  auto keep = [&](const float (&vector)[kPage], float norm, int rank) {
    if (rank >= kRank || !(norm > 0.f)) return;
    float scale = rsqrtf(norm);
    shared.value[task][rank] = norm * scale;
#pragma unroll
    for (int i = 0; i < kPage; ++i) matrix[rank * kPage + i] = vector[i] * scale;
  };
  keep(solver.x, x_norm, x_rank);
  keep(solver.y, y_norm, y_rank);
  __syncwarp();
}

// ---- 3. the record --------------------------------------------------------------------------------

// A matrix [kDim x kColumns] in the accumulators: lane holds dimensions g + 8 i, columns 8 n + 2 t + {0, 1}.
struct Basis {
  float v[kTiles][kDim / 8][2];
};

// Walsh-Hadamard transform of every column, normalised: butterflies over the dimension's bits,
// the low three of which are the lane's group number.
__device__ __forceinline__ void hadamard(Basis& basis) {
  const float norm = kDim == 64 ? 0.125f : kDim == 256 ? 0.0625f : 0.08838834764831845f;
  int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int span = 1; span < kDim / 8; span *= 2) {
#pragma unroll
        for (int i = 0; i < kDim / 8; ++i) {
          if (i & span) continue;
          float a = basis.v[n][i][j], b = basis.v[n][i + span][j];
          basis.v[n][i][j] = a + b;
          basis.v[n][i + span][j] = a - b;
        }
      }
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        float v = basis.v[n][i][j] * norm;
#pragma unroll
        for (int span = 1; span < 8; span *= 2) {
          float other = __shfl_xor_sync(kFullWarp, v, 4 * span);
          v = g & span ? other - v : v + other;
        }
        basis.v[n][i][j] = v;
      }
    }
  }
}

// The same for the centroid: lane holds 8 neighbouring dimensions.
__device__ __forceinline__ void hadamard(float (&mean)[8]) {
  const float norm = kDim == 64 ? 0.125f : kDim == 256 ? 0.0625f : 0.08838834764831845f;
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int span = 1; span < 8; span *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & span) continue;
      float a = mean[i], b = mean[i + span];
      mean[i] = a + b;
      mean[i + span] = a - b;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float v = mean[i] * norm;
#pragma unroll
    for (int span = 1; span < Source::kRowLanes; span *= 2) {
      float other = __shfl_xor_sync(kFullWarp, v, span);
      v = lane & span ? other - v : v + other;
    }
    mean[i] = v;
  }
}

// V = D^T U / |D^T U|, the page's right singular vectors; factor[j] = lambda_j / |D^T u_j| makes
// C = D V = U factor.  Columns without energy are zero.
__device__ __forceinline__ void singular_vectors(const WarpStorage& shared, int task, Basis& basis,
                                                 float (&factor)[kTiles][2]) {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float* vectors = &shared.gram[task * kGramStride];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float* vector = &vectors[(8 * n + g) * kPage + 2 * t];
    float d[kDim / 16][4] = {};
#pragma unroll
    for (int k = 0; k < kPage; k += 16) {
      uint32_t b[2], b_low[2];
      split_pair(vector[k], vector[k + 1], b[0], b_low[0]);
      split_pair(vector[k + 8], vector[k + 9], b[1], b_low[1]);
#pragma unroll
      for (int m = 0; m < kDim / 16; ++m) {
        uint32_t a[4], a_low[4];
        load_matrix<true>(a, shared.high, k, 16 * m);
        load_matrix<true>(a_low, shared.low, k, 16 * m);
        mma_split(d[m], a, a_low, b[0], b[1], b_low[0], b_low[1]);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float square = 0.f;
#pragma unroll
      for (int m = 0; m < kDim / 16; ++m) square += d[m][j] * d[m][j] + d[m][j + 2] * d[m][j + 2];
      square = sum_warp(square, 4);
      float value = shared.value[task][8 * n + 2 * t + j];
      bool present = value > kRankTolerance * shared.value[task][0] && square > 0.f;
      float inverse = present ? rsqrtf(square) : 0.f;
      factor[n][j] = value * inverse;
#pragma unroll
      for (int m = 0; m < kDim / 16; ++m) {
        basis.v[n][2 * m][j] = d[m][j] * inverse;
        basis.v[n][2 * m + 1][j] = d[m][j + 2] * inverse;
      }
    }
  }
}

// Codes (or bf16 bits) of the basis to shared memory [column][dimension], and its column scales.
__device__ __forceinline__ void quantise_basis(Basis& basis, unsigned char* codes, __nv_bfloat16* column_scales) {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int column = 8 * n + 2 * t + j;
      if constexpr (kBasisBits == 16) {
#pragma unroll
        for (int i = 0; i < kDim / 8; ++i) {
          reinterpret_cast<__nv_bfloat16*>(codes)[column * kDim + g + 8 * i] = __float2bfloat16_rn(basis.v[n][i][j]);
        }
      } else {
        float largest = 0.f;
#pragma unroll
        for (int i = 0; i < kDim / 8; ++i) largest = fmaxf(largest, fabsf(basis.v[n][i][j]));
        largest = max_warp(largest, 4, 32);
        // Rotated formats keep one scale a column, that of C: V's own is absorbed by the refit.
        float inverse = inverse_of(quantisation_step(largest, kBasisMax, column_scales + column,
                                                     !kRotated && g == 0 && column < kRank));
#pragma unroll
        for (int i = 0; i < kDim / 8; ++i) {
          int code = code_of(basis.v[n][i][j], inverse, kBasisMax);
          reinterpret_cast<signed char*>(codes)[column * kCodePitch + g + 8 * i] = static_cast<signed char>(code);
          basis.v[n][i][j] = static_cast<float>(code);
        }
      }
    }
  }
  __syncwarp();
}

// Element (column, dimension) that lies at a position of the basis plane (layout.pack_basis):
// nibbles, bytes or bf16, low nibble first.
__device__ __forceinline__ void basis_element(int position, int& column, int& dimension) {
  column = position / kDim;
  dimension = position % kDim;
}

// Element (column, row) at a position of the coefficient plane (layout.pack_coefficients).
__device__ __forceinline__ void coefficient_element(int position, int& column, int& row) {
  if constexpr (kRotated) {
    column = position / kPage;
    row = position % kPage;
  } else {
    row = position / kRank;
    column = position % kRank;
  }
}

__device__ __forceinline__ void store_basis(const unsigned char* codes, unsigned char* target) {
  constexpr int kAWord = 32 / kBasisBits;
  for (int word = threadIdx.x % 32; word < kBasisBytes / 4; word += 32) {
    uint32_t packed = 0;
#pragma unroll
    for (int i = 0; i < kAWord; ++i) {
      int column, dimension;
      basis_element(word * kAWord + i, column, dimension);
      uint32_t bits;
      if constexpr (kBasisBits == 16) {
        bits = reinterpret_cast<const uint16_t*>(codes)[column * kDim + dimension];
      } else {
        int code = reinterpret_cast<const signed char*>(codes)[column * kCodePitch + dimension];
        bits = kBasisBits == 4 ? static_cast<uint32_t>(code + 8) : static_cast<uint32_t>(code) & 0xff;
      }
      packed |= bits << (i * kBasisBits);
    }
    reinterpret_cast<uint32_t*>(target)[word] = packed;
  }
}

// `codes` is [column][token].
__device__ __forceinline__ void store_coefficients(const signed char* codes, unsigned char* target) {
  constexpr int kBits = kRotated ? 4 : 8;
  constexpr int kAWord = 32 / kBits;
  for (int word = threadIdx.x % 32; word < kCoefficientBytes / 4; word += 32) {
    uint32_t packed = 0;
#pragma unroll
    for (int i = 0; i < kAWord; ++i) {
      int column, row;
      coefficient_element(word * kAWord + i, column, row);
      int code = codes[column * kPage + row];
      packed |= (kRotated ? static_cast<uint32_t>(code + 8) : static_cast<uint32_t>(code) & 0xff) << (i * kBits);
    }
    reinterpret_cast<uint32_t*>(target)[word] = packed;
  }
}

// C = U factor in int8 with one scale a token.
__device__ __forceinline__ void coefficients_by_row(const WarpStorage& shared, int task, const float* factor,
                                                    signed char* codes, __nv_bfloat16* row_scales) {
  const float* vectors = &shared.gram[task * kGramStride];
  for (int token = threadIdx.x % 32; token < kPage; token += 32) {
    float c[kRank], largest = 0.f;
#pragma unroll
    for (int j = 0; j < kRank; ++j) {
      c[j] = vectors[j * kPage + token] * factor[j];
      largest = fmaxf(largest, fabsf(c[j]));
    }
    float inverse = inverse_of(quantisation_step(largest, 127, row_scales + token, true));
#pragma unroll
    for (int j = 0; j < kRank; ++j) codes[j * kPage + token] = static_cast<signed char>(code_of(c[j], inverse, 127));
  }
}

// Least-squares C of the keys (rotated, less the stored centroid) in the columns of the quantised
// basis, then int4 codes with one scale a column.  `offset` is mu - stored mu, rotated.
__device__ __forceinline__ void coefficients_by_refit(WarpStorage& shared, Basis& basis, float unit,
                                                      const float (&offset)[8], signed char* codes,
                                                      __nv_bfloat16* column_scales) {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto& refit = shared.refitting();
  const signed char* v = reinterpret_cast<const signed char*>(shared.codes());
  float* system = refit.system;

  // The codes turned back to the keys' own coordinates: D H V = D (H V), and D is staged unrotated.
  hadamard(basis);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        float w = basis.v[n][i][j];
        __half high = __float2half_rn(w);
        int at = (8 * n + 2 * t + j) * kKeyPitch + g + 8 * i;
        refit.high[at] = high;
        refit.low[at] = __float2half_rn(w - __half2float(high));
      }
    }
  }
  __syncwarp();

  // What the rounding of the centroid adds to every token's right-hand side.
  float shift[kRank];
#pragma unroll
  for (int j = 0; j < kRank; ++j) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += offset[i] * v[j * kCodePitch + lane % Source::kRowLanes * 8 + i];
    for (int step = 1; step < Source::kRowLanes; step *= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    shift[j] = sum;
  }

  // Right-hand sides [column][token] ...
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll 1
    for (int row = 0; row < kPage; row += 16) {
      float d[4] = {};
#pragma unroll
      for (int k = 0; k < kDim; k += 16) {
        uint32_t a[4], a_low[4];
        load_matrix<false>(a, shared.high, row, k);
        load_matrix<false>(a_low, shared.low, row, k);
        int at = (8 * n + g) * kKeyPitch + k + 2 * t;
        auto pair = [](const __half* w) { return *reinterpret_cast<const uint32_t*>(w); };
        mma_split(d, a, a_low, pair(&refit.high[at]), pair(&refit.high[at + 8]), pair(&refit.low[at]),
                  pair(&refit.low[at + 8]));
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        int column = 8 * n + 2 * t + j;
        if (column < kRank) {
          system[column * kSystemPitch + kRank + row + g] = d[j] * unit;
          system[column * kSystemPitch + kRank + row + g + 8] = d[j + 2] * unit;
        }
      }
    }
  }
  // ... and the matrix V^T V, exact in integers, with a ridge that keeps zero columns solvable.
  for (int entry = lane; entry < kRank * kRank; entry += 32) {
    int a = entry / kRank, b = entry % kRank, sum = 0;
    for (int k = 0; k < kDim; k += 4) {
      sum = __dp4a(*reinterpret_cast<const int*>(&v[a * kCodePitch + k]),
                   *reinterpret_cast<const int*>(&v[b * kCodePitch + k]), sum);
    }
    system[a * kSystemPitch + b] = static_cast<float>(sum);
  }
  __syncwarp();
  float largest = 1.f;
  for (int j = 0; j < kRank; ++j) largest = fmaxf(largest, system[j * kSystemPitch + j]);
  __syncwarp();
  if (lane < kRank) system[lane * kSystemPitch + lane] += 1e-6f * largest;
#pragma unroll
  for (int j = 0; j < kRank; ++j) {
    for (int token = lane; token < kPage; token += 32) system[j * kSystemPitch + kRank + token] += shift[j];
  }
  __syncwarp();

  // Gauss-Jordan; positive definite, so without pivoting.  A lane owns columns of the system.
  for (int k = 0; k < kRank; ++k) {
    float inverse = 1.f / system[k * kSystemPitch + k];
    for (int column = lane; column < kRank + kPage; column += 32) {
      if (column <= k) continue;  // these are unit vectors by now and no longer read
      float pivot = system[k * kSystemPitch + column] * inverse;
      for (int i = 0; i < kRank; ++i) {
        if (i != k) system[i * kSystemPitch + column] -= system[i * kSystemPitch + k] * pivot;
      }
      system[k * kSystemPitch + column] = pivot;
    }
    __syncwarp();
  }
  if (lane < kRank) {
    const float* c = &system[lane * kSystemPitch + kRank];
    float top = 0.f;
    for (int token = 0; token < kPage; ++token) top = fmaxf(top, fabsf(c[token]));
    float inverse = inverse_of(quantisation_step(top, 7, column_scales + lane, true));
    for (int token = 0; token < kPage; ++token) {
      codes[lane * kPage + token] = static_cast<signed char>(code_of(c[token], inverse, 7));
    }
  }
}

__device__ __forceinline__ void build_record(const Params& params, WarpStorage& shared, int task,
                                             const Source& source, int64_t record) {
  int lane = threadIdx.x % 32, t = lane % 4;
  __nv_bfloat16* scales = params.scales + record * kScaleCount;
  float mean[8];
  float unit = stage_keys(source, shared, mean);

  Basis basis;
  float factor[kTiles][2];
  singular_vectors(shared, task, basis, factor);
  if constexpr (kRotated) {
    hadamard(basis);
    hadamard(mean);
  }

  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(mean[i]));
  largest = max_warp(largest, 1, Source::kRowLanes);
  float step = quantisation_step(largest, 127, scales, lane == 0);
  float inverse = inverse_of(step);
  uint32_t packed[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    int code = code_of(mean[i], inverse, 127);
    packed[i / 4] |= (static_cast<uint32_t>(code) & 0xff) << (i % 4 * 8);
    mean[i] -= static_cast<float>(code) * step;  // what the stored centroid leaves
  }
  if (lane < Source::kRowLanes) {
    *reinterpret_cast<uint2*>(params.centroid + record * kDim + lane * 8) = make_uint2(packed[0], packed[1]);
  }

  unsigned char* codes = shared.codes();
  signed char* c_codes =
      reinterpret_cast<signed char*>(codes) + kColumns * (kBasisBits == 16 ? 2 * kDim : kCodePitch);
  if constexpr (kRotated) c_codes = reinterpret_cast<signed char*>(&shared.gram[task * kGramStride]);
  __syncwarp();  // the codes may lie over keys that other lanes were reading
  quantise_basis(basis, codes, scales + 1 + kPage);
  if constexpr (kRotated) {
    coefficients_by_refit(shared, basis, unit, mean, c_codes, scales + 1);
  } else {
    float* factors = shared.value[task];
    __syncwarp();
    if (lane < 4) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        factors[8 * n + 2 * t] = factor[n][0] * unit;
        factors[8 * n + 2 * t + 1] = factor[n][1] * unit;
      }
    }
    __syncwarp();
    coefficients_by_row(shared, task, factors, c_codes, scales + 1);
  }
  __syncwarp();
  store_basis(codes, params.basis + record * kBasisBytes);
  store_coefficients(c_codes, params.coefficients + record * kCoefficientBytes);
  __syncwarp();
}

// ---- the kernel -----------------------------------------------------------------------------------

// Pages that the block's slots complete, in the order of the slots; all threads get the count.
__device__ __forceinline__ int list_pages(const Params& params, int* list, int* count) {
  if (threadIdx.x < 32) {
    int lane = threadIdx.x, found = 0;
    int64_t first = static_cast<int64_t>(blockIdx.x) * kChunk;
#pragma unroll
    for (int i = 0; i < kChunk / 32; ++i) {
      int64_t at = first + 32 * i + lane;
      int64_t slot = at < params.count ? params.slots[at] : 0;
      bool complete = slot % kPage == kPage - 1 && slot >= 0;
      unsigned votes = __ballot_sync(kFullWarp, complete);
      if (complete) list[found + __popc(votes & ((1u << lane) - 1))] = static_cast<int>(slot / kPage);
      found += __popc(votes);
    }
    if (lane == 0) *count = found;
  }
  __syncthreads();
  return *count;
}

__global__ void __launch_bounds__(kThreads, kPage == 16 && kDim <= 128 ? 4 : 1) summarize_kernel(Params params) {
  extern __shared__ __align__(16) unsigned char storage[];
  wait_for_previous_kernel();
  WarpStorage& shared = reinterpret_cast<WarpStorage*>(storage)[threadIdx.x / 32];
  int* list = reinterpret_cast<int*>(storage + kWarps * kWarpBytes);
  int tasks = list_pages(params, list, list + kChunk) * params.kv_heads;
  if (tasks == 0) return;

  int64_t layer = blockIdx.y;
  // Few tasks (a decode step) are spread over the warps before any warp takes several.
  int a_warp = min(kTasks, (tasks + kWarps - 1) / kWarps);
  auto source_of = [&](int task) {
    int64_t offset = list[task / params.kv_heads] * params.page_stride + task % params.kv_heads * params.head_stride;
    return Source(params.keys[layer], offset, params.slot_stride);
  };
  for (int first = threadIdx.x / 32 * a_warp; first < tasks; first += kWarps * a_warp) {
    int own = min(a_warp, tasks - first);
    for (int i = 0; i < kTasks; ++i) {
      float* gram = &shared.gram[i * kGramStride];
      if (i < own) {
        float mean[8];
        stage_keys(source_of(first + i), shared, mean);
        gram_matrix(shared, gram);
      } else {
        for (int at = threadIdx.x % 32; at < kGramStride; at += 32) gram[at] = 0.f;
      }
      __syncwarp();
    }
    eigenvectors(shared);
    for (int i = 0; i < own; ++i) {
      int task = first + i;
      int64_t page = list[task / params.kv_heads];
      int64_t record = (layer * params.pages + page) * params.kv_heads + task % params.kv_heads;
      build_record(params, shared, i, source_of(task), record);
    }
  }
}

// Addresses and sizes as integers: the caller (cuda_summarize.py) has checked the tensors.
void summarize(int64_t keys, int64_t layers, int64_t slots, int64_t count, int64_t page_stride, int64_t slot_stride,
               int64_t head_stride, int64_t basis, int64_t coefficients, int64_t centroid, int64_t scales,
               int64_t pages, int64_t kv_heads, int64_t stream) {
  Params params{address<const int64_t>(keys),
                address<const int64_t>(slots),
                count,
                page_stride,
                slot_stride,
                head_stride,
                address<unsigned char>(basis),
                address<unsigned char>(coefficients),
                address<signed char>(centroid),
                address<__nv_bfloat16>(scales),
                pages,
                static_cast<int>(kv_heads)};
  static const cudaError_t raised =
      cudaFuncSetAttribute(summarize_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  check_cuda(raised, "shared memory of summarize");
  dim3 grid(static_cast<unsigned>((count + kChunk - 1) / kChunk), static_cast<unsigned>(layers));
  launch(summarize_kernel, grid, kThreads, kSharedBytes, stream, 1, params);
}

}  // namespace locks

TVM_FFI_DLL_EXPORT_TYPED_FUNC(summarize, locks::summarize);
