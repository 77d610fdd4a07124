import torch
from simpler.task_interface import CallConfig, CommBufferSpec, DataType, TaskArgs, TensorArgType
from pypto.runtime.tensor_arg import make_tensor_arg
from pypto.runtime.distributed_runner import _submit_chip


def _alloc_intermediates(tensors, world_size=1):
    tensors["__comm_d0_ord"] = [torch.zeros((1,), dtype=torch.int32).share_memory_() for _ in range(max(world_size, 1))]
    tensors["scratch"] = torch.zeros((8,), dtype=torch.int32).share_memory_()


def host_orch(orch, _args, config, *, tensors, callables, sub_ids, _keep, world_size, _domain_provider=None):
    step = tensors["step"]
    with (_domain_provider or orch.allocate_domain)(
        name="comm_d0",
        workers=[*range(world_size)],
        window_size=((((64 * 4) + 31) // 32) * 32) + ((((world_size * 4) + 31) // 32) * 32),
        buffers=[
            CommBufferSpec(name="payload", dtype="opaque", count=(64 * 4), nbytes=((((64 * 4) + 31) // 32) * 32)),
            CommBufferSpec(
                name="signal", dtype="opaque", count=(world_size * 4), nbytes=((((world_size * 4) + 31) // 32) * 32)
            ),
        ],
    ) as __comm_d0:
        for r in range(0, world_size, 1):
            tensors["x_row"] = tensors["x"][r, 0 : tensors["x"].shape[1]]
            tensors["y_row"] = tensors["y"][r]
            _ta_0 = TaskArgs()
            _ta_0.add_tensor(make_tensor_arg(orch._worker, tensors["x_row"]), TensorArgType.INPUT)
            _ta_0.add_tensor(make_tensor_arg(orch._worker, tensors["y_row"]), TensorArgType.OUTPUT_EXISTING)
            _ta_0.add_tensor(make_tensor_arg(orch._worker, tensors["__comm_d0_ord"][r]), TensorArgType.INOUT)
            base = __comm_d0[r].local_window_base
            _ta_0.add_scalar(__comm_d0[r].buffers["payload"].base - base)
            _ta_0.add_scalar(__comm_d0[r].buffers["signal"].base - base)
            _ta_0.add_scalar(__comm_d0[r].device_ctx)
            _keep.append(_ta_0)
            _submit_chip(orch, callables["allreduce"], _ta_0, config, r)
        _ta_1 = TaskArgs()
        _ta_1.add_tensor(make_tensor_arg(orch._worker, tensors["scratch"]), TensorArgType.OUTPUT_EXISTING)
        _ta_1.add_scalar(step)
        _keep.append(_ta_1)
        _submit_chip(orch, callables["fill"], _ta_1, config, None)
    _ta_2 = TaskArgs()
    _ta_2.add_tensor(make_tensor_arg(orch._worker, tensors["scratch"]), TensorArgType.INPUT)
    _ta_2.add_tensor(make_tensor_arg(orch._worker, tensors["marks"]), TensorArgType.INOUT)
    orch.submit_sub(sub_ids["tally"], _ta_2)
    _ta_3 = TaskArgs()
    _ta_3.add_tensor(make_tensor_arg(orch._worker, tensors["marks"]), TensorArgType.INOUT)
    orch.submit_sub(sub_ids["report"], _ta_3)


host_orch._pypto_distributed_entry = True
