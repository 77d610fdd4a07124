// All-reduce in a window that is zero at the start; see allreduce.h.
#include "allreduce.h"

extern "C" void kernel_entry(int64_t *args) { allreduce(args, 0); }
