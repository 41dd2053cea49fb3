// Work items of the selective scan and the scratch memory that one of them needs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/mamba1_scan/mamba1_scan.h"
#include "cpu/scratch.h"
#include "cpu/work.h"

namespace packfree {

// Sequences [first, last) of the pack, on channels [channel, channel + channels), which read group `group` of B and C.
struct ScanItem {
  // Of each token of the pack, whether a sequence begins there: neighbours are then run through as one span, which
  // starts from 0 at such a token. Null where a sequence has states of its own to begin or end with.
  const uint8_t* begins;
  int64_t first;
  int64_t last;
  int64_t partial;  // which partial sum of the parameter gradients
  int64_t block;    // which channel block
  int64_t group;
  int64_t channel;
  int64_t channels;
};

// States that the inner loops advance together: the next in line hide the latency of one.
constexpr int kScanStatesTogether = 4;
// Lanes of the widest register that holds an Acc.
constexpr int64_t kScanMaxLanes = 16;

// Row of a tile with N columns.
inline int64_t ScanStateStride(int64_t states) { return (states + kScanMaxLanes - 1) / kScanMaxLanes * kScanMaxLanes; }

// L below is the number of lanes, and a "lane group" the channels of one register. Tiles of channels are cut by lane
// groups: [groups, rows, L], kScanChannels elements a row in all.
template <class Acc>
struct ScanTiles {
  Acc* rate;     // [groups, N, L]: A
  Acc* rate2;    // [groups, N, L]: A log2(e)
  Acc* fixed_B;  // [groups, N, L], where B is fixed
  Acc* fixed_C;  // [groups, N, L], where C is fixed
  Acc* skip;     // [groups, L]: D
  Acc* bias;     // [groups, L]: delta_bias
  Acc* state;    // [groups, N, L]
  Acc* B;        // [kScanTokens, stride]
  Acc* C;        // [kScanTokens, stride]
  int64_t stride;

  ScanTiles(const ScanArgs& args, Pieces<Acc>& pieces)
      : rate(pieces.Take(args.states * kScanChannels)),
        rate2(pieces.Take(args.states * kScanChannels)),
        fixed_B(pieces.Take(args.B.fixed ? args.states * kScanChannels : 0)),
        fixed_C(pieces.Take(args.C.fixed ? args.states * kScanChannels : 0)),
        skip(pieces.Take(kScanChannels)),
        bias(pieces.Take(kScanChannels)),
        state(pieces.Take(args.states * kScanChannels)),
        B(pieces.Take(kScanTokens * ScanStateStride(args.states))),
        C(pieces.Take(kScanTokens * ScanStateStride(args.states))),
        stride(ScanStateStride(args.states)) {}
};

template <class Acc>
struct ScanForwardTiles {
  ScanTiles<Acc> shared;
  // Of one lane group, [kScanTokens, L] each.
  Acc* u;
  Acc* delta;
  Acc* input;  // delta u
  Acc* z;
  Acc* y;

  ScanForwardTiles(const ScanArgs& args, Pieces<Acc>& pieces)
      : shared(args, pieces),
        u(pieces.Take(kScanTokens * kScanMaxLanes)),
        delta(pieces.Take(kScanTokens * kScanMaxLanes)),
        input(pieces.Take(kScanTokens * kScanMaxLanes)),
        z(pieces.Take(kScanTokens * kScanMaxLanes)),
        y(pieces.Take(kScanTokens * kScanMaxLanes)) {}
};

template <class Acc>
struct ScanBackwardTiles {
  ScanTiles<Acc> shared;
  Acc* checkpoints;  // [blocks of the longest span, groups, N, L]: states before each block
  Acc* dstate;       // [groups, N, L]
  // [groups, kScanTokens, L] each.
  Acc* u;
  Acc* delta;
  Acc* slope;   // d delta / d (raw delta)
  Acc* input;   // delta u
  Acc* dy;      // gradient before the gate
  Acc* dgate;   // what the output before the gate is multiplied with to give dz
  Acc* y;       // sum over the states of C h
  Acc* dinput;  // gradient of `input`
  Acc* drate;   // sum over the states of A times the gradient of A delta
  // Of one lane group and kScanStatesTogether states, [kScanTokens, states, L] each.
  Acc* decay;
  Acc* decayed;  // decay times the state before the token
  // Summed over the lane groups, [kScanTokens, states, L] each; then over lanes.
  Acc* dB;
  Acc* dC;
  Acc* sums;        // [kScanTokens, states]
  Acc* parameters;  // [3, states, L]: sums over the block's tokens for dA, and for dB and dC where fixed

  ScanBackwardTiles(const ScanArgs& args, int64_t longest, Pieces<Acc>& pieces)
      : shared(args, pieces),
        checkpoints(pieces.Take((longest + kScanTokens - 1) / kScanTokens * args.states * kScanChannels)),
        dstate(pieces.Take(args.states * kScanChannels)),
        u(pieces.Take(kScanTokens * kScanChannels)),
        delta(pieces.Take(kScanTokens * kScanChannels)),
        slope(pieces.Take(kScanTokens * kScanChannels)),
        input(pieces.Take(kScanTokens * kScanChannels)),
        dy(pieces.Take(kScanTokens * kScanChannels)),
        dgate(pieces.Take(kScanTokens * kScanChannels)),
        y(pieces.Take(kScanTokens * kScanChannels)),
        dinput(pieces.Take(kScanTokens * kScanChannels)),
        drate(pieces.Take(kScanTokens * kScanChannels)),
        decay(pieces.Take(kScanTokens * kScanStatesTogether * kScanMaxLanes)),
        decayed(pieces.Take(kScanTokens * kScanStatesTogether * kScanMaxLanes)),
        dB(pieces.Take(kScanTokens * kScanStatesTogether * kScanMaxLanes)),
        dC(pieces.Take(kScanTokens * kScanStatesTogether * kScanMaxLanes)),
        sums(pieces.Take(kScanTokens * kScanStatesTogether)),
        parameters(pieces.Take(3 * kScanStatesTogether * kScanMaxLanes)) {}
};

// Sequences of a pack in stretches of at least kScanGroupTokens tokens.
inline std::vector<Stretch> ScanStretches(const PackingView& packing) {
  return CutNeighbours(packing.num_sequences, kScanGroupTokens, [&](int64_t n) { return packing.length(n); });
}

// Sequences [n, SpanEnd(...)) of an item lie side by side in one row and are run through as one.
inline int64_t SpanEnd(const ScanArgs& args, const ScanItem& item, int64_t n) {
  const auto row = [&](int64_t sequence) { return args.packing.bos(sequence) / args.row_tokens; };
  int64_t end = n + 1;
  while (item.begins != nullptr && end < item.last && (args.packing.length(end) == 0 || row(end) == row(n))) ++end;
  return end;
}

// All work: every stretch on every channel block, the longest first so that threads end together.
struct ScanWork {
  std::vector<uint8_t> begins;
  std::vector<ScanItem> items;
  int64_t longest = 0;  // tokens of a span at most

  ScanWork(const ScanArgs& args, bool states) {
    const PackingView& packing = args.packing;
    if (!states) {
      begins.assign(packing.end() + 1, 0);
      for (int64_t n = 0; n < packing.num_sequences; ++n) begins[packing.bos(n)] = 1;
    }
    const std::vector<Stretch> stretches = ScanStretches(packing);
    std::vector<int64_t> order(stretches.size());
    for (size_t s = 0; s < order.size(); ++s) {
      order[s] = static_cast<int64_t>(s);
      longest = std::max(longest, stretches[s].tokens);
    }
    if (states) longest = LongestSequence(packing);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return stretches[a].tokens > stretches[b].tokens; });
    const int64_t group_channels = args.channels / args.groups;
    for (const int64_t s : order) {
      int64_t block = 0;
      for (int64_t g = 0; g < args.groups; ++g) {
        for (int64_t c = 0; c < group_channels; c += kScanChannels, ++block) {
          items.push_back({states ? nullptr : begins.data(), stretches[s].first, stretches[s].last, s, block, g,
                           g * group_channels + c, std::min(kScanChannels, group_channels - c)});
        }
      }
    }
  }
};

}  // namespace packfree
