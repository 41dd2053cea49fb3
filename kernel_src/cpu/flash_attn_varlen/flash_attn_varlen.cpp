#include "cpu/flash_attn_varlen/flash_attn_varlen.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "cpu/parallel.h"

#include "cpu/simd/begin_scalar.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/flash_attn_varlen/columns-inl.h"
#include "cpu/flash_attn_varlen/products-inl.h"
#include "cpu/flash_attn_varlen/fwd-inl.h"
#include "cpu/flash_attn_varlen/bwd-inl.h"
#include "cpu/simd/end_tier.h"

#if PACKFREE_X86
#include "cpu/simd/begin_avx2.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/flash_attn_varlen/columns-inl.h"
#include "cpu/flash_attn_varlen/products-inl.h"
#include "cpu/flash_attn_varlen/fwd-inl.h"
#include "cpu/flash_attn_varlen/bwd-inl.h"
#include "cpu/simd/end_tier.h"

#include "cpu/simd/begin_avx512.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/flash_attn_varlen/columns-inl.h"
#include "cpu/flash_attn_varlen/products-inl.h"
#include "cpu/flash_attn_varlen/fwd-inl.h"
#include "cpu/flash_attn_varlen/bwd-inl.h"
#include "cpu/simd/end_tier.h"

#include "cpu/simd/begin_avx512_bf16.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/flash_attn_varlen/columns-inl.h"
#include "cpu/flash_attn_varlen/products-inl.h"
#include "cpu/flash_attn_varlen/fwd-inl.h"
#include "cpu/flash_attn_varlen/bwd-inl.h"
#include "cpu/simd/end_tier.h"

#include "cpu/simd/begin_amx.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/simd/matrix-inl.h"
#include "cpu/flash_attn_varlen/columns-inl.h"
#include "cpu/flash_attn_varlen/products_matrix-inl.h"
#include "cpu/flash_attn_varlen/fwd-inl.h"
#include "cpu/flash_attn_varlen/bwd-inl.h"
#include "cpu/simd/end_tier.h"
#endif

#if PACKFREE_ARM
#include "cpu/simd/begin_neon.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/flash_attn_varlen/columns-inl.h"
#include "cpu/flash_attn_varlen/products-inl.h"
#include "cpu/flash_attn_varlen/fwd-inl.h"
#include "cpu/flash_attn_varlen/bwd-inl.h"
#include "cpu/simd/end_tier.h"

#include "cpu/simd/begin_neon_bf16.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/flash_attn_varlen/columns-inl.h"
#include "cpu/flash_attn_varlen/products-inl.h"
#include "cpu/flash_attn_varlen/fwd-inl.h"
#include "cpu/flash_attn_varlen/bwd-inl.h"
#include "cpu/simd/end_tier.h"
#endif

namespace packfree {

namespace {

struct Kernels {
  void (*forward)(const AttentionForwardArgs&, const QueryUnit&, void* scratch);
  void (*delta)(const AttentionBackwardArgs&, const KeyUnit&, const RangeExchange&, void* scratch);
  void (*backward)(const AttentionBackwardArgs&, const KeyUnit&, const RangeExchange&, void* scratch);
  void (*sink_gradient)(const AttentionBackwardArgs&, int64_t sequence, int64_t head, void* target);
};

#define PACKFREE_KERNELS(tier, Elem, Acc)                                                    \
  Kernels {                                                                                  \
    tier::ForwardUnit<Elem, Acc>, tier::DeltaUnit<Elem, Acc>, tier::BackwardUnit<Elem, Acc>, \
        tier::SinkGradientUnit<Elem, Acc>                                                    \
  }

// Floats are multiplied on the matrix unit in sequences of this many keys or more; with fewer, splitting the operands
// costs more than their products gain.
constexpr int64_t kMatrixKeys = 512;

// The kernels of a sequence with `keys` keys: only its own length may decide. double runs in the scalar tier whatever
// the tier; the tiers avx512_bf16, amx and neon_bf16 have kernels of their own for the dtypes that gain by them.
Kernels SelectKernels(Tier tier, Dtype dtype, int64_t keys) {
  if (dtype == Dtype::kFloat64) return PACKFREE_KERNELS(scalar, double, double);
#if PACKFREE_X86
  if (tier == Tier::kAmx && dtype == Dtype::kFloat32 && keys >= kMatrixKeys) return PACKFREE_KERNELS(amx, float, float);
  if (tier == Tier::kAmx && dtype == Dtype::kBFloat16) return PACKFREE_KERNELS(amx, bf16, float);
  if (tier == Tier::kAvx512Bf16 && dtype == Dtype::kBFloat16) return PACKFREE_KERNELS(avx512_bf16, bf16, float);
  if (tier >= Tier::kAvx512) {
    return dtype == Dtype::kFloat32    ? PACKFREE_KERNELS(avx512, float, float)
           : dtype == Dtype::kBFloat16 ? PACKFREE_KERNELS(avx512, bf16, float)
                                       : PACKFREE_KERNELS(avx512, fp16, float);
  }
  if (tier == Tier::kAvx2) {
    return dtype == Dtype::kFloat32    ? PACKFREE_KERNELS(avx2, float, float)
           : dtype == Dtype::kBFloat16 ? PACKFREE_KERNELS(avx2, bf16, float)
                                       : PACKFREE_KERNELS(avx2, fp16, float);
  }
#endif
#if PACKFREE_ARM
  if (tier == Tier::kNeonBf16 && dtype == Dtype::kBFloat16) return PACKFREE_KERNELS(neon_bf16, bf16, float);
  if (tier >= Tier::kNeon) {
    return dtype == Dtype::kFloat32    ? PACKFREE_KERNELS(neon, float, float)
           : dtype == Dtype::kBFloat16 ? PACKFREE_KERNELS(neon, bf16, float)
                                       : PACKFREE_KERNELS(neon, fp16, float);
  }
#endif
  return dtype == Dtype::kFloat32    ? PACKFREE_KERNELS(scalar, float, float)
         : dtype == Dtype::kBFloat16 ? PACKFREE_KERNELS(scalar, bf16, float)
                                     : PACKFREE_KERNELS(scalar, fp16, float);
}

Kernels KernelsOf(const AttentionArgs& args, int64_t sequence) {
  return SelectKernels(args.tier, args.dtype, args.keys.length(sequence));
}

int64_t ElementSize(Dtype dtype) { return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2; }
int64_t AccumulationSize(Dtype dtype) { return dtype == Dtype::kFloat64 ? 8 : 4; }

// A buffer aligned to a cache line, with unspecified contents.
struct FreeBuffer {
  void operator()(char* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<char, FreeBuffer>;
Buffer NewBuffer(int64_t bytes) {
  const size_t rounded = (static_cast<size_t>(bytes) + 64) / 64 * 64;
  char* p = static_cast<char*>(std::aligned_alloc(64, rounded));
  if (p == nullptr) throw std::bad_alloc();
  return Buffer(p);
}

// Zeroes the rows of a contiguous tensor [tokens, row] from token `from` on.
void ClearRows(void* data, int64_t from, int64_t tokens, int64_t row_bytes) {
  if (from >= tokens) return;  // an empty tensor has no address, which memset does not take even for 0 bytes
  std::memset(static_cast<char*>(data) + from * row_bytes, 0, static_cast<size_t>((tokens - from) * row_bytes));
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

std::vector<QueryUnit> QueryUnits(const AttentionArgs& args) {
  struct Sized {
    QueryUnit unit;
    int64_t cost;
  };
  std::vector<Sized> sized;
  const int64_t step = TilesPerUnit(args), group = args.H / args.HK;
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
  std::vector<QueryUnit> units;
  units.reserve(sized.size());
  for (const Sized& item : sized) units.push_back(item.unit);
  return units;
}

// The tiles of the sequences with several ranges, as DeltaUnit takes them.
std::vector<KeyUnit> DeltaUnits(const AttentionArgs& args, const std::vector<KeyUnit>& units) {
  std::vector<KeyUnit> tiles;
  for (const KeyUnit& unit : units) {
    if (unit.range > 0 || unit.first_state < 0) continue;
    const int64_t count = TileCount(args, unit.sequence);
    for (int64_t t = 0; t < count; ++t) tiles.push_back({unit.sequence, unit.kv_head, t, unit.first_state});
  }
  return tiles;
}

// Longest sequences first; inside one, ranges in rising order with the heads side by side, so that a unit rarely waits
// for the range before its own and never for one that has not been handed out.
std::vector<KeyUnit> KeyUnits(const AttentionArgs& args, int64_t* states) {
  std::vector<int64_t> order;
  for (int64_t n = 0; n < args.keys.num_sequences; ++n) {
    if (args.queries.length(n) > 0 || args.keys.length(n) > 0) order.push_back(n);
  }
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return args.queries.length(a) * args.keys.length(a) > args.queries.length(b) * args.keys.length(b);
  });
  std::vector<KeyUnit> units;
  *states = 0;
  for (const int64_t n : order) {
    const int64_t ranges = std::max<int64_t>(1, CeilDiv(args.keys.length(n), KeyRange(args)));
    const int64_t tiles = TileCount(args, n);
    for (int64_t range = 0; range < ranges; ++range) {
      for (int64_t head = 0; head < args.HK; ++head) {
        units.push_back({n, head, range, ranges > 1 ? *states + head * tiles : -1});
      }
    }
    if (ranges > 1) *states += args.HK * tiles;
  }
  return units;
}

// ds_aux: one partial per (sequence, head), then their sum in order of the sequences.
template <class Acc>
void SinkGradient(const AttentionBackwardArgs& args) {
  std::vector<int64_t> sequences;
  for (int64_t n = 0; n < args.queries.num_sequences; ++n) {
    if (args.queries.length(n) > 0) sequences.push_back(n);
  }
  const int64_t count = static_cast<int64_t>(sequences.size());
  std::vector<Acc> partial(static_cast<size_t>(count * args.H));
  ParallelForEach(count * args.H, [&](int64_t item) {
    const int64_t n = sequences[static_cast<size_t>(item / args.H)];
    KernelsOf(args, n).sink_gradient(args, n, item % args.H, &partial[static_cast<size_t>(item)]);
  });
  for (int64_t head = 0; head < args.H; ++head) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += partial[static_cast<size_t>(i * args.H + head)];
    static_cast<Acc*>(args.ds_aux)[head] = static_cast<Acc>(sum);
  }
}

}  // namespace

void flash_attn_varlen_fwd_cpu(const AttentionForwardArgs& args) {
  ClearRows(args.out, args.queries.end(), args.queries.tokens, args.H * args.V * ElementSize(args.dtype));
  if (args.lse != nullptr) {
    for (int64_t head = 0; head < args.H; ++head) {
      const int64_t row_bytes = AccumulationSize(args.dtype);
      ClearRows(static_cast<char*>(args.lse) + head * args.queries.tokens * row_bytes, args.queries.end(),
                args.queries.tokens, row_bytes);
    }
  }
  const std::vector<QueryUnit> units = QueryUnits(args);
  const int64_t items = static_cast<int64_t>(units.size());
  const int64_t bytes = ForwardScratch(args).total * AccumulationSize(args.dtype);
  const Buffer scratch = NewBuffer(ParallelWorkers(items) * bytes);
  ParallelForEach(items, [&](int64_t item, int64_t worker) {
    const QueryUnit& unit = units[static_cast<size_t>(item)];
    KernelsOf(args, unit.sequence).forward(args, unit, scratch.get() + worker * bytes);
  });
}

void flash_attn_varlen_bwd_cpu(const AttentionBackwardArgs& args) {
  const int64_t size = ElementSize(args.dtype), acc_size = AccumulationSize(args.dtype);
  ClearRows(args.dq, args.queries.end(), args.queries.tokens, args.H * args.K * size);
  ClearRows(args.dk, args.keys.end(), args.keys.tokens, args.HK * args.K * size);
  ClearRows(args.dv, args.keys.end(), args.keys.tokens, args.HK * args.V * size);
  int64_t states = 0;
  const std::vector<KeyUnit> units = KeyUnits(args, &states);
  const int64_t items = static_cast<int64_t>(units.size());
  const int64_t bytes = BackwardScratch(args).total * acc_size;
  const std::vector<KeyUnit> tiles = DeltaUnits(args, units);
  const int64_t tile_items = static_cast<int64_t>(tiles.size());
  const Buffer scratch = NewBuffer(ParallelWorkers(std::max(items, tile_items)) * bytes);
  const Buffer partial = NewBuffer(states * args.K * kTileColumns * acc_size);
  const Buffer delta = NewBuffer(states * kTileColumns * acc_size);
  std::vector<int32_t> arrived(static_cast<size_t>(states), 0);
  const RangeExchange exchange{arrived.data(), partial.get(), delta.get()};
  ParallelForEach(tile_items, [&](int64_t item, int64_t worker) {
    const KeyUnit& tile = tiles[static_cast<size_t>(item)];
    KernelsOf(args, tile.sequence).delta(args, tile, exchange, scratch.get() + worker * bytes);
  });
  ParallelForEach(items, [&](int64_t item, int64_t worker) {
    const KeyUnit& unit = units[static_cast<size_t>(item)];
    KernelsOf(args, unit.sequence).backward(args, unit, exchange, scratch.get() + worker * bytes);
  });
  if (args.ds_aux == nullptr) return;
  if (args.dtype == Dtype::kFloat64) {
    SinkGradient<double>(args);
  } else {
    SinkGradient<float>(args);
  }
}

}  // namespace packfree
