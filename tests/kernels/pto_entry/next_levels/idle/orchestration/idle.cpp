// A chip-side graph without tasks.
#include <stdint.h>

#include "pto_orchestration_api.h"

extern "C" {

__attribute__((visibility("default"))) PTO2OrchestrationConfig aicpu_orchestration_config(const ChipTaskArgs &) {
    return PTO2OrchestrationConfig{.expected_arg_count = 0};
}

__attribute__((visibility("default"))) void aicpu_orchestration_entry(const ChipTaskArgs &) {}
}
