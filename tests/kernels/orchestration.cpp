// Chip-side graph builders, one per kernel: each forwards its arguments to one vector-core task, kernel 0.
// Every callable names its own function here and its argument count (tensors + scalars).
#include <stdint.h>

#include "pto_orchestration_api.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

// How the task uses a tensor; decides what it waits for on the chip.
enum class Use { In, Out, InOut };

template <typename... Uses>
void forward(const ChipTaskArgs &args, int scalars, Uses... uses) {
    CoreTaskArgs task;
    int index = 0;
    auto tensor = [&](Use use) {
        const ChipTensor &it = args.tensor(index++).ref();
        if (use == Use::In) task.add_input(it);
        else if (use == Use::Out) task.add_output(it);
        else task.add_inout(it);
    };
    (tensor(uses), ...);
    for (int i = 0; i < scalars; ++i) task.add_scalar(args.scalar(i));
    rt_submit_aiv_task(0, task);
}

}  // namespace

#define ORCHESTRATION(name, count)                                                   \
    EXPORTED PTO2OrchestrationConfig name##_config(const ChipTaskArgs &) {           \
        return PTO2OrchestrationConfig{.expected_arg_count = count};                 \
    }                                                                                \
    EXPORTED void name(const ChipTaskArgs &args)

ORCHESTRATION(pto_store, 2) { forward(args, 1, Use::Out); }
ORCHESTRATION(pto_add, 2) { forward(args, 1, Use::InOut); }
ORCHESTRATION(pto_copy, 2) { forward(args, 0, Use::In, Use::Out); }
ORCHESTRATION(pto_signal, 3) { forward(args, 2, Use::InOut); }
ORCHESTRATION(pto_await, 4) { forward(args, 3, Use::Out); }
ORCHESTRATION(pto_handshake, 5) { forward(args, 3, Use::InOut, Use::Out); }
ORCHESTRATION(pto_peek, 4) { forward(args, 3, Use::Out); }
ORCHESTRATION(pto_rank, 2) { forward(args, 1, Use::Out); }
ORCHESTRATION(allreduce, 5) { forward(args, 3, Use::In, Use::Out); }
ORCHESTRATION(allreduce_from, 6) { forward(args, 4, Use::In, Use::Out); }
ORCHESTRATION(decode_exchange, 8) { forward(args, 5, Use::In, Use::In, Use::Out); }
ORCHESTRATION(decode_phase, 9) { forward(args, 5, Use::In, Use::In, Use::Out, Use::InOut); }
ORCHESTRATION(crash, 1) { forward(args, 0, Use::Out); }

// Reports a fatal error instead of submitting anything: a failed run with a living chip process.
ORCHESTRATION(pto_fail, 1) {
    (void)args;
    rt_report_fatal(PTO2_ERROR_EXPLICIT_ORCH_FATAL, "failed on purpose");
}
