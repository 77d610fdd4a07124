// All-reduce (sum of int32) over a domain window, two phases: publish, then add up every rank's part.
#pragma once

#include "cells.h"

// tensors: 0 input [n], 1 output [n]
// scalars: 2 byte offset of the payload (n words), 3 byte offset of the arrival cell, 4 communication context
//
// The arrival cell counts the ranks that have published; `before` is what it held when the dispatch began.
inline void allreduce(int64_t *args, int32_t before) {
    const int32_t *input = cells::data<int32_t>(args, 0);
    int32_t *output = cells::data<int32_t>(args, 1);
    const uint64_t count = cells::length(args, 0);
    const uint64_t payload = args[2], arrivals = args[3];
    const CommContext *ctx = cells::context(args[4]);

    int32_t *mine = cells::window<int32_t>(ctx, ctx->rankId, payload);
    for (uint64_t i = 0; i < count; ++i) mine[i] = input[i];
    for (uint32_t rank = 0; rank < ctx->rankNum; ++rank) cells::add(cells::window<int32_t>(ctx, rank, arrivals), 1);

    const int32_t all = before + static_cast<int32_t>(ctx->rankNum);
    cells::await(cells::window<int32_t>(ctx, ctx->rankId, arrivals), all);

    for (uint64_t i = 0; i < count; ++i) output[i] = 0;
    for (uint32_t rank = 0; rank < ctx->rankNum; ++rank) {
        const int32_t *part = cells::window<int32_t>(ctx, rank, payload);
        for (uint64_t i = 0; i < count; ++i) output[i] += part[i];
    }
}
