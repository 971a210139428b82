// The operators that `backends/torch_backend/native/kernels.py` declares, for x86 with AVX-512 and its
// bfloat16. Each reads its large operand at the memory's rate or comes near the rate of the processor's
// products, and no row's result depends on the rows beside it.

#include <torch/library.h>

#include "linear.h"
#include "prompt_attention.h"
#include "rotary.h"
#include "sampling.h"
#include "slot_attention.h"
#include "window_votes.h"

TORCH_LIBRARY_IMPL(snapserve, CPU, library) {
  library.impl("linear", linear);
  library.impl("slot_attention", slot_attention);
  library.impl("rotate", rotate_heads);
  library.impl("prompt_attention", prompt_attention);
  library.impl("window_votes", window_votes);
  library.impl("draw", draw);
}
