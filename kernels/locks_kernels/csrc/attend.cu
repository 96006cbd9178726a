// attend: decode attention over the pages of a list (or all pages of a row), one launch.
//
// The tokens of a (row, KV head) are split over blocks and, within a block, over warps, in tiles
// of 16.  A warp keeps a tile's K and V in registers only: the order in which dimensions enter a
// dot product is free, so 16-byte loads give operands of the tensor cores without shared memory.
//   S^T [16 tokens x 8 heads] = K q^T        A = K, B = q
//   O^T [16 dims x 8 heads]  += V^T P^T      A = V^T (byte permutes), B = P^T (movmatrix)
// Blocks of a cluster merge through each other's shared memory; clusters of one (row, KV head)
// through global memory, the last to finish doing it, always in the same order.
//
// variant: HEAD_DIM=128 PAGE=16 KV_TYPE=0 Q_TYPE=0 HEAD_TILES=1
// variant: HEAD_DIM=128 PAGE=16 KV_TYPE=0 Q_TYPE=0 HEAD_TILES=2
// variant: HEAD_DIM=64 PAGE=32 KV_TYPE=3 Q_TYPE=1 HEAD_TILES=1
// variant: HEAD_DIM=256 PAGE=64 KV_TYPE=1 Q_TYPE=2 HEAD_TILES=2
#include "keys.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#define PAGE 16
#define KV_TYPE 0
#define Q_TYPE 0
#define HEAD_TILES 1
#endif
#ifndef WARPS
#define WARPS 4
#endif

namespace locks {

constexpr int kDim = HEAD_DIM;
constexpr int kPage = PAGE;
constexpr int kTiles = HEAD_TILES;  // of 8 query heads: the group is padded to 8 or 16
constexpr int kWarps = WARPS;
constexpr int kThreads = 32 * kWarps;
constexpr bool kBf16Math = KV_TYPE == kBf16;  // fp16 for fp16 and (exactly) for e4m3 pools
static_assert(KV_TYPE != kFp32, "fp32 pools are served by the Triton path");

constexpr int kRows = kDim / 32;    // vectors of 8 elements a lane has of one K row
constexpr int kChunks = kDim / 64;  // vectors a lane has of one V row
constexpr int kHeads = 8 * kTiles;
constexpr int kPitch = kDim + 4;  // floats; keeps the lanes' heads in different banks
constexpr float kLow = -1e30f;    // stands for -inf where differences are taken

using Vector = KeyType<KV_TYPE>::Vector;
constexpr int kElementBytes = KeyType<KV_TYPE>::kBytes;

struct Params {
  const void* queries;
  int64_t q_row, q_head;
  const unsigned char *keys, *values;
  int64_t k_page, k_slot, k_head, v_page, v_slot, v_head;  // bytes
  const int* pages;
  int64_t width;
  const int* counts;
  const int* page_table;
  int64_t table_row;
  Lengths lengths;
  float scale;  // softmax scale times log2(e)
  float v_scale;
  void* output;
  float* lse;
  float* partial_output;   // [rows * kv_heads, clusters, group * kDim]
  float2* partial_sums;    // [rows * kv_heads, clusters, cluster, group]: maximum and sum
  unsigned* arrivals;      // [rows * kv_heads, cluster], zero between launches
  int kv_heads, group, splits, cluster, tiles_a_warp;
};

struct Shared {
  alignas(16) float output[kWarps][kHeads * kPitch];
  float peak[kWarps][kHeads];
  float total[kWarps][kHeads];
  float2 sums[kHeads];  // of the block
  int last;
};

// ---- operands ---------------------------------------------------------------------------------

// Eight elements of the pool as four packed pairs in the dtype of the products.
template <typename Raw>
__device__ __forceinline__ void to_words(const Raw& raw, uint32_t (&w)[4]) {
  if constexpr (sizeof(Raw) == 8) {  // e4m3
    const uint32_t words[2] = {raw.x, raw.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      auto pair = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> (i % 2 * 16) & 0xffff);
      __half2_raw both = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
      w[i] = static_cast<uint32_t>(both.x) | static_cast<uint32_t>(both.y) << 16;
    }
  } else {
    w[0] = raw.x, w[1] = raw.y, w[2] = raw.z, w[3] = raw.w;
  }
}

__device__ __forceinline__ uint32_t pack_product(float low, float high) {
  if constexpr (kBf16Math) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
  } else {
    return pack_half(low, high);
  }
}

// The 8x8 matrix of 16-bit elements held by the warp, transposed.
__device__ __forceinline__ uint32_t transpose(uint32_t v) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
  return out;
}

struct Queries {
  uint32_t words[kTiles][kRows][4];

  // Head g of every tile, dimensions 32 c + 8 t + {0..7}.
  __device__ __forceinline__ void load(const Params& params, int row, int head) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      int member = 8 * n + g;
      int64_t at = row * params.q_row + (head * params.group + member) * params.q_head + 8 * t;
#pragma unroll
      for (int c = 0; c < kRows; ++c) {
        float v[8] = {};
        if (member < params.group) {
          auto raw = *reinterpret_cast<const KeyType<Q_TYPE>::Vector*>(
              static_cast<const unsigned char*>(params.queries) + (at + 32 * c) * KeyType<Q_TYPE>::kBytes);
          KeyType<Q_TYPE>::unpack(raw, v);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) words[n][c][i] = pack_product(v[2 * i], v[2 * i + 1]);
      }
    }
  }
};

// ---- one warp's share -----------------------------------------------------------------------------

// Physical pages of the warp's tiles, 32 tiles at a time in the lanes, one batch ahead.
struct PageList {
  const int* pages;
  int tile, end;  // of the batch in `ids`
  int ids, next_ids;

  __device__ __forceinline__ int read(int at) const {
    at += threadIdx.x % 32;
    return at < end ? pages[at / (kPage / 16)] : 0;
  }
  __device__ __forceinline__ PageList(const int* pages, int begin, int end) : pages(pages), tile(begin), end(end) {
    ids = read(begin);
    next_ids = read(begin + 32);
  }
  // Page of tile `at`, which does not decrease from call to call; 0 past the end.
  __device__ __forceinline__ int64_t page(int at) {
    if (at >= tile + 32) {
      tile += 32;
      ids = next_ids;
      next_ids = read(tile + 32);
    }
    return __shfl_sync(kFullWarp, ids, at - tile);
  }
};

struct Tile {
  Vector k[2][kRows];    // tokens g and g + 8, dimensions 32 c + 8 t + {0..7}
  Vector v[4][kChunks];  // tokens 2 t + {0, 1, 8, 9}, dimensions 64 c + 8 g + {0..7}

  // Tokens at or past `tokens` read as zero: what lies in the pool there may be NaN.
  __device__ __forceinline__ void load_keys(const unsigned char* base, int64_t slot_bytes, int tokens) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int token = g + 8 * i;
#pragma unroll
      for (int c = 0; c < kRows; ++c) {
        k[i][c] = token < tokens ? load_vector(base + token * slot_bytes + (32 * c + 8 * t) * kElementBytes) : Vector{};
      }
    }
  }
  __device__ __forceinline__ void load_values(const unsigned char* base, int64_t slot_bytes, int tokens) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int token = 2 * t + (i & 1) + 8 * (i >> 1);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        v[i][c] = token < tokens ? load_vector(base + token * slot_bytes + (64 * c + 8 * g) * kElementBytes) : Vector{};
      }
    }
  }

 private:
  static __device__ __forceinline__ Vector load_vector(const unsigned char* at) {
    return __ldg(reinterpret_cast<const Vector*>(at));
  }
};

struct Accumulator {
  // O^T: [tile of heads][chunk of 64 dims][pair of dims]: dims 64 c + 8 g + 2 j + {0, 1} (elements
  // 0 1 and 2 3), heads 8 n + 2 t + {0, 1}.
  float output[kTiles][kChunks][4][4];
  float peak[kTiles][2], total[kTiles][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) peak[n][j] = kLow, total[n][j] = 0.f;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) output[n][c][j][i] = 0.f;
        }
      }
    }
  }
};

// S^T of a tile: tokens g (elements 0 1) and g + 8 (2 3), heads 8 n + 2 t + {0, 1}.
__device__ __forceinline__ void products(const Tile& tile, const Queries& queries, float (&s)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = 0.f;
  }
#pragma unroll
  for (int c = 0; c < kRows; ++c) {
    uint32_t top[4], bottom[4];
    to_words(tile.k[0][c], top);
    to_words(tile.k[1][c], bottom);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint32_t(&q)[4] = queries.words[n][c];
      mma_f16_k16<kBf16Math>(s[n], top[0], bottom[0], top[1], bottom[1], q[0], q[1], s[n]);
      mma_f16_k16<kBf16Math>(s[n], top[2], bottom[2], top[3], bottom[3], q[2], q[3], s[n]);
    }
  }
}

// Online softmax of one tile; the weights replace the products as the B operand P^T.
__device__ __forceinline__ void weights(float (&s)[kTiles][4], int tokens, float scale, Accumulator& acc,
                                        uint32_t (&p)[kTiles][2]) {
  int g = threadIdx.x % 32 / 4;
  bool grown = false;
  float decay[kTiles][2];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = g + 8 * (i / 2) < tokens ? s[n][i] * scale : kLow;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float top = fmaxf(s[n][j], s[n][j + 2]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, step));
      top = fmaxf(top, acc.peak[n][j]);
      decay[n][j] = exp2_approx(acc.peak[n][j] - top);
      grown |= top > acc.peak[n][j];
      acc.peak[n][j] = top;
      s[n][j] = exp2_approx(s[n][j] - top);
      s[n][j + 2] = exp2_approx(s[n][j + 2] - top);
      acc.total[n][j] = acc.total[n][j] * decay[n][j] + s[n][j] + s[n][j + 2];
    }
    p[n][0] = transpose(pack_product(s[n][0], s[n][1]));
    p[n][1] = transpose(pack_product(s[n][2], s[n][3]));
  }
  if (__any_sync(kFullWarp, grown)) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) acc.output[n][c][j][i] *= decay[n][i % 2];
        }
      }
    }
  }
}

__device__ __forceinline__ void accumulate(const Tile& tile, const uint32_t (&p)[kTiles][2], Accumulator& acc) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    uint32_t w[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) to_words(tile.v[i][c], w[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t a0 = __byte_perm(w[0][j], w[1][j], 0x5410), a1 = __byte_perm(w[0][j], w[1][j], 0x7632);
      uint32_t a2 = __byte_perm(w[2][j], w[3][j], 0x5410), a3 = __byte_perm(w[2][j], w[3][j], 0x7632);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        mma_f16_k16<kBf16Math>(acc.output[n][c][j], a0, a1, a2, a3, p[n][0], p[n][1], acc.output[n][c][j]);
      }
    }
  }
}

// Tiles [begin, end) of the row's `tokens` tokens.
__device__ __forceinline__ void attend_tiles(const Params& params, const Queries& queries, const int* pages, int head,
                                             int tokens, int begin, int end, Accumulator& acc) {
  const unsigned char* keys = params.keys + head * params.k_head;
  const unsigned char* values = params.values + head * params.v_head;
  PageList list(pages, begin, end);
  auto slot_of = [](int tile) { return tile % (kPage / 16) * 16; };
  Tile tile;
  int64_t page = list.page(begin);
  tile.load_keys(keys + page * params.k_page + slot_of(begin) * params.k_slot, params.k_slot, tokens - 16 * begin);
  tile.load_values(values + page * params.v_page + slot_of(begin) * params.v_slot, params.v_slot, tokens - 16 * begin);
  for (int at = begin; at < end; ++at) {
    // Past the end nothing is loaded: no token is left of the share.
    int next = at + 1;
    int left = next < end ? tokens - 16 * next : 0;
    page = list.page(next);
    float s[kTiles][4];
    uint32_t p[kTiles][2];
    products(tile, queries, s);
    tile.load_keys(keys + page * params.k_page + slot_of(next) * params.k_slot, params.k_slot, left);
    weights(s, tokens - 16 * at, params.scale, acc, p);
    accumulate(tile, p, acc);
    tile.load_values(values + page * params.v_page + slot_of(next) * params.v_slot, params.v_slot, left);
  }
}

// ---- merging --------------------------------------------------------------------------------------

// The block's warps into shared.output[0] (relative to the block's maxima) and shared.sums.
__device__ __forceinline__ void merge_warps(Shared& shared, Accumulator& acc) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) acc.total[n][j] += __shfl_xor_sync(kFullWarp, acc.total[n][j], step);
      if (g == 0) shared.peak[warp][8 * n + 2 * t + j] = acc.peak[n][j];
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int head = 8 * n + 2 * t + j;
      float top = kLow;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared.peak[w][head]);
      float weight = exp2_approx(acc.peak[n][j] - top);
      if (g == 0) shared.total[warp][head] = acc.total[n][j] * weight;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          float2 both = make_float2(acc.output[n][c][pair][j] * weight, acc.output[n][c][pair][j + 2] * weight);
          *reinterpret_cast<float2*>(&shared.output[warp][head * kPitch + 64 * c + 8 * g + 2 * pair]) = both;
        }
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kHeads * kDim / 4; i += kThreads) {
    int at = i / (kDim / 4) * kPitch + i % (kDim / 4) * 4;
    float4 sum = *reinterpret_cast<float4*>(&shared.output[0][at]);
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      float4 v = *reinterpret_cast<float4*>(&shared.output[w][at]);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    *reinterpret_cast<float4*>(&shared.output[0][at]) = sum;
  }
  if (threadIdx.x < kHeads) {
    float top = kLow, total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      top = fmaxf(top, shared.peak[w][threadIdx.x]);
      total += shared.total[w][threadIdx.x];
    }
    shared.sums[threadIdx.x] = make_float2(top, total);
  }
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t peer_address(const void* pointer, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
  return address;
}

__device__ __forceinline__ float2 peer_float2(const float2* pointer, int rank) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(peer_address(pointer, rank)));
  return v;
}

__device__ __forceinline__ float4 peer_float4(const float* pointer, int rank) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(peer_address(pointer, rank)));
  return v;
}

// Running combination of parts that are each relative to their own maximum.
struct Merged {
  float peak = kLow, total = 0.f;
  float4 output = make_float4(0.f, 0.f, 0.f, 0.f);
  __device__ __forceinline__ void add(float2 sums, float4 v) {
    float top = fmaxf(peak, sums.x);
    float keep = exp2_approx(peak - top), weight = exp2_approx(sums.x - top);
    peak = top;
    total = total * keep + sums.y * weight;
    output.x = output.x * keep + v.x * weight;
    output.y = output.y * keep + v.y * weight;
    output.z = output.z * keep + v.z * weight;
    output.w = output.w * keep + v.w * weight;
  }
};

__device__ __forceinline__ void write_output(const Params& params, const Merged& merged, int64_t row_head, int member,
                                             int dim) {
  float inverse = merged.total > 0.f ? params.v_scale / merged.total : 0.f;
  int64_t head = row_head * params.group + member;
  float v[4] = {merged.output.x * inverse, merged.output.y * inverse, merged.output.z * inverse,
                merged.output.w * inverse};
  int64_t at = head * kDim + dim;
  if constexpr (Q_TYPE == kFp32) {
    *reinterpret_cast<float4*>(static_cast<float*>(params.output) + at) = make_float4(v[0], v[1], v[2], v[3]);
  } else if constexpr (Q_TYPE == kBf16) {
    __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(v[0], v[1]), __floats2bfloat162_rn(v[2], v[3])};
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(params.output) + at) = *reinterpret_cast<uint2*>(pairs);
  } else {
    __half2 pairs[2] = {__floats2half2_rn(v[0], v[1]), __floats2half2_rn(v[2], v[3])};
    *reinterpret_cast<uint2*>(static_cast<__half*>(params.output) + at) = *reinterpret_cast<uint2*>(pairs);
  }
  if (dim == 0) {
    params.lse[head] =
        merged.total > 0.f ? (merged.peak + log2_approx(merged.total)) * kLn2 : -__uint_as_float(0x7f800000u);
  }
}

// ---- the kernel -----------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) attend_kernel(Params params) {
  extern __shared__ __align__(16) unsigned char storage[];
  Shared& shared = *reinterpret_cast<Shared*>(storage);
  int64_t row_head = blockIdx.y;
  int row = blockIdx.y / params.kv_heads, head = blockIdx.y % params.kv_heads;
  int split = blockIdx.x, warp = threadIdx.x / 32;
  wait_for_previous_kernel();

  Queries queries;
  queries.load(params, row, head);
  int count = params.counts[row];
  int length = params.lengths[row];
  int tokens = count > 0 ? (count - 1) * kPage + (length - 1) % kPage + 1 : 0;
  int tiles = (tokens + 15) / 16;
  const int* pages = count > params.width ? params.page_table + row * params.table_row
                                          : params.pages + row_head * params.width;

  // Blocks in use: as many as give every warp enough tiles, whole clusters if it takes more than one.
  int enough = kWarps * params.tiles_a_warp;
  int splits = max(1, (tiles + enough - 1) / enough);
  if (splits > params.cluster) splits = (splits + params.cluster - 1) / params.cluster * params.cluster;
  splits = min(splits, params.splits);
  if (split >= splits) return;

  Accumulator acc;
  acc.clear();
  int64_t share = split * kWarps + warp, shares = splits * kWarps;
  int begin = static_cast<int>(share * tiles / shares), end = static_cast<int>((share + 1) * tiles / shares);
  if (begin < end) attend_tiles(params, queries, pages, head, tokens, begin, end, acc);
  let_next_kernel_start();
  merge_warps(shared, acc);

  // Every block of the cluster merges one slice of [group x kDim] over the blocks.
  int peers = min(splits, params.cluster), rank = split % params.cluster;
  if (peers > 1) cluster_barrier();
  else __syncthreads();
  int clusters = splits / peers, cluster = split / params.cluster;
  int items = params.group * (kDim / 4);
  int first = items * rank / peers, stop = items * (rank + 1) / peers;
  int64_t slots = params.splits / params.cluster;  // clusters that a row has room for
  int64_t slot = row_head * slots + cluster;
  for (int item = first + threadIdx.x; item < stop; item += kThreads) {
    int member = item / (kDim / 4), dim = item % (kDim / 4) * 4;
    Merged merged;
    for (int peer = 0; peer < peers; ++peer) {
      merged.add(peer_float2(&shared.sums[member], peer), peer_float4(&shared.output[0][member * kPitch + dim], peer));
    }
    if (clusters == 1) {
      write_output(params, merged, row_head, member, dim);
    } else {
      *reinterpret_cast<float4*>(params.partial_output + (slot * params.group + member) * kDim + dim) = merged.output;
      // The heads of a slice belong to it alone or hold equal values in its neighbour's entry.
      params.partial_sums[(slot * params.cluster + rank) * params.group + member] =
          make_float2(merged.peak, merged.total);
    }
  }
  if (clusters > 1) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      // Wraps to zero at the last arrival, ready for the next launch.
      unsigned before = atomicInc(&params.arrivals[row_head * params.cluster + rank], clusters - 1);
      shared.last = before == static_cast<unsigned>(clusters - 1);
    }
    __syncthreads();
    if (shared.last) {
      __threadfence();
      for (int item = first + threadIdx.x; item < stop; item += kThreads) {
        int member = item / (kDim / 4), dim = item % (kDim / 4) * 4;
        Merged merged;
#pragma unroll 4
        for (int other = 0; other < clusters; ++other) {
          int64_t from = row_head * slots + other;
          float2 sums = __ldcg(&params.partial_sums[(from * params.cluster + rank) * params.group + member]);
          float4 v = __ldcg(reinterpret_cast<const float4*>(params.partial_output +
                                                            (from * params.group + member) * kDim + dim));
          merged.add(sums, v);
        }
        write_output(params, merged, row_head, member, dim);
      }
    }
  }
  if (peers > 1) cluster_barrier();  // nobody leaves while a peer still reads its shared memory
}

// Addresses, strides (in elements) and sizes as integers: the caller (cuda_attend.py) has checked them.
void attend(int64_t queries, int64_t q_row, int64_t q_head, int64_t keys, int64_t k_page, int64_t k_slot,
            int64_t k_head, int64_t values, int64_t v_page, int64_t v_slot, int64_t v_head, int64_t pages,
            int64_t width, int64_t counts, int64_t page_table, int64_t table_row, int64_t lengths, int64_t wide_lengths,
            double sm_scale, double v_scale, int64_t output, int64_t lse, int64_t partial_output, int64_t partial_sums,
            int64_t arrivals, int64_t rows, int64_t kv_heads, int64_t group, int64_t splits, int64_t cluster,
            int64_t tiles_a_warp, int64_t stream) {
  Params params{address<const void>(queries),
                q_row,
                q_head,
                address<const unsigned char>(keys),
                address<const unsigned char>(values),
                k_page * kElementBytes,
                k_slot * kElementBytes,
                k_head * kElementBytes,
                v_page * kElementBytes,
                v_slot * kElementBytes,
                v_head * kElementBytes,
                address<const int>(pages),
                width,
                address<const int>(counts),
                address<const int>(page_table),
                table_row,
                Lengths{address<const void>(lengths), wide_lengths != 0},
                static_cast<float>(sm_scale) * kLog2e,
                static_cast<float>(v_scale),
                address<void>(output),
                address<float>(lse),
                address<float>(partial_output),
                address<float2>(partial_sums),
                address<unsigned>(arrivals),
                static_cast<int>(kv_heads),
                static_cast<int>(group),
                static_cast<int>(splits),
                static_cast<int>(cluster),
                static_cast<int>(tiles_a_warp)};
  static const cudaError_t raised =
      cudaFuncSetAttribute(attend_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  check_cuda(raised, "shared memory of attend");
  static const cudaError_t allowed =
      cudaFuncSetAttribute(attend_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  check_cuda(allowed, "clusters of attend");
  dim3 grid(static_cast<unsigned>(splits), static_cast<unsigned>(rows * kv_heads));
  launch(attend_kernel, grid, kThreads, sizeof(Shared), stream,
         static_cast<int>(cluster), params);
}

// Blocks of the kernel that one multiprocessor holds at a time.
int64_t blocks_a_multiprocessor() {
  int blocks = 0;
  cudaFuncSetAttribute(attend_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, attend_kernel, kThreads, sizeof(Shared)),
             "occupancy of attend");
  return blocks;
}

}  // namespace locks

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend, locks::attend);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(blocks_a_multiprocessor, locks::blocks_a_multiprocessor);
