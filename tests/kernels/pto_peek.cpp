// Reads n elements of some rank's window.
//
// tensors: 0 output [n] int32
// scalars: 1 communication context, 2 rank, 3 byte offset in the window
#include "cells.h"

extern "C" void kernel_entry(int64_t *args) {
    int32_t *output = cells::data<int32_t>(args, 0);
    const uint64_t count = cells::length(args, 0);
    const CommContext *ctx = cells::context(args[1]);
    const int32_t *from = cells::window<int32_t>(ctx, static_cast<uint32_t>(args[2]), static_cast<uint64_t>(args[3]));
    for (uint64_t i = 0; i < count; ++i) output[i] = __atomic_load_n(from + i, __ATOMIC_ACQUIRE);
}
