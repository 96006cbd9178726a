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
// variant: HEAD_DIM=256 PAGE=64 KV_TYPE=1 Q_TYPE=1 HEAD_TILES=2
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
#ifndef BLOCKS  // that a multiprocessor should hold at a time, which limits the registers
#define BLOCKS (HEAD_DIM * HEAD_TILES <= 128 ? 12 / WARPS : HEAD_DIM * HEAD_TILES <= 256 ? 8 / WARPS : 1)
#endif
constexpr int kBlocks = BLOCKS;
static_assert(Q_TYPE == kBf16 || Q_TYPE == kFp16, "queries");

constexpr int kRows = kDim / 32;    // vectors of 8 dimensions a lane has of one K row
constexpr int kChunks = kDim / 64;  // and of one V row
constexpr int kHeads = 8 * kTiles;
constexpr int kPitch = kDim + 4;  // floats; keeps the lanes' heads in different banks
constexpr float kLow = -1e30f;    // stands for -inf where differences are taken

using Kv = KeyType<KV_TYPE>;

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

constexpr int kMostPeers = 16;
constexpr int kMostItems = kHeads * kDim / 4;  // of four floats of the output each

struct Shared {
  alignas(16) float output[kWarps][kHeads * kPitch];
  float peak[kWarps][kHeads];
  float total[kWarps][kHeads];
  // What the blocks of the cluster send: this block's slice of their outputs, all their sums.
  alignas(16) float4 inbox[kMostItems + kMostPeers];
  float2 inbox_sums[kMostPeers][kHeads];
  int last;
};

// ---- operands ---------------------------------------------------------------------------------

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
#pragma unroll
        for (int i = 0; i < 4; ++i) words[n][c][i] = 0;
        if (member < params.group) {
          const auto* from = static_cast<const unsigned char*>(params.queries) + 2 * (at + 32 * c);
          KeyType<Q_TYPE>::words(KeyType<Q_TYPE>::load(from), words[n][c]);
        }
        if constexpr (KeyType<Q_TYPE>::kBf16Math != Kv::kBf16Math) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float2 pair = KeyType<Q_TYPE>::pair(words[n][c][i]);
            words[n][c][i] = Kv::pack(pair.x, pair.y);
          }
        }
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

// Tokens past the end are loaded as zero: what lies in the pool there may be NaN.
struct Tile {
  TokenRows<KV_TYPE, kDim> keys;
  TokenColumns<KV_TYPE, kDim> values;
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
    Kv::words(tile.keys.v[0][c], top);
    Kv::words(tile.keys.v[1][c], bottom);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint32_t(&q)[4] = queries.words[n][c];
      Kv::mma(s[n], top[0], bottom[0], top[1], bottom[1], q[0], q[1]);
      Kv::mma(s[n], top[2], bottom[2], top[3], bottom[3], q[2], q[3]);
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
    p[n][0] = transpose(Kv::pack(s[n][0], s[n][1]));
    p[n][1] = transpose(Kv::pack(s[n][2], s[n][3]));
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
    tile.values.words(c, w);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t a[4];
      tile.values.operand(w, j, a);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) Kv::mma(acc.output[n][c][j], a[0], a[1], a[2], a[3], p[n][0], p[n][1]);
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
  tile.keys.load(keys + page * params.k_page + slot_of(begin) * params.k_slot, params.k_slot, tokens - 16 * begin);
  tile.values.load(values + page * params.v_page + slot_of(begin) * params.v_slot, params.v_slot, tokens - 16 * begin);
  for (int at = begin; at < end; ++at) {
    // Past the end nothing is loaded: no token is left of the share.
    int next = at + 1;
    int left = next < end ? tokens - 16 * next : 0;
    page = list.page(next);
    float s[kTiles][4];
    uint32_t p[kTiles][2];
    products(tile, queries, s);
    tile.keys.load(keys + page * params.k_page + slot_of(next) * params.k_slot, params.k_slot, left);
    weights(s, tokens - 16 * at, params.scale, acc, p);
    accumulate(tile, p, acc);
    tile.values.load(values + page * params.v_page + slot_of(next) * params.v_slot, params.v_slot, left);
  }
}

// ---- merging --------------------------------------------------------------------------------------

// The warps' outputs, relative to the block's maxima, to shared memory.
__device__ __forceinline__ void stage_warps(Shared& shared, Accumulator& acc) {
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
}

// ---- clusters -------------------------------------------------------------------------------------

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ uint32_t peer_address(const void* pointer, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
  return address;
}

__device__ __forceinline__ void send(float4* target, int rank, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(peer_address(target, rank)), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
}

__device__ __forceinline__ void send(float2* target, int rank, float2 v) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(peer_address(target, rank)), "f"(v.x), "f"(v.y)
               : "memory");
}

// How the items (fours) of [group x kDim] are dealt to the blocks of a cluster.
struct Slices {
  int items, peers, stride;
  __device__ __forceinline__ Slices(int items, int peers)
      : items(items), peers(peers), stride((items + peers - 1) / peers) {}
  __device__ __forceinline__ int begin(int rank) const { return min(items, stride * rank); }
  __device__ __forceinline__ int owner(int item) const { return item / stride; }
};

// Sums the block's warps and sends every peer its slice.
__device__ __forceinline__ void send_slices(Shared& shared, const Slices& slices, int rank, int group) {
  for (int item = threadIdx.x; item < slices.items; item += kThreads) {
    int at = item / (kDim / 4) * kPitch + item % (kDim / 4) * 4;
    float4 sum = *reinterpret_cast<float4*>(&shared.output[0][at]);
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      float4 v = *reinterpret_cast<float4*>(&shared.output[w][at]);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    int owner = slices.owner(item);
    send(&shared.inbox[rank * slices.stride + item - slices.begin(owner)], owner, sum);
  }
  for (int i = threadIdx.x; i < slices.peers * group; i += kThreads) {
    int head = i % group;
    float top = kLow, total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      top = fmaxf(top, shared.peak[w][head]);
      total += shared.total[w][head];
    }
    send(&shared.inbox_sums[rank][head], i / group, make_float2(top, total));
  }
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

// All parts in order, the loads of kBatch of them in flight together.
template <int kBatch, typename Load>
__device__ __forceinline__ Merged merge_parts(int parts, const Load& load) {
  Merged merged;
  for (int first = 0; first < parts; first += kBatch) {
    float2 sums[kBatch];
    float4 v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) load(min(first + i, parts - 1), sums[i], v[i]);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < parts) merged.add(sums[i], v[i]);
    }
  }
  return merged;
}

__device__ __forceinline__ void write_output(const Params& params, const Merged& merged, int64_t row_head, int member,
                                             int dim) {
  float inverse = merged.total > 0.f ? params.v_scale / merged.total : 0.f;
  int64_t head = row_head * params.group + member;
  float v[4] = {merged.output.x * inverse, merged.output.y * inverse, merged.output.z * inverse,
                merged.output.w * inverse};
  int64_t at = head * kDim + dim;
  if constexpr (Q_TYPE == kBf16) {
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

__global__ void __launch_bounds__(kThreads, kBlocks) attend_kernel(Params params) {
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
  int peers = min(splits, params.cluster), rank = split % params.cluster;
  if (peers > 1) cluster_arrive();

  Accumulator acc;
  acc.clear();
  int64_t share = split * kWarps + warp, shares = splits * kWarps;
  int begin = static_cast<int>(share * tiles / shares), end = static_cast<int>((share + 1) * tiles / shares);
  if (begin < end) attend_tiles(params, queries, pages, head, tokens, begin, end, acc);
  let_next_kernel_start();
  stage_warps(shared, acc);

  // Every block of the cluster merges one slice of [group x kDim] over the blocks.
  Slices slices(params.group * (kDim / 4), peers);
  if (peers > 1) cluster_wait();  // all peers have started, so their shared memory is there
  send_slices(shared, slices, rank, params.group);
  if (peers > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  int clusters = splits / peers, cluster = split / params.cluster;
  int first = slices.begin(rank), stop = slices.begin(rank + 1);
  int64_t slots = params.splits / params.cluster;  // clusters that a row has room for
  int64_t slot = row_head * slots + cluster;
  for (int item = first + threadIdx.x; item < stop; item += kThreads) {
    int member = item / (kDim / 4), dim = item % (kDim / 4) * 4;
    Merged merged = merge_parts<4>(peers, [&](int peer, float2& sums, float4& v) {
      sums = shared.inbox_sums[peer][member];
      v = shared.inbox[peer * slices.stride + item - first];
    });
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
        Merged merged = merge_parts<8>(clusters, [&](int other, float2& sums, float4& v) {
          int64_t from = row_head * slots + other;
          sums = __ldcg(&params.partial_sums[(from * params.cluster + rank) * params.group + member]);
          v = __ldcg(reinterpret_cast<const float4*>(params.partial_output +
                                                     (from * params.group + member) * kDim + dim));
        });
        write_output(params, merged, row_head, member, dim);
      }
    }
  }
}

void prepare() {
  check_cuda(cudaFuncSetAttribute(attend_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)),
             "shared memory of attend");
  check_cuda(cudaFuncSetAttribute(attend_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
             "clusters of attend");
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
                k_page * Kv::kBytes,
                k_slot * Kv::kBytes,
                k_head * Kv::kBytes,
                v_page * Kv::kBytes,
                v_slot * Kv::kBytes,
                v_head * Kv::kBytes,
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
  static const bool prepared = (prepare(), true);
  (void)prepared;
  dim3 grid(static_cast<unsigned>(splits), static_cast<unsigned>(rows * kv_heads));
  launch(attend_kernel, grid, kThreads, sizeof(Shared), stream,
         static_cast<int>(cluster), params);
}

// Clusters of that many blocks that the GPU holds at a time; 0 where it cannot.
int64_t clusters_at_a_time(int64_t cluster) {
  prepare();
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, attend_kernel, &config) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return clusters;
}

}  // namespace locks

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend, locks::attend);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(clusters_at_a_time, locks::clusters_at_a_time);
