// Closes what a begin_<tier>.h opened.
}  // namespace <tier>
}  // namespace packfree
#if !PACKFREE_BASELINE
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
#undef PACKFREE_TIER
#undef PACKFREE_VECTOR_BYTES
#undef PACKFREE_BASELINE
#undef PACKFREE_AVX2
#undef PACKFREE_AVX512
#undef PACKFREE_NEON
#undef PACKFREE_BF16
#undef PACKFREE_MATRIX_UNIT
