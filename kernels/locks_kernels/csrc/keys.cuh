// Reading the keys of one page and KV head from a pool of any supported dtype.
#pragma once

#include "common.cuh"

namespace locks {

// KEY_TYPE of the build (see dtypes.py): bf16, fp16, fp32, fp8 e4m3.
constexpr int kBf16 = 0, kFp16 = 1, kFp32 = 2, kE4m3 = 3;

__device__ __forceinline__ float finite_or_zero(float v) {
  return (__float_as_uint(v) & 0x7f800000u) == 0x7f800000u ? 0.f : v;
}

template <int kType>
struct KeyType;
template <>
struct KeyType<kBf16> {
  using Vector = uint4;  // of 8 elements
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ void unpack(const Vector& raw, float (&v)[8]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = __uint_as_float(words[i] << 16);
      v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
};
template <>
struct KeyType<kFp16> {
  using Vector = uint4;
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ void unpack(const Vector& raw, float (&v)[8]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      v[2 * i] = pair.x;
      v[2 * i + 1] = pair.y;
    }
  }
};
template <>
struct KeyType<kFp32> {
  struct Vector {
    float4 low, high;
  };
  static constexpr int kBytes = 4;
  static __device__ __forceinline__ void unpack(const Vector& raw, float (&v)[8]) {
    v[0] = raw.low.x, v[1] = raw.low.y, v[2] = raw.low.z, v[3] = raw.low.w;
    v[4] = raw.high.x, v[5] = raw.high.y, v[6] = raw.high.z, v[7] = raw.high.w;
  }
};
template <>
struct KeyType<kE4m3> {
  using Vector = uint2;
  static constexpr int kBytes = 1;
  static __device__ __forceinline__ void unpack(const Vector& raw, float (&v)[8]) {
    const uint32_t words[2] = {raw.x, raw.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      auto pair = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> (i % 2 * 16) & 0xffff);
      float2 both = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
      v[2 * i] = both.x;
      v[2 * i + 1] = both.y;
    }
  }
};

// A page of one KV head, read by a warp: 8 elements a lane, kRowLanes lanes a row.  Pages that
// fit are read once into registers, larger ones again for every pass (from L1 or L2).
template <int kType, int kDim, int kPage>
struct KeySource {
  using Type = KeyType<kType>;
  using Vector = typename Type::Vector;
  static constexpr int kRowLanes = kDim / 8;
  static constexpr int kRowsAStep = 32 / kRowLanes;
  static constexpr int kSteps = kPage / kRowsAStep;
  static constexpr bool kCached = kSteps * sizeof(Vector) <= 128;
  static constexpr int kUnroll = kCached ? kSteps : 4;
  struct Cache {
    Vector raw[kCached ? kSteps : 1];
  };

  const unsigned char* base;
  int64_t row_bytes;

  // `layer` is the address of the layer's page view, the other two count elements.
  __device__ __forceinline__ KeySource(int64_t layer, int64_t offset, int64_t slot_stride)
      : base(reinterpret_cast<const unsigned char*>(layer) + offset * Type::kBytes),
        row_bytes(slot_stride * Type::kBytes) {}

  __device__ __forceinline__ Vector read(int row, int column) const {
    return *reinterpret_cast<const Vector*>(base + row * row_bytes + column * Type::kBytes);
  }

  __device__ __forceinline__ void fill(Cache& cache, int row, int column) const {
    if constexpr (kCached) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) cache.raw[step] = read(row + step * kRowsAStep, column);
    }
  }

  // Eight elements of row `row + step * kRowsAStep`; a non-finite element counts as 0.
  __device__ __forceinline__ void get(const Cache& cache, int step, int row, int column, float (&v)[8]) const {
    Vector raw;
    if constexpr (kCached) raw = cache.raw[step];
    else raw = read(row + step * kRowsAStep, column);
    Type::unpack(raw, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = finite_or_zero(v[i]);
  }
};

}  // namespace locks
