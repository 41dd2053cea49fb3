// Opens the tier NEON (AdvSIMD), which every aarch64 CPU has: no target pragma is needed.
#define PACKFREE_TIER 1
#define PACKFREE_VECTOR_BYTES 16
#define PACKFREE_NEON 1
#define PACKFREE_BASELINE 1
namespace packfree {
namespace neon {
