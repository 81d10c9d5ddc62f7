/* The deltas kernels that Python calls. */
#ifndef CKPT_DELTAS_H
#define CKPT_DELTAS_H

#include "kernels.h"

#endif
