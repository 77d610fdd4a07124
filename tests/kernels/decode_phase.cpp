// One phase of one exchange that is ordered by runs: the same ring, one hop per run. The builder has copied what each
// rank had after the previous phase into that rank's buffer.
#include "decode.h"

extern "C" void kernel_entry(int64_t *args) {
    const uint32_t *input = cells::data<uint32_t>(args, 0);
    const auto *table = reinterpret_cast<const decode::Exchange *>(cells::data<uint64_t>(args, 1));
    uint8_t *output = cells::data<uint8_t>(args, 2), *carry = cells::data<uint8_t>(args, 3);
    const decode::Rank me(args[4]);
    const uint64_t index = args[5], hop = args[7];
    const bool fresh = args[8] == 1;

    const decode::Exchange &exchange = table[index];
    const uint8_t *arrived = me.window(me.writer, exchange.data);
    if (hop >= me.ranks) {
        decode::copy_out(arrived, exchange, me, output);
        return;
    }
    if (hop == 0) {
        // A fresh window is zero; all of it takes part, so that a byte that is not shows up in some result.
        if (fresh) memcpy(carry, me.window(me.rank, exchange.data), exchange.nbytes);
        else memset(carry, 0, exchange.nbytes);
    }
    const decode::Rows rows = decode::rows(input, index, me.rank);
    const decode::Range bytes = decode::chunk(exchange.nbytes, me.ranks, (me.rank + me.ranks - hop) % me.ranks);
    decode::fill(carry, bytes, [&](uint64_t at, uint64_t size) {
        uint32_t sum = decode::load(carry, at, size) + decode::partial(rows, static_cast<uint32_t>(at / decode::kWord));
        if (hop > 0) sum += decode::load(arrived, at, size);
        return sum;
    });
}
