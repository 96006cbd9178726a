// Quantising a basis and coefficients and writing them in the byte order of layout.py.
//
// A lane's part of a [kDim x kColumns] matrix is what the products leave it with: dimensions
// 64 c + 8 g + {0..7} of columns 8 n + 2 t + {0, 1}.  Eight neighbouring dimensions of a column are
// one word of int4 codes, so nothing is exchanged before it is stored.
#pragma once

#include "summary_shape.cuh"

namespace locks {

struct Basis {
  float v[kTiles][2][kChunks][8];
};

// ---- the byte order of a record: the only place that knows it (layout.pack_*) -------------------

// Word offset (int4), or 8-byte offset (int8), or 16-byte offset (bf16) of dimensions
// 64 chunk + 8 g + {0..7} of a column in the basis plane.
__device__ __forceinline__ int basis_unit(int column, int chunk, int g) { return column * (kDim / 8) + 8 * chunk + g; }

// Byte (int8) or nibble (int4) offset of C[row][column] in the coefficient plane.
__device__ __forceinline__ int coefficient_at(int row, int column) {
  return kRotated ? column * kPage + row : row * kRank + column;
}

// ---- quantisation -------------------------------------------------------------------------------

// Scale of symmetric quantisation, rounded to bf16 before the codes are computed from it.
__device__ __forceinline__ float quantisation_step(float largest, int top, __nv_bfloat16* target, bool write) {
  __nv_bfloat16 step = __float2bfloat16_rn(largest / static_cast<float>(top));
  if (write) *target = step;
  return __bfloat162float(step);
}

__device__ __forceinline__ float inverse_of(float step) { return step > 0.f ? 1.f / step : 0.f; }

__device__ __forceinline__ int code_of(float value, float inverse_step, int top) {
  return max(-top, min(top, __float2int_rn(value * inverse_step)));
}

__device__ __forceinline__ float max_over_groups(float v) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, step));
  return v;
}

__device__ __forceinline__ float sum_over_groups(float v) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) v += __shfl_xor_sync(kFullWarp, v, step);
  return v;
}

// Writes the basis plane and its column scales.  With `keep`, the codes replace the values.
template <bool kKeep>
__device__ __forceinline__ void store_basis(Basis& basis, unsigned char* plane, __nv_bfloat16* column_scales) {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int column = 8 * n + 2 * t + j;
      bool present = column < kRank;
      float inverse = 0.f;
      if constexpr (kBasisBits != 16) {
        float largest = 0.f;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
#pragma unroll
          for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(basis.v[n][j][c][e]));
        }
        // Rotated formats keep one scale a column, that of C: V's own is absorbed by the refit.
        inverse = inverse_of(quantisation_step(max_over_groups(largest), kBasisMax, column_scales + column,
                                               !kRotated && present && g == 0));
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float(&v)[8] = basis.v[n][j][c];
        if constexpr (kBasisBits == 16) {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) words[i] = KeyType<kBf16>::pack(v[2 * i], v[2 * i + 1]);
          if (present) {
            reinterpret_cast<uint4*>(plane)[basis_unit(column, c, g)] =
                make_uint4(words[0], words[1], words[2], words[3]);
          }
        } else {
          int codes[8];
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            codes[e] = code_of(v[e], inverse, kBasisMax);
            if constexpr (kKeep) v[e] = static_cast<float>(codes[e]);
          }
          if constexpr (kBasisBits == 4) {
            uint32_t word = 0x88888888u;
#pragma unroll
            for (int e = 0; e < 8; ++e) word += static_cast<uint32_t>(codes[e]) << (4 * e);
            if (present) reinterpret_cast<uint32_t*>(plane)[basis_unit(column, c, g)] = word;
          } else {
            uint32_t words[2] = {};
#pragma unroll
            for (int e = 0; e < 8; ++e) words[e / 4] |= (static_cast<uint32_t>(codes[e]) & 0xff) << (e % 4 * 8);
            if (present) reinterpret_cast<uint2*>(plane)[basis_unit(column, c, g)] = make_uint2(words[0], words[1]);
          }
        }
      }
    }
  }
}

// Writes the centroid and its scale; leaves in `mean` what the stored one is off.
__device__ __forceinline__ void store_centroid(float (&mean)[kChunks][8], signed char* plane, __nv_bfloat16* scale) {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float largest = 0.f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(mean[c][e]));
  }
  largest = max_over_groups(largest);
  if (!(largest <= 1e38f)) largest = 0.f;  // a sum past fp32's range must not reach a reader
  float step = quantisation_step(largest, 127, scale, lane == 0);
  float inverse = inverse_of(step);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    uint32_t words[2] = {};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      int code = code_of(mean[c][e], inverse, 127);
      words[e / 4] |= (static_cast<uint32_t>(code) & 0xff) << (e % 4 * 8);
      mean[c][e] -= static_cast<float>(code) * step;
    }
    if (t == c % 4) reinterpret_cast<uint2*>(plane)[8 * c + g] = make_uint2(words[0], words[1]);
  }
}

// C = U factor in int8 with one scale a token; `vectors` is U [column][token].
__device__ __forceinline__ void store_coefficients_by_row(const float* vectors, const float* factor,
                                                          unsigned char* plane, __nv_bfloat16* row_scales) {
  for (int token = threadIdx.x % 32; token < kPage; token += 32) {
    float c[kRank], largest = 0.f;
#pragma unroll
    for (int j = 0; j < kRank; ++j) {
      c[j] = vectors[j * kPage + token] * factor[j];
      largest = fmaxf(largest, fabsf(c[j]));
    }
    float inverse = inverse_of(quantisation_step(largest, 127, row_scales + token, true));
#pragma unroll
    for (int j = 0; j < kRank; ++j) {
      plane[coefficient_at(token, j)] = static_cast<unsigned char>(code_of(c[j], inverse, 127));
    }
  }
}

// C [column][token] (`pitch` floats a column) in int4 with one scale a column.
__device__ __forceinline__ void store_coefficients_by_column(const float* c, int pitch, unsigned char* plane,
                                                             __nv_bfloat16* column_scales) {
  int lane = threadIdx.x % 32;
  // A lane takes eight tokens, a word of codes; kPage / 8 neighbouring lanes a column.
  constexpr int kLanes = kPage / 8;
  for (int base = 0; base < kRank; base += 32 / kLanes) {
    int column = base + lane / kLanes, part = lane % kLanes;
    const float* from = c + min(column, kRank - 1) * pitch + 8 * part;
    float largest = 0.f;
#pragma unroll
    for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(from[e]));
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, step));
    bool present = column < kRank;
    float inverse =
        inverse_of(quantisation_step(largest, 7, column_scales + column, present && part == 0));
    uint32_t word = 0x88888888u;
#pragma unroll
    for (int e = 0; e < 8; ++e) word += static_cast<uint32_t>(code_of(from[e], inverse, 7)) << (4 * e);
    if (present) reinterpret_cast<uint32_t*>(plane)[coefficient_at(8 * part, column) / 8] = word;
  }
}

}  // namespace locks
