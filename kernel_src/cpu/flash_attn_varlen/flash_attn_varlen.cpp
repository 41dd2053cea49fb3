#include "cpu/flash_attn_varlen/flash_attn_varlen.h"

#include <algorithm>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/work.h"

namespace packfree {
// The kernels of one tier and dtype.
struct AttentionKernels {
  void (*forward)(const AttentionForwardArgs&, const QueryItem&, void* scratch);
  void (*delta)(const AttentionBackwardArgs&, const KeyItem&, const RangeExchange&, void* scratch);
  void (*backward)(const AttentionBackwardArgs&, const KeyItem&, const RangeExchange&, void* scratch);
  void (*sink_gradient)(const AttentionBackwardArgs&, int64_t sequence, int64_t head, void* target);
};
}  // namespace packfree

#define PACKFREE_HIGHEST_TIER PACKFREE_UP_TO_MATRIX
#define PACKFREE_SOURCE "cpu/flash_attn_varlen/kernels-inl.h"
#include "cpu/simd/each_tier.h"

namespace packfree {
namespace {

// Floats are multiplied on the matrix unit in sequences of this many keys or more; with fewer, splitting the operands
// costs more than their products gain.
constexpr int64_t kMatrixKeys = 512;

// The kernels of a sequence: only its own length may decide.
AttentionKernels KernelsOf(Tier tier, const AttentionArgs& args, [[maybe_unused]] int64_t sequence) {
#if PACKFREE_X86
  const bool floats = args.dtype == Dtype::kFloat32;
  if (tier == Tier::kAmx && floats && args.keys.length(sequence) >= kMatrixKeys)
    return amx::TierKernels<float, float>();
#endif
  return PickKernels(tier, args.dtype);
}

// Keys that all queries of a sequence see together: what a work item costs, up to a factor.
int64_t VisiblePairs(const AttentionArgs& args, int64_t sequence, int64_t query_begin, int64_t query_end) {
  const int64_t query_length = args.queries.length(sequence), key_length = args.keys.length(sequence);
  if (args.visible_keys != nullptr) {
    int64_t pairs = 2 * kKeyBlock * (query_end - query_begin);
    for (int64_t i = query_begin; i < query_end; ++i) {
      const KeySpan span = ListedKeys(args, key_length, args.queries.bos(sequence) + i);
      pairs += 2 * (span.end - span.begin);
    }
    return pairs;
  }
  const KeySpan first = VisibleKeys(args, query_length, key_length, query_begin);
  const KeySpan last = VisibleKeys(args, query_length, key_length, query_end - 1);
  return (query_end - query_begin) * (first.end - first.begin + last.end - last.begin + 2 * kKeyBlock);
}

std::vector<QueryItem> QueryItems(const AttentionArgs& args) {
  struct Sized {
    QueryItem item;
    int64_t cost;
  };
  std::vector<Sized> sized;
  const int64_t step = TilesPerItem(args), group = args.H / args.HK;
  for (int64_t n = 0; n < args.queries.num_sequences; ++n) {
    const int64_t tiles = TileCount(args, n);
    for (int64_t begin = 0; begin < tiles; begin += step) {
      const int64_t end = std::min(begin + step, tiles);
      const int64_t query_end = std::min(CeilDiv(end * kTileColumns, group), args.queries.length(n));
      const int64_t cost = VisiblePairs(args, n, begin * kTileColumns / group, query_end);
      for (int64_t head = 0; head < args.HK; ++head) sized.push_back({{n, head, begin, end}, cost});
    }
  }
  std::stable_sort(sized.begin(), sized.end(), [](const Sized& a, const Sized& b) { return a.cost > b.cost; });
  std::vector<QueryItem> items;
  items.reserve(sized.size());
  for (const Sized& one : sized) items.push_back(one.item);
  return items;
}

// The tiles of the sequences with several ranges, as DeltaItem takes them.
std::vector<KeyItem> DeltaItems(const AttentionArgs& args, const std::vector<KeyItem>& items) {
  std::vector<KeyItem> tiles;
  for (const KeyItem& item : items) {
    if (item.range > 0 || item.first_state < 0) continue;
    const int64_t count = TileCount(args, item.sequence);
    for (int64_t t = 0; t < count; ++t) tiles.push_back({item.sequence, item.kv_head, t, item.first_state});
  }
  return tiles;
}

// Longest sequences first; inside one, ranges in rising order with the heads side by side, so that an item rarely waits
// for the range before its own and never for one that has not been handed out.
std::vector<KeyItem> KeyItems(const AttentionArgs& args, int64_t* states) {
  std::vector<int64_t> order;
  for (int64_t n = 0; n < args.keys.num_sequences; ++n) {
    if (args.queries.length(n) > 0 || args.keys.length(n) > 0) order.push_back(n);
  }
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return args.queries.length(a) * args.keys.length(a) > args.queries.length(b) * args.keys.length(b);
  });
  std::vector<KeyItem> items;
  *states = 0;
  for (const int64_t n : order) {
    const int64_t ranges = std::max<int64_t>(1, CeilDiv(args.keys.length(n), KeyRange(args)));
    const int64_t tiles = TileCount(args, n);
    for (int64_t range = 0; range < ranges; ++range) {
      for (int64_t head = 0; head < args.HK; ++head) {
        items.push_back({n, head, range, ranges > 1 ? *states + head * tiles : -1});
      }
    }
    if (ranges > 1) *states += args.HK * tiles;
  }
  return items;
}

// ds_aux: one partial per (sequence, head), then their sum in order of the sequences.
template <class Acc>
void SinkGradient(Tier tier, const AttentionBackwardArgs& args) {
  std::vector<int64_t> sequences;
  for (int64_t n = 0; n < args.queries.num_sequences; ++n) {
    if (args.queries.length(n) > 0) sequences.push_back(n);
  }
  const int64_t count = static_cast<int64_t>(sequences.size());
  std::vector<Acc> partial(static_cast<size_t>(count * args.H));
  ParallelForEach(count * args.H, [&](int64_t i) {
    const int64_t n = sequences[static_cast<size_t>(i / args.H)];
    KernelsOf(tier, args, n).sink_gradient(args, n, i % args.H, &partial[static_cast<size_t>(i)]);
  });
  SumParts(partial.data(), count, args.H, 1, args.H, static_cast<Acc*>(args.ds_aux));
}

}  // namespace

void FlashAttnVarlenForwardCpu(Tier tier, const AttentionForwardArgs& args) {
  ClearPadding(args.queries, args.out, args.H * args.V * ElementBytes(args.dtype));
  if (args.lse != nullptr) ClearPaddingOfHeads(args.queries, args.H, args.lse, AccBytes(args.dtype));
  const std::vector<QueryItem> items = QueryItems(args);
  ScratchPool pool(ScratchBytes<AttentionForwardTiles>(args.dtype, args));
  ParallelForEach(static_cast<int64_t>(items.size()), [&](int64_t i) {
    const ScratchPool::Lease scratch(&pool);
    KernelsOf(tier, args, items[i].sequence).forward(args, items[i], scratch.get());
  });
}

void FlashAttnVarlenBackwardCpu(Tier tier, const AttentionBackwardArgs& args) {
  const int64_t bytes = ElementBytes(args.dtype), acc_bytes = AccBytes(args.dtype);
  ClearPadding(args.queries, args.dq, args.H * args.K * bytes);
  ClearPadding(args.keys, args.dk, args.HK * args.K * bytes);
  ClearPadding(args.keys, args.dv, args.HK * args.V * bytes);
  int64_t states = 0;
  const std::vector<KeyItem> items = KeyItems(args, &states);
  const std::vector<KeyItem> tiles = DeltaItems(args, items);
  const Buffer partial(states * args.K * kTileColumns * acc_bytes), delta(states * kTileColumns * acc_bytes);
  std::vector<int32_t> arrived(static_cast<size_t>(states), 0);
  const RangeExchange exchange{arrived.data(), partial.get(), delta.get()};
  ScratchPool pool(ScratchBytes<AttentionBackwardTiles>(args.dtype, args));
  ParallelForEach(static_cast<int64_t>(tiles.size()), [&](int64_t i) {
    const ScratchPool::Lease scratch(&pool);
    KernelsOf(tier, args, tiles[i].sequence).delta(args, tiles[i], exchange, scratch.get());
  });
  ParallelForEach(static_cast<int64_t>(items.size()), [&](int64_t i) {
    const ScratchPool::Lease scratch(&pool);
    KernelsOf(tier, args, items[i].sequence).backward(args, items[i], exchange, scratch.get());
  });
  if (args.ds_aux == nullptr) return;
  if (args.dtype == Dtype::kFloat64) {
    SinkGradient<double>(tier, args);
  } else {
    SinkGradient<float>(tier, args);
  }
}

}  // namespace packfree
