// Closes what a begin_<tier>.h opened.
}  // namespace <tier>
}  // namespace packfree
#if PACKFREE_TIER > 0
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
#undef PACKFREE_TIER
#undef PACKFREE_VECTOR_BYTES
