// All-reduce in a window that is kept between dispatches; scalar 5: arrivals that earlier dispatches have left.
#include "allreduce.h"

extern "C" void kernel_entry(int64_t *args) { allreduce(args, static_cast<int32_t>(args[5])); }
