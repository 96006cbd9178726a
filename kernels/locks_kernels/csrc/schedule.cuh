// Which pages of a batch are scored: tiles of kTile pages, laid end to end over the rows.
#pragma once

#include "common.cuh"

namespace locks {

constexpr int kMaxRows = 1024;

__device__ __forceinline__ int pages_of(int length, int page_size) { return (length + page_size - 1) / page_size; }

// A row is scored only if its budget leaves something out.
__device__ __forceinline__ bool needs_scores(int pages, int budget) { return pages > budget; }

// Tiles of a row whose budget allows `budget` pages.
__device__ __forceinline__ int tiles_of(int pages, int budget) {
  return needs_scores(pages, budget) ? (pages + kTile - 1) / kTile : 0;
}

// Fills first[0..rows] with the first tile of every row (first[rows] is the total).  Rows that
// need no scores get none; nor do those past `capacity` tiles, which then attend everything.
// All threads of the block call it; `first` is shared memory and ready when it returns.
__device__ __forceinline__ void schedule_rows(int* first, int rows, const Lengths& lengths, const int* budgets,
                                              int page_size, int capacity) {
#pragma unroll 1
  for (int row = threadIdx.x; row < rows; row += blockDim.x) {
    first[row + 1] = tiles_of(pages_of(lengths[row], page_size), budgets[row]);
  }
  if (threadIdx.x == 0) first[0] = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    int lane = threadIdx.x;
    int total = 0, cut = 0;
#pragma unroll 1
    for (int base = 0; base < rows; base += 32) {
      int row = base + lane;
      int sum = row < rows ? first[row + 1] : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(kFullWarp, sum, step);
        if (lane >= step) sum += other;
      }
      sum += total;
      // Sums never fall, so the last one within the capacity is where the schedule ends.
      unsigned fits = __ballot_sync(kFullWarp, sum <= capacity);
      if (fits) cut = __shfl_sync(kFullWarp, sum, 31 - __clz(fits));
      total = __shfl_sync(kFullWarp, sum, 31);
      if (row < rows) first[row + 1] = min(sum, cut);
    }
  }
  __syncthreads();
}

// The first tile of one row, as schedule_rows finds it where the row fits.  All lanes of a warp call it.
__device__ __forceinline__ int first_tile(int row, const Lengths& lengths, const int* budgets, int page_size) {
  int before = 0;
#pragma unroll 1
  for (int other = threadIdx.x % 32; other < row; other += 32) {
    before += tiles_of(pages_of(lengths[other], page_size), budgets[other]);
  }
  return __reduce_add_sync(kFullWarp, before);
}

}  // namespace locks
