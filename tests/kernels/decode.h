// The exchange of the example `production_decode`, whose Rust form (`workload/kernel.rs` there) is the reference: a
// matrix-vector product whose partial sums go round the ring of chips through a data buffer of the window.
//
// tensors: 0 input vector [rows] uint32, 1 table [5 * exchanges] uint64, 2 output bytes, 3 (phase) carried bytes
// scalars after the tensors: communication context, first exchange, exchanges, epoch or phase, fresh
#pragma once

#include <string.h>

#include "cells.h"

namespace decode {

constexpr uint64_t kWord = 4, kRowsPerChip = 4;

// One line of the table; offsets are bytes of the window.
struct Exchange {
    uint64_t data, nbytes, cells, before, per_dispatch;
};

struct Rows {
    uint32_t x[kRowsPerChip], salt[kRowsPerChip];
};

struct Range {
    uint64_t start, end;
};

inline uint32_t scramble(uint64_t value) {
    uint64_t z = value + 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
}

inline uint32_t weight(uint32_t salt, uint32_t index) {
    const uint32_t hash = (index ^ salt) * 0x9E3779B1u;
    return hash ^ (hash >> 15);
}

// Bytes of chunk `at` of a buffer that is cut into `ranks` chunks of whole words; the last word may be shortened.
inline Range chunk(uint64_t nbytes, uint64_t ranks, uint64_t at) {
    const auto words = static_cast<unsigned __int128>(nbytes / kWord + (nbytes % kWord != 0));
    auto cut = [&](uint64_t i) {
        const auto byte = static_cast<uint64_t>(words * i / ranks) * kWord;
        return byte < nbytes ? byte : nbytes;
    };
    return {cut(at), cut(at + 1)};
}

inline Rows rows(const uint32_t *input, uint64_t exchange, uint64_t rank) {
    Rows rows;
    for (uint64_t i = 0; i < kRowsPerChip; ++i) {
        const uint64_t row = rank * kRowsPerChip + i;
        rows.x[i] = input[row];
        rows.salt[i] = scramble((exchange << 32) | row);
    }
    return rows;
}

// The partial sum of these rows at one element.
inline uint32_t partial(const Rows &rows, uint32_t element) {
    uint32_t sum = 0;
    for (uint64_t i = 0; i < kRowsPerChip; ++i) sum += rows.x[i] * weight(rows.salt[i], element);
    return sum;
}

// Replaces the words of `to`; `word(byte, size)` gives each one. Buffers need not be aligned.
template <typename Word>
inline void fill(uint8_t *to, Range bytes, Word word) {
    for (uint64_t at = bytes.start; at < bytes.end; at += kWord) {
        const uint64_t size = bytes.end - at < kWord ? bytes.end - at : kWord;
        const uint32_t value = word(at, size);
        memcpy(to + at, &value, size);
    }
}

inline uint32_t load(const uint8_t *from, uint64_t at, uint64_t size) {
    uint32_t value = 0;
    memcpy(&value, from + at, size);
    return value;
}

// Waits for cell `cell` to have come at least to `target`; cells wrap around, so by distance. Gives up after a minute, so
// that a chip whose peer has failed comes back at all: the results are then wrong, and the example finds that.
inline void await(const int32_t *cell, uint32_t target) {
    const time_t end = time(nullptr) + 60;
    while (static_cast<int32_t>(static_cast<uint32_t>(__atomic_load_n(cell, __ATOMIC_ACQUIRE)) - target) < 0) {
        if (time(nullptr) > end) return;
        sched_yield();
    }
}

// What one rank of a domain sees.
struct Rank {
    const CommContext *ctx;
    uint64_t rank, ranks, writer, reader;

    explicit Rank(int64_t context)
        : ctx(cells::context(context)),
          rank(ctx->rankId),
          ranks(ctx->rankNum),
          writer((rank + ranks - 1) % ranks),
          reader((rank + 1) % ranks) {}

    uint8_t *window(uint64_t of, uint64_t offset) const {
        return cells::window<uint8_t>(ctx, static_cast<uint32_t>(of), offset);
    }

    int32_t *cell(uint64_t of, const Exchange &exchange, uint64_t who) const {
        return reinterpret_cast<int32_t *>(window(of, exchange.cells + who * kWord));
    }
};

// One exchange: every chunk goes once round the ring.
inline void ring(const Rank &me, const Exchange &exchange, const Rows &rows, uint64_t earlier, bool fresh) {
    const auto base = static_cast<uint32_t>(earlier * exchange.per_dispatch + exchange.before);
    const int32_t *arrivals = me.cell(me.rank, exchange, me.writer);
    const uint8_t *mine = me.window(me.rank, exchange.data);
    uint8_t *theirs = me.window(me.reader, exchange.data);
    for (uint64_t hop = 0; hop < me.ranks; ++hop) {
        if (hop > 0) await(arrivals, base + static_cast<uint32_t>(hop));
        const Range bytes = chunk(exchange.nbytes, me.ranks, (me.rank + me.ranks - hop) % me.ranks);
        fill(theirs, bytes, [&](uint64_t at, uint64_t size) {
            uint32_t sum = partial(rows, static_cast<uint32_t>(at / kWord));
            if (hop > 0) sum += load(mine, at, size);
            if (fresh) sum += load(theirs, at, size);
            return sum;
        });
        cells::add(me.cell(me.reader, exchange, me.rank), 1);
    }
    await(arrivals, base + static_cast<uint32_t>(me.ranks));
}

// Copies a rank's complete chunk out of a window; returns how many bytes it has.
inline uint64_t copy_out(const uint8_t *from, const Exchange &exchange, const Rank &me, uint8_t *output) {
    const Range bytes = chunk(exchange.nbytes, me.ranks, me.rank);
    memcpy(output, from + bytes.start, bytes.end - bytes.start);
    return bytes.end - bytes.start;
}

}  // namespace decode
