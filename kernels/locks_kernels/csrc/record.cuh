// Compile-time geometry of a summary record (layout.py is the definition) and of the stage
// of shared memory that holds the records of one tile of pages.
#pragma once

#include "common.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef PAGE
#define PAGE 16
#endif
#ifndef RANK
#define RANK 4
#endif
#ifndef BASIS_BITS
#define BASIS_BITS 4
#endif
#ifndef ROTATED
#define ROTATED 0
#endif

namespace locks {

constexpr int kDim = HEAD_DIM;
constexpr int kPage = PAGE;
constexpr int kRank = RANK;
constexpr int kBasisBits = BASIS_BITS;
constexpr bool kRotated = ROTATED != 0;

static_assert(kDim == 64 || kDim == 128 || kDim == 256, "head_dim");
static_assert(kPage == 16 || kPage == 32 || kPage == 64, "page size");
static_assert(kRank == 1 || kRank == 2 || kRank == 4 || kRank == 6 || kRank == 8 || kRank == 16, "rank");
static_assert(kBasisBits == 4 || (kBasisBits == 8 && !kRotated), "basis");

// Bytes of the planes of one record.
constexpr int kColumnBytes = kDim * kBasisBits / 8;
constexpr int kBasisBytes = kColumnBytes * kRank;
constexpr int kCoefficientBytes = kPage * kRank / (kRotated ? 2 : 1);
constexpr int kCentroidBytes = kDim;
constexpr int kScaleCount = 1 + (kRotated ? 0 : kPage) + kRank;
constexpr int kScaleBytes = 2 * kScaleCount;

// Positions in the scales: the centroid's is 0, then rows of C (not if rotated), then columns.
constexpr int kRowScale = 1;
constexpr int kColumnScale = kRotated ? 1 : 1 + kPage;

// Ranks are padded to a tile of the tensor cores: 4 (two pages share one of 8 columns), 8 or 16.
constexpr int kPaddedRank = kRank <= 4 ? 4 : kRank <= 8 ? 8 : 16;

// Steps of 32 dimensions of the int8 products.
constexpr int kSteps = kDim / 32;

// ---- a stage: the records of one tile of kTile pages of one KV head --------------------------

// Scales start at any even address: 16-byte pieces that cover them, wherever they start.
constexpr int kScalePieces = (14 + kScaleBytes + 15) / 16;
constexpr int kScaleStride = 16 * kScalePieces;
// 16 bytes of padding keep the centroids of neighbouring pages in different banks.
constexpr int kCentroidStride = kCentroidBytes + 16;

constexpr int kBasisAt = 0;
constexpr int kCentroidAt = kBasisAt + kTile * kBasisBytes;
constexpr int kCoefficientsAt = kCentroidAt + kTile * kCentroidStride;
constexpr int kScalesAt = kCoefficientsAt + kTile * ((kCoefficientBytes + 15) / 16 * 16);
constexpr int kStageBytes = kScalesAt + kTile * kScaleStride;

// Largest copy that keeps every record's coefficients aligned.
constexpr int kCoefficientPiece = kCoefficientBytes % 16 == 0 ? 16 : kCoefficientBytes % 8 == 0 ? 8 : 4;
static_assert(kCoefficientBytes % kCoefficientPiece == 0 && kBasisBytes % 16 == 0, "copies");
constexpr int kCoefficientStride = (kCoefficientBytes + 15) / 16 * 16;

// Warps and stages that fit the 227 KB of shared memory of a block.
constexpr int kSharedLimit = 220 * 1024;
constexpr int warps_that_fit(int stages) {
  int warps = 16;
  while (warps > 1 && warps * stages * kStageBytes > kSharedLimit) warps /= 2;
  return warps;
}
#ifndef STAGES
constexpr int kStages = warps_that_fit(3) >= 8 ? 3 : 2;
#else
constexpr int kStages = STAGES;
#endif
constexpr int kWarps = warps_that_fit(kStages);
static_assert(kWarps * kStages * kStageBytes <= kSharedLimit, "stages do not fit shared memory");

}  // namespace locks
