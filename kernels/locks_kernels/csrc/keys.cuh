// Reading keys and values of a pool of any supported dtype.
#pragma once

#include "common.cuh"

namespace locks {

// KEY_TYPE and KV_TYPE of the builds (KEY_TYPES in cuda_summarize.py).
constexpr int kBf16 = 0, kFp16 = 1, kE4m3 = 3;

// Eight elements of a pool.  `words` gives them as packed pairs for the tensor cores, exactly:
// bf16 as bf16, fp16 and e4m3 as fp16.
template <int kType>
struct KeyType {
  static constexpr int kBytes = kType == kE4m3 ? 1 : 2;
  static constexpr bool kBf16Math = kType == kBf16;
  static constexpr uint32_t kExponent = kBf16Math ? 0x7f80 : 0x7c00;  // of one element of a pair
  struct alignas(8 * kBytes) Vector {
    uint32_t raw[2 * kBytes];
  };

  static __device__ __forceinline__ Vector load(const unsigned char* at) {
    Vector v;
    if constexpr (kBytes == 1) {
      uint2 both = __ldg(reinterpret_cast<const uint2*>(at));
      v.raw[0] = both.x, v.raw[1] = both.y;
    } else {
      uint4 all = __ldg(reinterpret_cast<const uint4*>(at));
      v.raw[0] = all.x, v.raw[1] = all.y, v.raw[2] = all.z, v.raw[3] = all.w;
    }
    return v;
  }

  static __device__ __forceinline__ void words(const Vector& v, uint32_t (&w)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kType == kE4m3) {
        auto pair = static_cast<__nv_fp8x2_storage_t>(v.raw[i / 2] >> (i % 2 * 16) & 0xffff);
        __half2_raw both = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
        w[i] = static_cast<uint32_t>(both.x) | static_cast<uint32_t>(both.y) << 16;
      } else {
        w[i] = v.raw[i];
      }
    }
  }

  static __device__ __forceinline__ float2 pair(uint32_t word) {
    if constexpr (kBf16Math) return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
    else return __half22float2(*reinterpret_cast<const __half2*>(&word));
  }

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    if constexpr (kBf16Math) {
      __nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
      return *reinterpret_cast<uint32_t*>(&packed);
    } else {
      return pack_half(low, high);
    }
  }

  // The pair with non-finite elements replaced by zero.
  static __device__ __forceinline__ uint32_t finite(uint32_t word) {
    if ((word & kExponent) == kExponent) word &= 0xffff0000u;
    if ((word & kExponent << 16) == kExponent << 16) word &= 0xffffu;
    return word;
  }

  static __device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
    mma_f16_k16<kBf16Math>(d, a0, a1, a2, a3, b0, b1, d);
  }
};

// Sixteen tokens of one KV head in registers, in the two arrangements that products need.  The
// order of the dimensions in a dot product is free, so 16-byte loads give operands as they are.
template <int kType, int kDim>
struct TokenRows {
  using Type = KeyType<kType>;
  static constexpr int kVectors = kDim / 32;
  // Tokens g and g + 8, dimensions 32 c + 8 t + {0..7}: A of [tokens x dims], B of [dims x tokens].
  typename Type::Vector v[2][kVectors];

  __device__ __forceinline__ void load(const unsigned char* base, int64_t slot_bytes, int tokens = 16) {
    load_own(base + own(slot_bytes), slot_bytes, tokens);
  }
  // In two steps, the first for many calls: where the lane's part of the sixteen tokens begins, from `base` on.
  static __device__ __forceinline__ int64_t own(int64_t slot_bytes) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    return g * slot_bytes + 8 * t * Type::kBytes;
  }
  __device__ __forceinline__ void load_own(const unsigned char* at, int64_t slot_bytes, int tokens) {
    int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int c = 0; c < kVectors; ++c) {
        v[i][c] = g + 8 * i < tokens ? Type::load(at + 8 * i * slot_bytes + 32 * c * Type::kBytes)
                                     : typename Type::Vector{};
      }
    }
  }
};

template <int kType, int kDim>
struct TokenColumns {
  using Type = KeyType<kType>;
  static constexpr int kVectors = kDim / 64;
  // Tokens 2 t + {0, 1, 8, 9}, dimensions 64 c + 8 g + {0..7}: A of [dims x tokens], by byte permutes.
  typename Type::Vector v[4][kVectors];

  __device__ __forceinline__ void load(const unsigned char* base, int64_t slot_bytes, int tokens = 16) {
    load_own(base + own(slot_bytes), slot_bytes, tokens);
  }
  static __device__ __forceinline__ int64_t own(int64_t slot_bytes) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    return 2 * t * slot_bytes + 8 * g * Type::kBytes;
  }
  __device__ __forceinline__ void load_own(const unsigned char* at, int64_t slot_bytes, int tokens) {
    int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int token = (i & 1) + 8 * (i >> 1);
#pragma unroll
      for (int c = 0; c < kVectors; ++c) {
        v[i][c] = 2 * t + token < tokens ? Type::load(at + token * slot_bytes + 64 * c * Type::kBytes)
                                         : typename Type::Vector{};
      }
    }
  }

  // Words of chunk c, [token][pair of dimensions]; operand(w, j) is A for the dimensions
  // 64 c + 8 g + 2 j (rows 0 to 7 of the product) and one more (rows 8 to 15).
  __device__ __forceinline__ void words(int c, uint32_t (&w)[4][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) Type::words(v[i][c], w[i]);
  }
  static __device__ __forceinline__ void operand(const uint32_t (&w)[4][4], int j, uint32_t (&a)[4]) {
    a[0] = __byte_perm(w[0][j], w[1][j], 0x5410);
    a[1] = __byte_perm(w[0][j], w[1][j], 0x7632);
    a[2] = __byte_perm(w[2][j], w[3][j], 0x5410);
    a[3] = __byte_perm(w[2][j], w[3][j], 0x7632);
  }
};

}  // namespace locks
