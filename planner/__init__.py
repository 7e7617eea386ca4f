"""Numbers in, plan out: which device computes which tile of a GEMM. No I/O, no clock, no randomness of its own."""
