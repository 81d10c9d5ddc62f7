/* The lossy kernels that Python calls. */
#ifndef CKPT_LOSSY_H
#define CKPT_LOSSY_H

#include "kernels.h"

#endif
