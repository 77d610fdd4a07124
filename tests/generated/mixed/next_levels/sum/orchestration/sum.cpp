// Chip-side graph of the sum: one vector task. Tensors after the second (the window, ordering tokens) are for the host only.
#include <stdint.h>

#include "pto_orchestration_api.h"

extern "C" {

__attribute__((visibility("default"))) PTO2OrchestrationConfig aicpu_orchestration_config(const ChipTaskArgs &) {
    return PTO2OrchestrationConfig{.expected_arg_count = 5};  // 2 tensors + 3 scalars
}

__attribute__((visibility("default"))) void aicpu_orchestration_entry(const ChipTaskArgs &args) {
    CoreTaskArgs task;
    task.add_input(args.tensor(0).ref());
    task.add_output(args.tensor(1).ref());
    for (int i = 0; i < 3; ++i) task.add_scalar(args.scalar(i));
    rt_submit_aiv_task(0, task);
}
}
