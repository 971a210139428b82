// The operators that kernels.py declares, for x86 processors with AVX2 or more.
//
// Each reads its large operand at the memory's bandwidth, or multiplies near the processor's peak. All are
// batch invariant: a row's result does not depend on the other rows.

#include <torch/library.h>

#include "experts.h"
#include "group_fit.h"
#include "linear.h"
#include "prompt_attention.h"
#include "rotary.h"
#include "sampling.h"
#include "slot_attention.h"
#include "states.h"
#include "window_votes.h"

TORCH_LIBRARY_IMPL(snapserve, CPU, implementations) {
  implementations.impl("experts", experts);
  implementations.impl("linear", linear);
  implementations.impl("quantize_in_groups", quantize_in_groups);
  implementations.impl("slot_attention", slot_attention);
  implementations.impl("sparse_attention", sparse_attention);
  implementations.impl("rotate", rotate_heads);
  implementations.impl("prompt_attention", prompt_attention);
  implementations.impl("window_votes", window_votes);
  implementations.impl("draw", draw);
  implementations.impl("advance_states", advance_states);
}
