// Signals every other rank, then waits for the own cell and stores what it then held.
//
// tensors: 0 signal buffer (only named), 1 output [1] int32
// scalars: 2 communication context, 3 byte offset of the cell in the window, 4 threshold
#include "cells.h"

extern "C" void kernel_entry(int64_t *args) {
    const CommContext *ctx = cells::context(args[2]);
    const uint64_t offset = static_cast<uint64_t>(args[3]);
    cells::signal_others(ctx, offset);
    const int32_t *cell = cells::window<int32_t>(ctx, ctx->rankId, offset);
    cells::data<int32_t>(args, 1)[0] = cells::await(cell, static_cast<int32_t>(args[4]));
}
