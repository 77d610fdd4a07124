// Waits until the own cell is at least the threshold, and stores what it then held.
//
// tensors: 0 output [1] int32
// scalars: 1 communication context, 2 byte offset of the cell in the window, 3 threshold
#include "cells.h"

extern "C" void kernel_entry(int64_t *args) {
    const CommContext *ctx = cells::context(args[1]);
    const int32_t *cell = cells::window<int32_t>(ctx, ctx->rankId, static_cast<uint64_t>(args[2]));
    cells::data<int32_t>(args, 0)[0] = cells::await(cell, static_cast<int32_t>(args[3]));
}
