// Softmax attention over packed sequences on the CPU: arguments and entry points.
// Letters: H query heads, HK key/value heads (H a multiple of HK, group = H / HK), K key dim, V value dim.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/packing.h"
#include "cpu/scratch.h"
#include "cpu/simd/tier.h"

namespace packfree {

// A window this wide hides nothing: boundaries are int32. Wider ones would make the sums below leave 64 bits.
constexpr int64_t kWidestWindow = int64_t{1} << 31;

// A tensor [tokens, heads, dim] whose last axis is contiguous. Strides in elements.
struct HeadRows {
  const void* data;
  int64_t token_stride;
  int64_t head_stride;
};

struct AttentionArgs {
  Dtype dtype;          // of q, k, v, out, dout, dq, dk, dv
  PackingView queries;  // Tq tokens
  PackingView keys;     // Tk tokens, as many sequences as `queries`
  int64_t H, HK, K, V;
  HeadRows q;                   // [Tq, H, K]
  HeadRows k;                   // [Tk, HK, K]
  HeadRows v;                   // [Tk, HK, V]
  const void* s_aux;            // [H] accumulation type, null: no sinks
  double softmax_scale;         // > 0 or not: any finite number
  double softcap;               // 0: off
  int64_t window_left;          // keys before the aligned one that a query sees, at most kWidestWindow; -1: all
  int64_t window_right;         // keys after it, the same. Causal is 0.
  const int32_t* visible_keys;  // [Tq, 2] first and last key that each query sees, counted from its sequence's first
                                // key and clamped to the sequence; the windows are then unbounded. null: they decide
  double dropout_p;             // in [0, 1)
  uint64_t dropout_seed;        // only read if dropout_p > 0
};

struct AttentionForwardArgs : AttentionArgs {
  void* out;  // [Tq, H, V] contiguous
  void* lse;  // [H, Tq] accumulation type: log of the softmax's denominator; null: not wanted
};

struct AttentionBackwardArgs : AttentionArgs {
  HeadRows dout;     // [Tq, H, V]
  HeadRows out;      // [Tq, H, V]
  const void* lse;   // [H, Tq] accumulation type, from the forward
  const void* dlse;  // [H, Tq] accumulation type, null: zero
  void* dq;          // [Tq, H, K] contiguous
  void* dk;          // [Tk, HK, K] contiguous
  void* dv;          // [Tk, HK, V] contiguous
  void* ds_aux;      // [H] accumulation type, null: not wanted
};

// Tokens after the last boundary get 0.
void FlashAttnVarlenForwardCpu(Tier tier, const AttentionForwardArgs& args);
void FlashAttnVarlenBackwardCpu(Tier tier, const AttentionBackwardArgs& args);

// ---- how the work is cut ---------------------------------------------------------------------------------------

// The query rows that share a key/value head, token after token and head after head inside a token, are cut into tiles
// of kTileColumns; row m is query token m / group of head kv_head * group + m % group. With several heads in a group a
// tile spans few tokens, so little of it lies above a causal diagonal, and short sequences still fill it.
constexpr int64_t kTileColumns = 64;
// Keys are visited in blocks that start at multiples of this number from their sequence's first key.
constexpr int64_t kKeyBlock = 128;
// The backward owns dk and dv by ranges of this many keys (less for wide heads, so that a range stays in the L2 cache).
// Only sequences with more keys need more than one range, and with it the exchange of dq partials.
constexpr int64_t kKeyRange = 512;

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
// A head dim rounded up to whole registers of the widest tier.
inline int64_t PaddedDim(int64_t dim) { return CeilDiv(dim, 16) * 16; }

// Half-open range of keys, counted from the sequence's first key.
struct KeySpan {
  int64_t begin;
  int64_t end;
};

// The keys that query `i` of a sequence sees by the windows. The last query is aligned with the last key. Both ends
// never fall as i rises.
inline KeySpan VisibleKeys(const AttentionArgs& args, int64_t query_length, int64_t key_length, int64_t i) {
  const int64_t aligned = i + key_length - query_length;
  int64_t begin = args.window_left < 0 ? 0 : aligned - args.window_left;
  int64_t end = args.window_right < 0 ? key_length : aligned + args.window_right + 1;
  begin = begin < 0 ? 0 : begin > key_length ? key_length : begin;
  end = end < begin ? begin : end > key_length ? key_length : end;
  return {begin, end};
}

// The keys that the query at row `token` of visible_keys sees; {0, 0} for none.
inline KeySpan ListedKeys(const AttentionArgs& args, int64_t key_length, int64_t token) {
  const int64_t first = args.visible_keys[2 * token], last = args.visible_keys[2 * token + 1];
  const int64_t begin = first < 0 ? 0 : first, end = last < key_length ? last + 1 : key_length;
  return begin < end ? KeySpan{begin, end} : KeySpan{0, 0};
}

// Query tiles of one sequence and one key/value head.
inline int64_t TileCount(const AttentionArgs& args, int64_t sequence) {
  return CeilDiv(args.queries.length(sequence) * (args.H / args.HK), kTileColumns);
}

// A forward work item: query tiles [tile_begin, tile_end) of a sequence and key/value head. They are done together so
// that a block of keys is widened once for all of them; each tile's arithmetic is its own.
struct QueryItem {
  int64_t sequence;
  int64_t kv_head;
  int64_t tile_begin;
  int64_t tile_end;
};

// A backward work item: dk and dv of one key range, and that range's part of dq of every query tile that sees it.
struct KeyItem {
  int64_t sequence;
  int64_t kv_head;
  int64_t range;        // index of the key range
  int64_t first_state;  // index of the first tile's entry in the arrays below; -1: the sequence has a single range
};

// What the ranges of a sequence with several of them share, by tile. dq is summed range after range, in rising order:
// `arrived` counts the ranges that have added their part, `partial` holds the sum so far. A item waits for the ranges
// before its own, which were handed out earlier. `delta` is made before the ranges are; a sequence with one range makes
// its own.
struct RangeExchange {
  int32_t* arrived;  // [tiles of such sequences]
  void* partial;     // [tiles of such sequences, K, kTileColumns] accumulation type
  void* delta;       // [tiles of such sequences, kTileColumns] accumulation type
};

inline int64_t KeyRange(const AttentionArgs& args) {
  const int64_t dims = PaddedDim(args.K) + PaddedDim(args.V);
  return dims <= 256 ? kKeyRange : dims <= 512 ? kKeyRange / 2 : kKeyRange / 4;
}
// Query tiles of a forward work item, at most.
constexpr int64_t kMostTiles = 16;
inline int64_t TilesPerItem(const AttentionArgs& args) {
  const int64_t tiles = 4096 / (PaddedDim(args.K) + PaddedDim(args.V));
  return tiles < 2 ? 2 : tiles > kMostTiles ? kMostTiles : tiles;
}

// Scratch of a work item. Operands of products have room for every form (products-inl.h, products_matrix-inl.h):
// widened, with a leading dimension of PaddedDim, or as three bf16 parts, 6 bytes an element; the shapes are those of
// the first.
template <class Acc>
struct QueryTileMemory {
  Acc* qt;       // [K, kTileColumns]
  Acc* ot;       // [V, kTileColumns]
  Acc* max;      // [kTileColumns]
  Acc* sum;      // [kTileColumns]
  Acc* columns;  // [4, kTileColumns]: key bounds and dropout keys
};

template <class Acc>
struct AttentionForwardTiles {
  Acc* keys;                              // [kKeyBlock, key_dim]
  Acc* values;                            // [kKeyBlock, value_dim]
  Acc* scores;                            // [kKeyBlock, kTileColumns]
  Acc* rows;                              // [kTileColumns, max(key_dim, value_dim)]: a tile on its way in or out
  QueryTileMemory<Acc> tile[kMostTiles];  // of the item, TilesPerItem of them

  AttentionForwardTiles(const AttentionArgs& args, Pieces<Acc>& pieces) {
    const int64_t key_dim = CeilDiv(args.K, 32) * 32, value_dim = CeilDiv(args.V, 32) * 32;
    keys = pieces.Take(kKeyBlock * key_dim * 3 / 2);
    values = pieces.Take(kKeyBlock * value_dim * 3 / 2);
    scores = pieces.Take(kKeyBlock * kTileColumns * 3 / 2);
    rows = pieces.Take(kTileColumns * (key_dim > value_dim ? key_dim : value_dim) * 3 / 2);
    for (int64_t t = 0; t < TilesPerItem(args); ++t) {
      tile[t].qt = pieces.Take(kTileColumns * key_dim * 3 / 2);
      tile[t].ot = pieces.Take(kTileColumns * value_dim);
      tile[t].max = pieces.Take(kTileColumns);
      tile[t].sum = pieces.Take(kTileColumns);
      tile[t].columns = pieces.Take(4 * kTileColumns);
    }
  }
};

// What the products of a key range and a query tile read and write.
template <class Acc>
struct AttentionBackwardTiles {
  int64_t range_size;
  Acc* keys;       // [range, key_dim], in both orders
  Acc* values;     // [range, value_dim]
  Acc* dkeys;      // [range, key_dim]
  Acc* dvalues;    // [range, value_dim]
  Acc* scores;     // [kKeyBlock, kTileColumns], in three forms
  Acc* dscores;    // [kKeyBlock, kTileColumns], in three forms
  Acc* q_rows;     // [kTileColumns, key_dim]
  Acc* dout_rows;  // [kTileColumns, value_dim]
  Acc* copy;       // [kTileColumns, max(key_dim, value_dim)]
  Acc* qt;         // [K, kTileColumns]
  Acc* doutt;      // [V, kTileColumns]
  Acc* dqt;        // [K, kTileColumns]
  Acc* lse;        // [kTileColumns]
  Acc* delta;      // [kTileColumns]
  Acc* columns;    // [4, kTileColumns]: key bounds and dropout keys

  AttentionBackwardTiles(const AttentionArgs& args, Pieces<Acc>& pieces) : range_size(KeyRange(args)) {
    const int64_t key_dim = CeilDiv(args.K, 64) * 64, value_dim = CeilDiv(args.V, 64) * 64;
    keys = pieces.Take(range_size * key_dim * 3);
    values = pieces.Take(range_size * value_dim * 3 / 2);
    dkeys = pieces.Take(range_size * key_dim);
    dvalues = pieces.Take(range_size * value_dim);
    scores = pieces.Take(kKeyBlock * kTileColumns * 2);
    dscores = pieces.Take(kKeyBlock * kTileColumns * 2);
    q_rows = pieces.Take(kTileColumns * key_dim * 3 / 2);
    dout_rows = pieces.Take(kTileColumns * value_dim * 3 / 2);
    copy = pieces.Take(kTileColumns * (key_dim > value_dim ? key_dim : value_dim) * 3 / 2);
    qt = pieces.Take(kTileColumns * key_dim * 3 / 2);
    doutt = pieces.Take(kTileColumns * value_dim * 3 / 2);
    dqt = pieces.Take(kTileColumns * key_dim);
    lse = pieces.Take(kTileColumns);
    delta = pieces.Take(kTileColumns);
    columns = pieces.Take(4 * kTileColumns);
  }
};

}  // namespace packfree
