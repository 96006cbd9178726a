// Rotated formats: Hadamard transforms and the least-squares refit of C to the quantised basis.
#pragma once

#include "summary_store.cuh"

namespace locks {

// Walsh-Hadamard transform over the dimension 64 c + 8 g + e, normalised: butterflies over the bits
// of e and c in registers, over those of g between lanes.
__device__ __forceinline__ void hadamard(float (&v)[kChunks][8]) {
  const float norm = kDim == 64 ? 0.125f : kDim == 256 ? 0.0625f : 0.08838834764831845f;
  int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int span = 1; span < 8; span *= 2) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (e & span) continue;
        float a = v[c][e], b = v[c][e + span];
        v[c][e] = a + b;
        v[c][e + span] = a - b;
      }
    }
  }
#pragma unroll
  for (int span = 1; span < kChunks; span *= 2) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c & span) continue;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float a = v[c][e], b = v[c + span][e];
        v[c][e] = a + b;
        v[c + span][e] = a - b;
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      float value = v[c][e] * norm;
#pragma unroll
      for (int span = 1; span < 8; span *= 2) {
        float other = __shfl_xor_sync(kFullWarp, value, 4 * span);
        value = g & span ? other - value : value + other;
      }
      v[c][e] = value;
    }
  }
}

__device__ __forceinline__ void hadamard(Basis& basis) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) hadamard(basis.v[n][j]);
  }
}

constexpr int kWordPitch = kDim / 2 + 4;  // words a column; 16 bytes of padding against bank conflicts
constexpr int kSystemPitch = kRank + kPage + 1;

// Shared memory of a refit.
struct Refit {
  alignas(16) uint32_t high[kColumns * kWordPitch];  // pairs of dimensions
  alignas(16) uint32_t low[kColumns * kWordPitch];
  float system[kRank * kSystemPitch];  // [V^T V | right-hand sides]
};

__device__ __forceinline__ float dot(const float (&a)[kChunks][8], const float (&b)[kChunks][8]) {
  float sum = 0.f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int e = 0; e < 8; ++e) sum = fmaf(a[c][e], b[c][e], sum);
  }
  return sum_over_groups(sum);
}

// Columns of `basis` to shared memory as packed pairs: high + low, or the high parts alone.
template <bool kLow>
__device__ __forceinline__ void stage_columns(const Basis& basis, Refit& refit) {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const float(&v)[8] = basis.v[n][j][c];
        uint32_t high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          high[i] = Key::pack(v[2 * i], v[2 * i + 1]);
          float2 kept = Key::pair(high[i]);
          low[i] = Key::pack(v[2 * i] - kept.x, v[2 * i + 1] - kept.y);
        }
        int at = (8 * n + 2 * t + j) * kWordPitch + 32 * c + 4 * g;
        *reinterpret_cast<uint4*>(&refit.high[at]) = make_uint4(high[0], high[1], high[2], high[3]);
        if constexpr (kLow) *reinterpret_cast<uint4*>(&refit.low[at]) = make_uint4(low[0], low[1], low[2], low[3]);
      }
    }
  }
  __syncwarp();
}

// B operand (and, the words being the same, half of an A operand): column `column`, dimensions
// 32 c + 8 t + {0..7}.
__device__ __forceinline__ uint4 column_words(const uint32_t* columns, int column, int c) {
  return *reinterpret_cast<const uint4*>(&columns[column * kWordPitch + 16 * c + 4 * (threadIdx.x % 4)]);
}

// Solves for C and stores it.  `codes` holds the quantised basis, `mean` the centroid and `offset`
// what the stored centroid is off, rotated.  With W = H codes, the right-hand side of token k is
// (k H - stored mu) codes = k W - mean W + offset codes: the keys enter unrotated and uncentred.
template <typename Rows>
__device__ __forceinline__ void refit_coefficients(Refit& refit, Basis& codes, const float (&mean)[kChunks][8],
                                                   const float (&offset)[kChunks][8], const Rows& load_rows,
                                                   unsigned char* plane, __nv_bfloat16* column_scales) {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float* system = refit.system;

  // V^T V, exact: the codes are small integers.
  stage_columns<false>(codes, refit);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      float d[4] = {};
#pragma unroll
      for (int c = 0; c < kDim / 32; ++c) {
        uint4 a = column_words(refit.high, 8 * m + g, c), b = column_words(refit.high, 8 * n + g, c);
        Key::mma(d, a.x, 0, a.y, 0, b.x, b.y);
        Key::mma(d, a.z, 0, a.w, 0, b.z, b.w);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        int row = 8 * m + g, column = 8 * n + 2 * t + j;
        if (row < kRank && column < kRank) system[row * kSystemPitch + column] = d[j];
      }
    }
  }
  float shift[kTiles][2];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      shift[n][j] = dot(offset, codes.v[n][j]);
      hadamard(codes.v[n][j]);
      shift[n][j] -= dot(mean, codes.v[n][j]);
    }
  }
  __syncwarp();
  stage_columns<true>(codes, refit);

#pragma unroll 1
  for (int tile = 0; tile < kPage / 16; ++tile) {
    uint32_t a[2][kDim / 32][4];
    load_rows(tile, a);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float d[4] = {};
#pragma unroll
      for (int c = 0; c < kDim / 32; ++c) {
        uint4 high = column_words(refit.high, 8 * n + g, c), low = column_words(refit.low, 8 * n + g, c);
        const uint32_t(&top)[4] = a[0][c];
        const uint32_t(&bottom)[4] = a[1][c];
        Key::mma(d, top[0], bottom[0], top[1], bottom[1], low.x, low.y);
        Key::mma(d, top[2], bottom[2], top[3], bottom[3], low.z, low.w);
        Key::mma(d, top[0], bottom[0], top[1], bottom[1], high.x, high.y);
        Key::mma(d, top[2], bottom[2], top[3], bottom[3], high.z, high.w);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        int column = 8 * n + 2 * t + j;
        if (column < kRank) {
          float* at = &system[column * kSystemPitch + kRank + 16 * tile + g];
          at[0] = d[j] + shift[n][j];
          at[8] = d[j + 2] + shift[n][j];
        }
      }
    }
  }
  __syncwarp();

  // A ridge keeps columns without energy solvable; their C is 0.
  float largest = 1.f;
#pragma unroll
  for (int j = 0; j < kRank; ++j) largest = fmaxf(largest, system[j * kSystemPitch + j]);
  __syncwarp();
  if (lane < kRank) system[lane * kSystemPitch + lane] += 1e-6f * largest;
  __syncwarp();
  // Gauss-Jordan; positive definite, so without pivoting.  A lane owns columns of the system.
#pragma unroll
  for (int k = 0; k < kRank; ++k) {
    float inverse = 1.f / system[k * kSystemPitch + k];
    for (int column = lane; column < kRank + kPage; column += 32) {
      if (column <= k) continue;  // these are unit vectors by now and no longer read
      float pivot = system[k * kSystemPitch + column] * inverse;
#pragma unroll
      for (int i = 0; i < kRank; ++i) {
        if (i != k) system[i * kSystemPitch + column] -= system[i * kSystemPitch + k] * pivot;
      }
      system[k * kSystemPitch + column] = pivot;
    }
    __syncwarp();
  }
  store_coefficients_by_column(system + kRank, kSystemPitch, plane, column_scales);
  __syncwarp();
}

}  // namespace locks
