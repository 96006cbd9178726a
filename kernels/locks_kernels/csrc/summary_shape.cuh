// Compile-time geometry of the build of summarize.cu.
#pragma once

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

constexpr int kBasisMax = kBasisBits == 8 ? 127 : 7;
constexpr int kScaleCount = 1 + (kRotated ? 0 : kPage) + (kBasisBits == 16 ? 0 : kRank);
constexpr int kBasisBytes = kDim * kRank * kBasisBits / 8;
constexpr int kCoefficientBytes = kPage * kRank / (kRotated ? 2 : 1);

constexpr int kChunks = kDim / 64;
constexpr int kTiles = (kRank + 7) / 8;  // of 8 columns
constexpr int kColumns = 8 * kTiles;

using Key = KeyType<KEY_TYPE>;

}  // namespace locks
