"""As much of torch as generated code needs for its intermediates: zeros in shared memory."""

import ctypes
import mmap

int32 = "int32"


class Tensor:
    def __init__(self, shape):
        self.shape, self.nbytes = tuple(shape), 4
        for n in shape:
            self.nbytes *= n
        self._memory = mmap.mmap(-1, self.nbytes)

    def share_memory_(self):
        return self

    def data_ptr(self):
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


def zeros(shape, dtype=int32):
    assert dtype == int32, dtype
    return Tensor(shape)
