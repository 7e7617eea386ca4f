/* The definition: each element of C is a sum over k. Every multiplication loads both of its operands. */
#define SCRATCH_FLOATS 4
#include "rung.h"

static void multiply(const Problem *p) { sums(p, 0, p->m, 0, p->n, 0, p->k); }
