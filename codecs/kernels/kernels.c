/* All kernels of one level of CPU. The build compiles this file once for each level, with -DLEVEL=v2 and so on;
 * in one piece, so that the compiler may inline across files and everything but the API stays static. */
#include "kernels.h"

#include "lossless.h"
#include "huffman.c"
#include "planes.c"
#include "bfloat16.c"
#include "float16.c"
#include "masked.c"
#include "entropy.c"
#include "residuals.c"
#include "sparse.c"
#include "streams.c"
#include "chunks.c"

#include "deltas.h"
#include "bit_packer.c"
#include "range_coder.c"
#include "byte_rows.c"
#include "class_masks.c"
#include "sparse_steps.c"
#include "ans_steps.c"
#include "masked_steps.c"
#include "zigzag.c"
#include "contexts.c"
#include "second_moments.c"
#include "float32_grid.c"
#include "optimizer_steps.c"

#include "lossy.h"
#include "symbol_coder.c"
#include "matrices.c"
#include "moments.c"
#include "weights.c"

#include "stepping.h"
#include "stepping.c"

#include "gradients.h"
#include "gradients.c"
#include "column_classes.c"

#include "quantised.h"
#include "quantised.c"

#include "stats.h"
#include "stats.c"

#include "parity.h"
#include "parity.c"
