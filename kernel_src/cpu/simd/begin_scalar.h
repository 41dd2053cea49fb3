// Opens the tier that every CPU has: the compiler's own vector types at the width of the baseline (16 bytes).
// Also the only tier that is built for double, so that gradients can be checked numerically on the real code.
#define PACKFREE_TIER 0
#define PACKFREE_VECTOR_BYTES 16
#define PACKFREE_BASELINE 1
namespace packfree {
namespace scalar {
