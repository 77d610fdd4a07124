// Helpers shared by the test kernels. Simulation only: a "core" is a host thread, device memory is host memory.
//
// A kernel gets one array of 64-bit words: first a pointer per tensor (to its descriptor), then the scalars.
#pragma once

#include <sched.h>
#include <stdint.h>
#include <time.h>

// Words of the chip compiler that mean nothing on a host.
#ifndef __gm__
#define __gm__
#endif
#ifndef __aicore__
#define __aicore__
#endif

#include "platform_comm/comm_context.h"  // CommContext: rankId, rankNum, windowsIn[rank]
#include "tensor.h"                      // ChipTensor: buffer.addr, start_offset (elements), shapes, ndims

namespace cells {

// First element of tensor argument `index`.
template <typename T>
inline T *data(const int64_t *args, int index) {
    const auto *tensor = reinterpret_cast<const ChipTensor *>(args[index]);
    return reinterpret_cast<T *>(tensor->buffer.addr) + tensor->start_offset;
}

// Number of elements of tensor argument `index`.
inline uint64_t length(const int64_t *args, int index) {
    const auto *tensor = reinterpret_cast<const ChipTensor *>(args[index]);
    uint64_t count = 1;
    for (uint32_t dim = 0; dim < tensor->ndims; ++dim) count *= tensor->shapes[dim];
    return count;
}

// The communication context whose address came as a scalar (Simpler: ChipDomainContext.device_ctx).
inline const CommContext *context(int64_t scalar) { return reinterpret_cast<const CommContext *>(scalar); }

// Address of byte `offset` in the window of `rank`, as this chip sees it.
template <typename T>
inline T *window(const CommContext *ctx, uint32_t rank, uint64_t offset) {
    return reinterpret_cast<T *>(ctx->windowsIn[rank] + offset);
}

inline void add(int32_t *cell, int32_t amount) { __atomic_fetch_add(cell, amount, __ATOMIC_ACQ_REL); }

// Waits until the cell is at least `bound`, and returns what it read. A simulated chip does not end a kernel whose peer
// has failed, so this one gives up by itself in the end; the value that it then returns is below the bound.
inline int32_t await(const int32_t *cell, int32_t bound) {
    const time_t end = time(nullptr) + 30;
    for (;;) {
        int32_t seen = __atomic_load_n(cell, __ATOMIC_ACQUIRE);
        if (seen >= bound || time(nullptr) > end) return seen;
        sched_yield();
    }
}

// Rank r adds r + 1 to the cell at `offset` of every other rank.
inline void signal_others(const CommContext *ctx, uint64_t offset) {
    for (uint32_t rank = 0; rank < ctx->rankNum; ++rank) {
        if (rank != ctx->rankId) add(window<int32_t>(ctx, rank, offset), static_cast<int32_t>(ctx->rankId) + 1);
    }
}

}  // namespace cells
