// Ends the chip process by a segmentation fault.
//
// tensors: 0 output [1] int32 (not reached)
#include "cells.h"

extern "C" void kernel_entry(int64_t *) {
    volatile int32_t *nowhere = nullptr;
    *nowhere = 1;
}
