/* All kernels of one level of CPU. The build compiles this file once for each level, with -DLEVEL=v2 and so on;
 * in one piece, so that the compiler may inline across files and everything but the API stays static. */
#include "kernels.h"

#include "lossless.h"

#include "deltas.h"

#include "lossy.h"

