// Copies the first tensor onto the second.
//
// tensors: 0 input [n] int32, 1 output [n] int32
#include "cells.h"

extern "C" void kernel_entry(int64_t *args) {
    const int32_t *input = cells::data<int32_t>(args, 0);
    int32_t *output = cells::data<int32_t>(args, 1);
    const uint64_t count = cells::length(args, 1);
    for (uint64_t i = 0; i < count; ++i) output[i] = input[i];
}
