import torch
from simpler.buffer import AccessMode, BackendKind, mint_owner_instance_id, wrap_fork_inherited
from simpler.task_interface import DataType, Tensor

_OWNER = mint_owner_instance_id()
_buffers = {}


def make_tensor_arg(worker, arg):
    assert worker is not None
    if isinstance(arg, Tensor):
        return arg
    if not isinstance(arg, torch.Tensor):
        raise ValueError(f"unsupported tensor dtype: {arg.dtype}")
    address = arg.data_ptr()
    if address not in _buffers:
        _buffers[address] = wrap_fork_inherited(
            address,
            arg.nbytes,
            _OWNER,
            len(_buffers) + 1,
            access=AccessMode.READWRITE,
            backend_kind=BackendKind.FORK_SHM,
        )
    return _buffers[address].tensor(arg.shape, DataType.INT32)
