"""What the Triton kernels share. Imported with the first CUDA tensor, never with the package: torch may lack Triton.

Rules of every kernel here, for all Tritons that torch 2.11 and later bring (3.6 to 3.9); what can be seen of them in a
compiled kernel, tools/triton_table.py checks in every launch that it knows:

* No product (``tl.dot``) sums over less than ``launch.SHORTEST``, which older Tritons refuse, and none of
  ``launch.ROWS_OF_A_WARPGROUP`` rows or more has fewer columns, which newer ones read wrongly from shared memory on
  Hopper.
* No product's left operand is the transposed result of another one, which Triton before 3.7.1 multiplies wrongly on
  Hopper: compute the transposed result as such.
* What products change from round to round of a loop, beyond adding one product to it, has ``launch.walked_rows``.
* Every launch writes all that is read later, also for no sequence and no token.
"""
