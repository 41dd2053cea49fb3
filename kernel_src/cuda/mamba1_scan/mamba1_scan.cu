#include "cuda/mamba1_scan/mamba1_scan.h"

#include "cuda/mamba1_scan/bwd.cuh"

namespace packfree {
namespace {

int64_t ItemsOf(const ScanArgs& args) { return TilesOf(args.packing.tokens) * ColumnsOf(args); }

// Cuts scratch into pieces of 4-byte elements, or only counts them.
class Pieces {
 public:
  explicit Pieces(float* data) : data_(data) {}
  float* Take(int64_t floats) {
    float* piece = data_ == nullptr ? nullptr : data_ + taken_;
    taken_ += floats;
    return piece;
  }
  int64_t taken() const { return taken_; }

 private:
  float* data_;
  int64_t taken_ = 0;
};

ScanSlots TakeSlots(const ScanArgs& args, Pieces& pieces) {
  const int64_t tiles = TilesOf(args.packing.tokens);
  float* values = pieces.Take(tiles * args.states * args.channels);
  return {values, pieces.Take(tiles * args.channels)};
}

struct ForwardScratch {
  int32_t* owners;  // [B T]
  ScanSlots states;

  ForwardScratch(const ScanArgs& args, Pieces& pieces)
      : owners(reinterpret_cast<int32_t*>(pieces.Take(args.packing.tokens))), states(TakeSlots(args, pieces)) {}
};
struct BackwardScratch : ForwardScratch {
  ScanSlots gradients;
  int64_t blocks;
  float* kept;

  BackwardScratch(const ScanArgs& args, Pieces& pieces)
      : ForwardScratch(args, pieces),
        gradients(TakeSlots(args, pieces)),
        blocks(BlocksFor(ItemsOf(args), kScanBackwardResident)),
        kept(pieces.Take(blocks * KeptFloats(args))) {}
};

// The state before each continued chunk, or with kBackward its gradient.
template <bool kBackward>
void RunChunks(Launcher& launcher, const ScanArgs& args, const ScanInput& dy, const void* given, const int32_t* owners,
               const ScanSlots& slots) {
  launcher.Run(&ScanChunkKernel<kBackward>, BlocksFor(ItemsOf(args), kScanChunkResident), kScanThreads, args, dy,
               owners, slots);
  const int64_t elements = (args.states * args.channels + kElementThreads - 1) / kElementThreads;
  launcher.Run(&ScanCarryKernel<kBackward>, BlocksFor(TilesOf(args.packing.tokens) * elements, 8), kElementThreads,
               args, given, owners, slots);
}

void RunEmpty(Launcher& launcher, const ScanArgs& args, const void* given, void* target) {
  if (target == nullptr) return;
  launcher.Run(&ScanEmptyKernel, ElementBlocks(args.packing.num_sequences * args.channels * args.states),
               kElementThreads, args, given, target);
}

void RunReductions(Launcher& launcher, const ScanBackwardArgs& args, const int32_t* owners) {
  const Partials partials{static_cast<const float*>(args.parameter_partials), TilesOf(args.packing.tokens),
                          ScanParameterRows(args), args.channels};
  int64_t row = 0;
  RunReduce(launcher, partials, row, args.states, args.dA);
  const auto coefficients = [&](const ScanCoefficients& source, const void* token_partials, void* target) {
    if (source.fixed) {
      RunReduce(launcher, partials, row += args.states, args.states, target);
      return;
    }
    launcher.Run(&ScanReduceTokensKernel, ElementBlocks(args.packing.tokens * args.groups * args.states),
                 kElementThreads, args, source.dtype, owners, static_cast<const float*>(token_partials), target);
  };
  coefficients(args.B, args.dB_partials, args.dB);
  coefficients(args.C, args.dC_partials, args.dC);
  row += args.states;
  RunReduce(launcher, partials, row, 1, args.dD);
  RunReduce(launcher, partials, row + 1, 1, args.ddelta_bias);
}

}  // namespace

int64_t ScanTiles(int64_t tokens) { return TilesOf(tokens); }
int64_t ScanColumns(const ScanArgs& args) { return ColumnsOf(args); }

int64_t ScanForwardScratch(const ScanArgs& args) {
  Pieces pieces(nullptr);
  const ForwardScratch scratch(args, pieces);
  return pieces.taken();
}
int64_t ScanBackwardScratch(const ScanArgs& args) {
  Pieces pieces(nullptr);
  const BackwardScratch scratch(args, pieces);
  return pieces.taken();
}

const char* Mamba1ScanForwardCuda(const ScanForwardArgs& args, float* scratch, void* stream) {
  Launcher launcher(stream);
  Pieces pieces(scratch);
  const ForwardScratch own(args, pieces);
  RunOwners(launcher, args.packing, own.owners);
  RunChunks<false>(launcher, args, {}, args.initial_state, own.owners, own.states);
  launcher.Run(&ScanForwardKernel, BlocksFor(ItemsOf(args), kScanForwardResident), kScanThreads, args, own.owners,
               own.states);
  RunEmpty(launcher, args, args.initial_state, args.final_state);
  return launcher.error();
}

const char* Mamba1ScanBackwardCuda(const ScanBackwardArgs& args, float* scratch, void* stream) {
  Launcher launcher(stream);
  Pieces pieces(scratch);
  const BackwardScratch own(args, pieces);
  RunOwners(launcher, args.packing, own.owners);
  RunChunks<false>(launcher, args, {}, args.initial_state, own.owners, own.states);
  RunChunks<true>(launcher, args, args.dy, args.dfinal_state, own.owners, own.gradients);
  launcher.Run(&ScanBackwardKernel, own.blocks, kScanThreads, args, own.owners, own.states, own.gradients, own.kept);
  RunReductions(launcher, args, own.owners);
  RunEmpty(launcher, args, args.dfinal_state, args.dinitial_state);
  return launcher.error();
}

}  // namespace packfree
