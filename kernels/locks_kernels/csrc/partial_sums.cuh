// Log-sum-exps in parts: what `score` leaves of the pages that it has scored, and `select` adds up.
#pragma once

#include "schedule.cuh"

namespace locks {

// log2(sum) + largest, in log2 units.
struct alignas(8) LogSum {
  float largest, sum;
};

__device__ __forceinline__ LogSum join(LogSum a, LogSum b) {
  float largest = fmaxf(a.largest, b.largest);
  if (largest == -INFINITY) return LogSum{-INFINITY, 0.0f};
  return LogSum{largest,
                a.sum * exp2_approx(a.largest - largest) + b.sum * exp2_approx(b.largest - largest)};
}

// Stands for -inf where differences are taken.
constexpr float kNoScore = -1e30f;

// The tiles of a block, in equal shares for all blocks.
struct Range {
  int begin, end;
  __host__ __device__ __forceinline__ Range(int total, int block, int blocks)
      : begin(static_cast<int>(static_cast<int64_t>(total) * block / blocks)),
        end(static_cast<int>(static_cast<int64_t>(total) * (block + 1) / blocks)) {}
};

// Where the parts of a query head begin that a block has of a row, one for each team that takes turns
// with tiles of this head.  A block's rows and a row's blocks follow each other, so no two share a slot.
__host__ __device__ __forceinline__ int64_t partial_slot(int block, int row, int q_heads, int q_head, int parts) {
  return (static_cast<int64_t>(block + row) * q_heads + q_head) * parts;
}

// The blocks that have tiles of a row, which are [first, last) of `total` (times blocks, below 2^32).
struct RowBlocks {
  unsigned total, blocks;
  int first, last;

  // The last block that begins at or before a tile has it.
  __host__ __device__ __forceinline__ int block_of(int tile) const {
    return static_cast<int>(((tile + 1u) * blocks - 1u) / total);
  }
  // Whether team `part` of those that take turns with a head, every `parts`-th tile each, has one.
  __host__ __device__ __forceinline__ bool has(int block, int part, int parts) const {
    const int begin = static_cast<int>(total * static_cast<unsigned>(block) / blocks);
    const int end = static_cast<int>(total * (static_cast<unsigned>(block) + 1u) / blocks);
    const int from = begin > first ? begin : first, to = end < last ? end : last;
    return ((part - (from - begin)) & (parts - 1)) < to - from;
  }
};

}  // namespace locks
