// Closes what a begin_<tier>.h opened.
}  // namespace <tier>
}  // namespace packfree
#if PACKFREE_TIER > 0
#pragma GCC pop_options
#endif
#undef PACKFREE_TIER
#undef PACKFREE_VECTOR_BYTES
