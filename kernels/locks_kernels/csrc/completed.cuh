// Which pages a chunk of written slots completes.
#pragma once

#include "common.cuh"

namespace locks {

// Lists the pages that slots [first, first + chunk) complete, in the order of the slots; all
// threads of the block call it and get the count.  `list` has room for `chunk` pages.
template <int kPage>
__device__ __forceinline__ int list_completed(const int64_t* slots, int64_t total, int64_t first, int chunk,
                                              int* list, int* count) {
  if (threadIdx.x < 32) {
    int lane = threadIdx.x, found = 0;
    for (int base = 0; base < chunk; base += 32) {
      int64_t at = first + base + lane;
      int64_t slot = base + lane < chunk && at < total ? slots[at] : 0;
      bool complete = slot >= 0 && slot % kPage == kPage - 1;
      unsigned votes = __ballot_sync(kFullWarp, complete);
      if (complete) list[found + __popc(votes & ((1u << lane) - 1))] = static_cast<int>(slot / kPage);
      found += __popc(votes);
    }
    if (lane == 0) *count = found;
  }
  __syncthreads();
  return *count;
}

}  // namespace locks
