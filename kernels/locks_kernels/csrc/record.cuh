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

// ---- a stage: the records of one tile of kTile pages and kTogether neighbouring KV heads -------

#ifndef HEADS_TOGETHER
#define HEADS_TOGETHER 4
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
constexpr int kTogether = HEADS_TOGETHER;
constexpr int kBlocks = BLOCKS;  // blocks of 8 query heads of a KV head
static_assert(kTogether == 1 || kTogether == 2 || kTogether == 4, "heads together");
static_assert(kBlocks == 1 || kBlocks == 2, "blocks of query heads");

// A page's scales start at a multiple of 8 or 4 bytes where the KV heads are a multiple of 4 or
// 2 and are copied as they are.  A single head's start at any even address: pieces of 16 bytes
// cover them, and where they start in these is noted beside the stage.
constexpr bool kScalesShift = kTogether == 1;
constexpr int kScalePiece = kScalesShift ? 16 : 2 * kTogether;
constexpr int kScaleRun = kScalesShift ? (14 + kScaleBytes + 15) / 16 * 16 : kTogether * kScaleBytes;
constexpr int kCoefficientRun = kTogether * kCoefficientBytes;
constexpr int kCoefficientPiece = kCoefficientRun % 16 == 0 ? 16 : 8;
static_assert(kScaleRun % kScalePiece == 0 && kCoefficientRun % kCoefficientPiece == 0 && kBasisBytes % 16 == 0,
              "copies");

// Distances between pages in a stage.  Centroids are padded, and coefficients of 128 bytes too,
// so that the pages that a warp reads at once lie in different banks.
constexpr int kBasisStride = kTogether * kBasisBytes;
constexpr int kCentroidStride = kTogether * kCentroidBytes + 16;
constexpr int kCoefficientStride = (kCoefficientRun + 15) / 16 * 16 + (kCoefficientRun % 128 == 0 ? 64 : 0);
constexpr int kScaleStride = (kScaleRun + 7) / 8 * 8;

constexpr int kBasisAt = 0;
constexpr int kCentroidAt = kBasisAt + kTile * kBasisStride;
constexpr int kCoefficientsAt = kCentroidAt + kTile * kCentroidStride;
constexpr int kScalesAt = kCoefficientsAt + kTile * kCoefficientStride;
constexpr int kStageBytes = (kScalesAt + kTile * kScaleStride + 15) / 16 * 16;

// A team has a warp for every KV head of a stage and block of its query heads.  A block has as
// many teams as there is shared memory for (227 KB) with two stages each, and for every four
// scoring warps one that copies.
constexpr int kTeamWarps = kTogether * kBlocks;
constexpr int kSharedLimit = 216 * 1024;
constexpr bool fits(int warps, int stages) { return warps / kTeamWarps * stages * kStageBytes <= kSharedLimit; }
constexpr int warps_that_fit(int stages) {
  int warps = 16;
  while (warps > kTeamWarps && !fits(warps, stages)) warps /= 2;
  return warps;
}
// Two stages keep enough bytes in flight, and more were no faster, for one block of query heads or two:
// copies that run further ahead meet more of their own in the memory system.
constexpr int kStages = 2;
constexpr int kWarps = warps_that_fit(kStages);
constexpr int kTeams = kWarps / kTeamWarps;
constexpr int kCopyWarps = kWarps < 4 ? 1 : kWarps / 4;
constexpr int kTeamsPerCopyWarp = kTeams / kCopyWarps;
constexpr int kRings = kTeams * kStages;
static_assert(kTeamWarps <= 4, "a copying warp has at least one team");
static_assert(kRings * kStageBytes <= kSharedLimit, "stages do not fit shared memory");

// Shared memory: stages, their two barriers, where the scales of a stage's pages start, row tables.
constexpr int kBarriersAt = kRings * kStageBytes;
constexpr int kShiftsAt = kBarriersAt + kRings * 16;
constexpr int kRowsAt = kShiftsAt + (kScalesShift ? kRings * kTile * 4 : 0);

}  // namespace locks
