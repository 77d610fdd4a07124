// Element i becomes value + i.
//
// tensors: 0 output [n] int32
// scalars: 1 value
#include "cells.h"

extern "C" void kernel_entry(int64_t *args) {
    int32_t *output = cells::data<int32_t>(args, 0);
    const uint64_t count = cells::length(args, 0);
    const uint32_t value = static_cast<uint32_t>(args[1]);
    for (uint64_t i = 0; i < count; ++i) output[i] = static_cast<int32_t>(value + static_cast<uint32_t>(i));
}
