// Stores the own rank and the number of ranks.
//
// tensors: 0 output [2] int32
// scalars: 1 communication context
#include "cells.h"

extern "C" void kernel_entry(int64_t *args) {
    int32_t *output = cells::data<int32_t>(args, 0);
    const CommContext *ctx = cells::context(args[1]);
    output[0] = static_cast<int32_t>(ctx->rankId);
    output[1] = static_cast<int32_t>(ctx->rankNum);
}
