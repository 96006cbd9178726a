// Scores of the 8 pages of a tile for up to 8 query heads of one KV head, by one warp.
//
// A lane is (n, c) = (lane / 4, lane % 4).  Every product below is a tensor-core product whose
// 16 rows are 8 query heads: their high parts and, below them, their low parts (projections),
// or the 8 heads for two pages (logits).  Results of a product land where the next one
// wants its operand, so that nothing moves between lanes until the sums over tokens:
//   projections  z = V^T q, o = mu . q   int8 x int4/int8, exact
//   logits       z C^T                    fp16, fp32 accumulators
//   score        o + log sum_tokens exp(logits)
#pragma once

#include "record.cuh"

namespace locks {

// The queries of 8 heads as two int8 terms, q = step * (high + low / 254).
struct Query {
  uint32_t a[kSteps][4];  // operand A: rows n are high parts, rows 8 + n low parts
  float step;             // includes the softmax scale and log2(e)
  float basis_zero;       // minus what the products of a zero vector give, as nibbles
  float centroid_zero;    // and as int8
};

// Accumulators start at the bits of this float, so that an integer sum below 2^22 reads as a
// float without a conversion: as_float(bits(kMagic) + x) = kMagic + x.
constexpr float kMagic = 12582912.0f;
constexpr int kMagicBits = 0x4B400000;
constexpr float kLowStep = 1.0f / 254.0f;

// Sylvester-ordered Hadamard transform of a vector that a quad holds, kDim / 4 values a lane.
__device__ __forceinline__ void rotate_quad(float (&x)[kDim / 4], int c) {
#pragma unroll
  for (int step = 1; step < kDim / 4; step *= 2) {
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) {
      if ((i & step) == 0) {
        float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
    }
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    float sign = c & step ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) {
      float other = __shfl_xor_sync(kFullWarp, x[i], step);
      x[i] = fmaf(sign, x[i], other);
    }
  }
  const float norm = rsqrtf(static_cast<float>(kDim));
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) x[i] *= norm;
}

// Reads up to 8 query heads at `queries` (16-bit floats, heads `head_stride` apart); the others are zero.
template <bool kHalf>
__device__ __forceinline__ void load_query(Query& query, const uint16_t* queries, int64_t head_stride, int heads,
                                           float scale) {
  const int lane = threadIdx.x & 31, n = lane >> 2, c = lane & 3;
  float x[kDim / 4];
  if (n < heads) {
    const uint4* source = reinterpret_cast<const uint4*>(queries + n * head_stride + c * (kDim / 4));
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      uint4 word = __ldg(source + i);
      uint32_t words[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kHalf) {
          float2 pair = __half22float2(*reinterpret_cast<__half2*>(&words[j]));
          x[8 * i + 2 * j] = pair.x;
          x[8 * i + 2 * j + 1] = pair.y;
        } else {
          x[8 * i + 2 * j] = __uint_as_float(words[j] << 16);
          x[8 * i + 2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
        }
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) x[i] = 0.0f;
  }
  if constexpr (kRotated) rotate_quad(x, c);

  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) largest = fmaxf(largest, fabsf(x[i]));
  largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
  const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;

  int high_sum = 0, low_sum = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t high[8], low[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float value = x[8 * step + i] * inverse;
      float rounded = value + kMagic;
      high[i] = __float_as_uint(rounded);
      low[i] = __float_as_uint(fmaf(value - (rounded - kMagic), 254.0f, kMagic));
    }
    // Even dimensions, then odd ones: as the nibbles of the basis come out.
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      uint32_t top = __byte_perm(__byte_perm(high[odd], high[2 + odd], 0x0040),
                                 __byte_perm(high[4 + odd], high[6 + odd], 0x0040), 0x5410);
      uint32_t bottom = __byte_perm(__byte_perm(low[odd], low[2 + odd], 0x0040),
                                    __byte_perm(low[4 + odd], low[6 + odd], 0x0040), 0x5410);
      query.a[step][2 * odd] = top;
      query.a[step][2 * odd + 1] = bottom;
      high_sum = __dp4a(static_cast<int>(top), 0x01010101, high_sum);
      low_sum = __dp4a(static_cast<int>(bottom), 0x01010101, low_sum);
    }
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    high_sum += __shfl_xor_sync(kFullWarp, high_sum, step);
    low_sum += __shfl_xor_sync(kFullWarp, low_sum, step);
  }
  // Nibbles are stored with an offset of 8.
  constexpr int kOffset = kBasisBits == 4 ? 8 : 0;
  const float unit = largest * (1.0f / 127.0f) * scale;
  query.step = unit;
  query.centroid_zero = -fmaf(kMagic, unit * kLowStep, kMagic * unit);
  query.basis_zero = -fmaf(kMagic + static_cast<float>(kOffset * low_sum), unit * kLowStep,
                                  (kMagic + static_cast<float>(kOffset * high_sum)) * unit);
}

template <int kBytes>
__device__ __forceinline__ void load_words(uint32_t (&words)[kBytes / 4], const char* source) {
  if constexpr (kBytes == 8) {
    uint2 v = *reinterpret_cast<const uint2*>(source);
    words[0] = v.x, words[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      uint4 v = reinterpret_cast<const uint4*>(source)[i];
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  }
}

// Queries times the 8 vectors that the quads n = 0..7 point at (kBits a value).
template <int kBits>
__device__ __forceinline__ void multiply_vectors(int (&sums)[4], const char* vector, int c, const Query& query) {
  constexpr int kBytes = kDim * kBits / 32;
  uint32_t words[kBytes / 4];
  load_words<kBytes>(words, vector + c * kBytes);
  const int magic[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t even, odd;
    if constexpr (kBits == 4) {
      even = words[step] & 0x0f0f0f0fu;
      odd = (words[step] >> 4) & 0x0f0f0f0fu;
    } else {
      even = __byte_perm(words[2 * step], words[2 * step + 1], 0x6420);
      odd = __byte_perm(words[2 * step], words[2 * step + 1], 0x7531);
    }
    if (step == 0) {
      mma_s8<kBits == 8>(sums, query.a[step], even, odd, magic);
    } else {
      mma_s8<kBits == 8>(sums, query.a[step], even, odd, sums);
    }
  }
}

// Where the record of a page has its scales: the same for all pages, or what lane page % 8 knows.
__device__ __forceinline__ int offset_of(int offset, int page) {
  return kScalesShift ? __shfl_sync(kFullWarp, offset, page) : offset;
}

// A scale of a page as bf16 bits; `offset` is where the record's scales start in the page's pieces.
__device__ __forceinline__ uint32_t scale_bits(const char* stage, int page, int offset, int index) {
  return *reinterpret_cast<const uint16_t*>(stage + kScalesAt + page * kScaleStride + offset + 2 * index);
}

// Value of a product from the sums of its high and low parts, both still on kMagic.  The constant
// is rounded to about one unit of the integer sums, far below their size.
__device__ __forceinline__ float product(int high, int low, float step, float zero) {
  return fmaf(__int_as_float(low), step * kLowStep, fmaf(__int_as_float(high), step, zero));
}

// Projections on two columns (2c, 2c + 1 of the product) as packed fp16, ready as an operand A.
__device__ __forceinline__ uint32_t finish_projection(const int (&sums)[4], const Query& query, float scale0,
                                                      float scale1) {
  const float step = query.step, zero = query.basis_zero;
  return pack_half(product(sums[0], sums[2], step, zero) * scale0, product(sums[1], sums[3], step, zero) * scale1);
}

__device__ __forceinline__ float column_scale(const char* stage, int page, int offset, int column) {
  float value = bf16_bits_to_float(scale_bits(stage, page, offset, kColumnScale + min(column, kRank - 1)));
  return kRank == kPaddedRank || column < kRank ? value : 0.0f;
}

// Rows of C of a page in fp16: columns k, k + 1 of tokens 2m (first) and 2m + 1 (second), with the
// scales of the rows where the format has them.
template <bool kClamp>
__device__ __forceinline__ void load_coefficients(const char* stage, int member, int page, int offset, int k, int m,
                                                  uint32_t& first, uint32_t& second) {
  const char* source = stage + kCoefficientsAt + member * kCoefficientBytes + page * kCoefficientStride;
  const bool present = kRank == kPaddedRank || k < kRank;
  if constexpr (kRotated) {
    constexpr int kColumn = kPage / 2;
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(source) + m;
    uint32_t x0 = present ? codes[k * kColumn] : 0x88u;
    uint32_t x1 = kRank > 1 && present ? codes[(k + 1) * kColumn] : 0x88u;
    uint32_t both = x0 | (x1 << 16);
    first = sub_half2((both & 0x000f000fu) | 0x64006400u, 0x64086408u);
    second = sub_half2(((both >> 4) & 0x000f000fu) | 0x64006400u, 0x64086408u);
  } else {
    uint32_t w0, w1, select = 0x4140;
    if constexpr (kRank == 4) {
      uint2 both = *reinterpret_cast<const uint2*>(source + 8 * m);
      w0 = both.x, w1 = both.y;
      select = k == 0 ? 0x4140 : 0x4342;
    } else if constexpr (kRank == 1) {
      w0 = present ? *reinterpret_cast<const uint8_t*>(source + 2 * m) : 0u;
      w1 = present ? *reinterpret_cast<const uint8_t*>(source + 2 * m + 1) : 0u;
    } else {
      w0 = present ? *reinterpret_cast<const uint16_t*>(source + 2 * m * kRank + k) : 0u;
      w1 = present ? *reinterpret_cast<const uint16_t*>(source + (2 * m + 1) * kRank + k) : 0u;
    }
    first = sub_half2(__byte_perm(w0 ^ 0x80808080u, 0x64646464u, select), 0x64806480u);
    second = sub_half2(__byte_perm(w1 ^ 0x80808080u, 0x64646464u, select), 0x64806480u);
    float s0 = bf16_bits_to_float(scale_bits(stage, page, offset, kRowScale + 2 * m));
    float s1 = bf16_bits_to_float(scale_bits(stage, page, offset, kRowScale + 2 * m + 1));
    if constexpr (kClamp) {
      // 127 * scale stays finite in fp16.
      s0 = fminf(s0, 512.0f);
      s1 = fminf(s1, 512.0f);
    }
    first = mul_half2(first, pack_half(s0, s0));
    second = mul_half2(second, pack_half(s1, s1));
  }
}

// Adds to a sum, or begins it.
__device__ __forceinline__ void add_to(float& sum, float term, bool begin) { sum = begin ? term : sum + term; }

// Sums over the tokens of exp2(logits - shift), partial: a lane has the tokens of its columns.
// `sums[page]` is for query head n.
template <bool kShift>
__device__ __forceinline__ void sum_tokens(float (&sums)[kTile], const char* stage, int member, int offset,
                                           const Query& query, const float (&shift)[kTile]) {
  const int lane = threadIdx.x & 31, n = lane >> 2, c = lane & 3;
  const char* basis = stage + kBasisAt + member * kBasisBytes;
#pragma unroll
  for (int pair = 0; pair < kTile / 2; ++pair) {
    // Keeps the compiler from starting on all pages at once, which spills registers.
    if (pair > 0 && (kPaddedRank > 4 || pair == 2)) __syncwarp();
    const int first = 2 * pair, second = 2 * pair + 1;
    // Operand A of the logits: rows n are the first page, rows 8 + n the second.
    uint32_t a[4];
    int own = 0, own_offset = 0, first_offset = 0, second_offset = 0;
    if constexpr (kPaddedRank == 4) {
      own = first + (c >> 1);
      own_offset = offset_of(offset, own);
      int sums8[4];
      multiply_vectors<kBasisBits>(
          sums8, basis + (first + (n >> 2)) * kBasisStride + min(n & 3, kRank - 1) * kColumnBytes, c, query);
      float s0 = column_scale(stage, own, own_offset, 2 * (c & 1));
      float s1 = column_scale(stage, own, own_offset, 2 * (c & 1) + 1);
      uint32_t z = finish_projection(sums8, query, s0, s1);
      a[0] = c < 2 ? z : 0u;
      a[1] = c < 2 ? 0u : z;
    } else {
      first_offset = offset_of(offset, first);
      second_offset = offset_of(offset, second);
    }
    if constexpr (kPaddedRank == 8) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        int page = first + which, page_offset = which ? second_offset : first_offset;
        int sums8[4];
        multiply_vectors<kBasisBits>(sums8, basis + page * kBasisStride + min(n, kRank - 1) * kColumnBytes, c, query);
        float s0 = column_scale(stage, page, page_offset, 2 * c);
        float s1 = column_scale(stage, page, page_offset, 2 * c + 1);
        a[3 * which] = finish_projection(sums8, query, s0, s1);
        a[1 + which] = 0u;
      }
    }
    if constexpr (kPaddedRank <= 8) {
#pragma unroll
      for (int m = 0; m < kPage / 2; m += 8) {
        uint32_t b0[2], b1[2];  // [even or odd tokens]
        if constexpr (kPaddedRank == 4) {
          load_coefficients<kShift>(stage, member, own, own_offset, 2 * (c & 1), m + n, b0[0], b0[1]);
        } else {
          load_coefficients<kShift>(stage, member, first, first_offset, 2 * c, m + n, b0[0], b0[1]);
          load_coefficients<kShift>(stage, member, second, second_offset, 2 * c, m + n, b1[0], b1[1]);
        }
        const float start_first = kShift ? -shift[first] : 0.0f, start_second = kShift ? -shift[second] : 0.0f;
        const float start[4] = {start_first, start_first, start_second, start_second};
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float d[4];
          if constexpr (kPaddedRank == 4) {
            mma_f16_k8(d, a[0], a[1], b0[odd], start);
          } else {
            mma_f16_k16(d, a[0], a[1], a[2], a[3], b0[odd], b1[odd], start);
          }
          add_to(sums[first], exp2_approx(d[0]) + exp2_approx(d[1]), m + odd == 0);
          add_to(sums[second], exp2_approx(d[2]) + exp2_approx(d[3]), m + odd == 0);
        }
      }
    } else {
      // Rank 16: a page fills the inner dimension by itself and leaves rows 8..15 unused.
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        int page = first + which, page_offset = which ? second_offset : first_offset;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int sums8[4];
          multiply_vectors<kBasisBits>(sums8, basis + page * kBasisStride + (8 * half + n) * kColumnBytes, c, query);
          float s0 = column_scale(stage, page, page_offset, 8 * half + 2 * c);
          float s1 = column_scale(stage, page, page_offset, 8 * half + 2 * c + 1);
          a[2 * half] = finish_projection(sums8, query, s0, s1);
          a[2 * half + 1] = 0u;
        }
#pragma unroll
        for (int m = 0; m < kPage / 2; m += 8) {
          uint32_t b0[2], b1[2];
          load_coefficients<kShift>(stage, member, page, page_offset, 2 * c, m + n, b0[0], b0[1]);
          load_coefficients<kShift>(stage, member, page, page_offset, 8 + 2 * c, m + n, b1[0], b1[1]);
          const float begin = kShift ? -shift[page] : 0.0f;
          const float start[4] = {begin, begin, begin, begin};
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            float d[4];
            mma_f16_k16(d, a[0], 0u, a[2], 0u, b0[odd], b1[odd], start);
            add_to(sums[page], exp2_approx(d[0]) + exp2_approx(d[1]), m + odd == 0);
          }
        }
      }
    }
  }
}

// Sums of a quad over 8 pages: lane c gets the totals of pages 2c and 2c + 1.
__device__ __forceinline__ void reduce_pages(float (&total)[2], const float (&sums)[kTile], int c) {
  float four[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float keep = c & 2 ? sums[4 + i] : sums[i];
    float give = c & 2 ? sums[i] : sums[4 + i];
    four[i] = keep + __shfl_xor_sync(kFullWarp, give, 2);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float keep = c & 1 ? four[2 + i] : four[i];
    float give = c & 1 ? four[i] : four[2 + i];
    total[i] = keep + __shfl_xor_sync(kFullWarp, give, 1);
  }
}

struct PageLogs {
  float value[2];
};

// The rare tile whose sums overflow: pages are lowered by steps of 100 until they do not.
// Keys are centred, so a page's largest logit is not far below zero and nothing is lost below.
// Out of line and by value, so that the usual path keeps its operands in registers.
__device__ __noinline__ PageLogs sum_tokens_safely(const char* stage, int member, int offset, Query query) {
  const int c = threadIdx.x & 3;
  PageLogs logs = {};
  float shift[kTile] = {};
  bool again = true;
  for (int attempt = 0; again && attempt < 100; ++attempt) {
    float sums[kTile];
    sum_tokens<true>(sums, stage, member, offset, query, shift);
    bool overflow = false;
#pragma unroll
    for (int page = 0; page < kTile; ++page) {
      float total = sums[page];
      total += __shfl_xor_sync(kFullWarp, total, 1);
      total += __shfl_xor_sync(kFullWarp, total, 2);
      // A page that overflows to the end keeps a finite score, so that its row's shares are numbers.
      const float log_sum = fminf(log2_approx(total), 128.0f) + shift[page];
      if (page == 2 * c) logs.value[0] = log_sum;
      if (page == 2 * c + 1) logs.value[1] = log_sum;
      if (total == INFINITY) {
        shift[page] += 100.0f;
        overflow = true;
      }
    }
    again = __any_sync(kFullWarp, overflow);
  }
  return logs;
}

// Scores in natural-log units: scores[i] is page 2c + i for query head n.
// The records are those of KV head `member` of the stage; for `offset` see offset_of.
__device__ __forceinline__ void score_tile(float (&scores)[2], const char* stage, int member, int offset,
                                           const Query& query) {
  const int lane = threadIdx.x & 31, n = lane >> 2, c = lane & 3;
  float sums[kTile], total[2];
  const float none[kTile] = {};
  sum_tokens<false>(sums, stage, member, offset, query, none);
  reduce_pages(total, sums, c);
  PageLogs logs{{log2_approx(total[0]), log2_approx(total[1])}};
  const bool finite = total[0] < INFINITY && total[1] < INFINITY;
  if (__any_sync(kFullWarp, !finite)) logs = sum_tokens_safely(stage, member, offset, query);

  int products[4];
  multiply_vectors<8>(products, stage + kCentroidAt + member * kCentroidBytes + n * kCentroidStride, c, query);
  float scale0 = bf16_bits_to_float(scale_bits(stage, 2 * c, offset_of(offset, 2 * c), 0));
  float scale1 = bf16_bits_to_float(scale_bits(stage, 2 * c + 1, offset_of(offset, 2 * c + 1), 0));
  const float step = query.step, zero = query.centroid_zero;
  const float o0 = product(products[0], products[2], step, zero);
  const float o1 = product(products[1], products[3], step, zero);
  scores[0] = fmaf(o0, scale0, logs.value[0]) * kLn2;
  scores[1] = fmaf(o1, scale1, logs.value[1]) * kLn2;
}

}  // namespace locks
