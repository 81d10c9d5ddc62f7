/* The lossless kernels that Python calls. */
#ifndef CKPT_LOSSLESS_H
#define CKPT_LOSSLESS_H

#include "kernels.h"

#endif
