// One warp's share of attend: scores, online softmax and weighted values of tiles of 16 tokens.
#pragma once

#include "keys.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#define PAGE 16
#define KV_TYPE 0
#define Q_TYPE 0
#define HEAD_TILES 1
#endif
#ifndef HOT  // whether negative entries of the lists are tiles of a second pool
#define HOT 0
#endif
#ifndef WARPS  // of a block; where two blocks of eight fit a multiprocessor, a short list gets a warp a tile
#define WARPS (HEAD_DIM * HEAD_TILES <= 128 ? 8 : 4)
#endif

namespace locks {

constexpr int kDim = HEAD_DIM;
constexpr int kPage = PAGE;
constexpr int kTiles = HEAD_TILES;  // of 8 query heads: the group is padded to 8 or 16
constexpr int kWarps = WARPS;
constexpr int kThreads = 32 * kWarps;
#ifndef BLOCKS  // that a multiprocessor should hold at a time, which limits the registers
#define BLOCKS (HEAD_DIM * HEAD_TILES <= 128 ? 16 / WARPS : HEAD_DIM * HEAD_TILES <= 256 ? 8 / WARPS : 1)
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
  int64_t k_head, v_head;               // bytes
  int k_page, k_slot, v_page, v_slot;   // bytes
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
  // Not null: the kernels before this one are score and select, which started when the queries, the
  // pool and the tables were complete; rows that fit their budget need nothing of these two.
  const int* budgets;
#if HOT
  const unsigned char *hot_keys, *hot_values;  // [tiles, kPage, kDim]
#endif
};

// ---- operands ---------------------------------------------------------------------------------

// The 8x8 matrix of 16-bit elements held by the warp, transposed.
__device__ __forceinline__ uint32_t transpose(uint32_t v) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
  return out;
}

// The queries of a KV head as operands, for all warps: they would take a quarter of a thread's registers.
struct Queries {
  uint4 words[kTiles][kRows][32];

  // B of vector c of tile n: head g, dimensions 32 c + 8 t + {0..7}.  Volatile, lest it be kept in registers.
  __device__ __forceinline__ void operand(int n, int c, uint32_t (&q)[4]) const {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(q[0]), "=r"(q[1]), "=r"(q[2]), "=r"(q[3])
                 : "r"(shared_address(&words[n][c][threadIdx.x % 32])));
  }
};

// The vectors of the queries that a warp brings to shared memory.
struct QueryPart {
  static constexpr int kVectors = kTiles * kRows, kEach = (kVectors + kWarps - 1) / kWarps;
  using Type = KeyType<Q_TYPE>;
  typename Type::Vector v[kEach];

  __device__ __forceinline__ QueryPart(const Params& params, int row, int head) {
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      int vector = warp + i * kWarps, member = vector / kRows * 8 + g;
      int64_t at = row * params.q_row + (head * params.group + member) * params.q_head + vector % kRows * 32 + 8 * t;
      v[i] = vector < kVectors && member < params.group
                 ? Type::load(static_cast<const unsigned char*>(params.queries) + 2 * at)
                 : typename Type::Vector{};
    }
  }

  __device__ __forceinline__ void store(Queries& queries) const {
    int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      uint32_t w[4];
      Type::words(v[i], w);
      if constexpr (Type::kBf16Math != Kv::kBf16Math) {
#pragma unroll
        for (uint32_t& word : w) {
          float2 pair = Type::pair(word);
          word = Kv::pack(pair.x, pair.y);
        }
      }
      int vector = warp + i * kWarps;
      if (vector < kVectors) {
        queries.words[vector / kRows][vector % kRows][threadIdx.x % 32] = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
};

// ---- one warp's share -----------------------------------------------------------------------------

// The tiles [begin, end) that a warp of block `split` takes of a list of `count` pages.
struct Share {
  int tokens, splits, begin, end;

  __device__ __forceinline__ Share(const Params& params, int count, int length, int split) {
    tokens = count > 0 ? (count - 1) * kPage + (length - 1) % kPage + 1 : 0;
    unsigned tiles = (tokens + 15) / 16;
    // Blocks in use: as many as give every warp enough tiles.  Merging several clusters takes as long as
    // about two tiles: it has to save that, and they are whole clusters.
    unsigned enough = kWarps * params.tiles_a_warp, cluster = params.cluster;
    unsigned used = max(1u, (tiles + enough - 1) / enough);
    if (used > cluster) {
      used = tiles <= 4 * kWarps * cluster ? cluster : (tiles + 2 * kWarps - 1) / (2 * kWarps);
      used = (used + cluster - 1) / cluster * cluster;
    }
    splits = min(used, static_cast<unsigned>(params.splits));
    // At most 2^12 warps share at most 2^18 tiles.
    unsigned warp = split * kWarps + threadIdx.x / 32, warps = splits * kWarps;
    begin = split < splits ? warp * tiles / warps : 0;
    end = split < splits ? (warp + 1) * tiles / warps : 0;
  }
};

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
  __device__ __forceinline__ int page(int at) {
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
      uint32_t q[4];
      queries.operand(n, c, q);
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

// Where the token `slot` of a page lies, and the bytes from token to token.
struct Place {
  const unsigned char* at;
  int slot_bytes;
};

__device__ __forceinline__ Place find(const unsigned char* pool, int page_bytes, int slot_bytes,
                                      [[maybe_unused]] const unsigned char* hot, int page, int slot) {
#if HOT
  constexpr int kTokenBytes = kDim * Kv::kBytes;
  if (page < 0) return {hot + (-1 - page) * int64_t{kPage * kTokenBytes} + slot * kTokenBytes, kTokenBytes};
#endif
  const unsigned char* at = pool + page * int64_t{page_bytes} + slot * slot_bytes;
  // Otherwise the tokens' offsets are added to `pool` ahead of the loop over tiles, into registers of their own.
  asm("" : "+l"(at));
  return {at, slot_bytes};
}

// Asks for a tile of keys or values to be brought to L2.
__device__ __forceinline__ void prefetch_tile(Place place, int tokens) {
  constexpr int kBytes = kDim * Kv::kBytes, kLines = (kBytes + 127) / 128;
#pragma unroll
  for (int i = 0; i < 16 * kLines; i += 32) {
    int token = (i + threadIdx.x % 32) / kLines, line = (i + threadIdx.x % 32) % kLines;
    if (token < tokens) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(place.at + token * place.slot_bytes + 128 * line));
    }
  }
}

// The tiles of a share.  `requested()` is called, by every warp, when its first loads are on their way.
template <typename Requested>
__device__ __forceinline__ void attend_tiles(const Params& params, const Queries& queries, PageList& list, int head,
                                             const Share& share, Accumulator& acc, const Requested& requested) {
  const int tokens = share.tokens, begin = share.begin, end = share.end;
  const unsigned char* keys = params.keys + head * params.k_head;
  const unsigned char* values = params.values + head * params.v_head;
  const unsigned char *hot_keys = nullptr, *hot_values = nullptr;
#if HOT
  hot_keys = params.hot_keys, hot_values = params.hot_values;
#else
  // The lane's own part of slot 0 of page 0.
  const unsigned char* own_keys = keys + decltype(Tile::keys)::own(params.k_slot);
  const unsigned char* own_values = values + decltype(Tile::values)::own(params.v_slot);
#endif
  auto slot_of = [](int tile) { return tile % (kPage / 16) * 16; };
  Tile tile;
  auto load_keys = [&](int page, int at, int left) {
#if HOT
    Place place = find(keys, params.k_page, params.k_slot, hot_keys, page, slot_of(at));
    tile.keys.load(place.at, place.slot_bytes, left);
#else
    Place place = find(own_keys, params.k_page, params.k_slot, nullptr, page, slot_of(at));
    tile.keys.load_own(place.at, place.slot_bytes, left);
#endif
  };
  auto load_values = [&](int page, int at, int left) {
#if HOT
    Place place = find(values, params.v_page, params.v_slot, hot_values, page, slot_of(at));
    tile.values.load(place.at, place.slot_bytes, left);
#else
    Place place = find(own_values, params.v_page, params.v_slot, nullptr, page, slot_of(at));
    tile.values.load_own(place.at, place.slot_bytes, left);
#endif
  };
  int page = list.page(begin);
  int left = begin < end ? tokens - 16 * begin : 0;
  load_keys(page, begin, left);
  load_values(page, begin, left);
#if !HOT
  // The second tile is asked for when the first one has come.  Short lists have no more than the two,
  // which otherwise wait for memory one after the other.
  if (begin + 1 < end) {
    page = list.page(begin + 1);
    left = min(tokens - 16 * (begin + 1), 16);
    prefetch_tile(find(keys, params.k_page, params.k_slot, hot_keys, page, slot_of(begin + 1)), left);
    prefetch_tile(find(values, params.v_page, params.v_slot, hot_values, page, slot_of(begin + 1)), left);
  }
#endif
  requested();
  for (int at = begin; at < end; ++at) {
    // Past the end nothing is loaded: no token is left of the share.
    int next = at + 1;
    left = next < end ? tokens - 16 * next : 0;
    page = list.page(next);
    float s[kTiles][4];
    uint32_t p[kTiles][2];
    products(tile, queries, s);
    load_keys(page, next, left);
    weights(s, tokens - 16 * at, params.scale, acc, p);
    accumulate(tile, p, acc);
    load_values(page, next, left);
  }
}

}  // namespace locks
