"""The sub-worker functions of the portable kernel library, as Python sees them."""

import os
import time

# The simulated chips give up on a kernel that waits longer than this; tests hold some longer than the default 10 s.
os.environ.setdefault("SIMPLER_SCHEDULER_TIMEOUT_MS", "120000")


def _words(args, index):
    """The tensor's elements; the buffer that comes with it may be longer."""
    count = 1
    for n in args[index].shapes:
        count *= n
    return args[index].buffer.cast("B").cast("i")[:count]


def _signed(value):
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def pto_gate(args):
    words = _words(args, 0)
    words[1] = 1
    while words[0] == 0:
        time.sleep(0.001)


def pto_sub_add(args):
    words = _words(args, 0)
    for i in range(len(words)):
        words[i] = _signed(words[i] + args.scalar(0))


def pto_sub_fail(args):
    raise ValueError(f"failed on purpose with code {args.scalar(0)}")
