// Every op family, one line each. The name X stands for bindings/X.cpp with define_X and implement_X_cpu.
PACKFREE_OP(causal_conv1d)
PACKFREE_OP(flash_attn_varlen)
PACKFREE_OP(gated_delta_rule)
PACKFREE_OP(kda)
PACKFREE_OP(mamba1_scan)
PACKFREE_OP(mamba2_scan)
