import torch
from simpler.task_interface import CallConfig, CommBufferSpec, DataType, TaskArgs, TensorArgType
from pypto.runtime.tensor_arg import make_tensor_arg
from pypto.runtime.distributed_runner import _submit_chip


def _alloc_intermediates(tensors, world_size=1):
    tensors["__comm_d0_ord"] = [torch.zeros((1,), dtype=torch.int32).share_memory_() for _ in range(max(world_size, 1))]
    tensors["__comm_d1_ord"] = [torch.zeros((1,), dtype=torch.int32).share_memory_() for _ in range(max(world_size, 1))]
    tensors["bank__ssa_v0"] = torch.zeros((2, 64), dtype=torch.int32).share_memory_()


def mixed(orch, _args, config, *, tensors, callables, sub_ids, _keep, world_size, _domain_provider=None):
    offset = tensors["offset"]
    scale = tensors["scale"]
    marked = tensors["marked"]
    N = tensors["x"].shape[1]
    with (_domain_provider or orch.allocate_domain)(
        name="comm_d0",
        workers=[*range(world_size)],
        window_size=(((((64 * 4) + 31) // 32) * 32)) + (((((world_size * 4) + 31) // 32) * 32)),
        buffers=[
            CommBufferSpec(name="data", dtype="opaque", count=(64 * 4), nbytes=((((64 * 4) + 31) // 32) * 32)),
            CommBufferSpec(
                name="signal", dtype="opaque", count=(world_size * 4), nbytes=((((world_size * 4) + 31) // 32) * 32)
            ),
        ],
    ) as __comm_d0:
        with (_domain_provider or orch.allocate_domain)(
            name="comm_d1",
            workers=[1, 0],
            window_size=(((((64 * 4) + 31) // 32) * 32)) + ((((8 + 31) // 32) * 32)),
            buffers=[
                CommBufferSpec(name="data", dtype="opaque", count=(64 * 4), nbytes=((((64 * 4) + 31) // 32) * 32)),
                CommBufferSpec(name="signal", dtype="opaque", count=8, nbytes=(((8 + 31) // 32) * 32)),
            ],
        ) as __comm_d1:
            half = (N // 2)
            tensors["bank__ssa_v0"][0:2, 0:N] = tensors["x"][0:2, 0:N]
            tensors["bank__ssa_v1"] = tensors["bank__ssa_v0"]
            tensors["bank__ssa_v1"][0:1, half:half + half] = tensors["x"][1:2, 0:half]
            tensors["bank__ssa_v2"] = tensors["bank__ssa_v1"]
            for r in range(0, world_size, 1):
                tensors["row__ssa_v0"] = tensors["bank__ssa_v2"][r, 0:N]
                tensors["sum__ssa_v0"] = tensors["y"][r, 0:N]
                _ta_0 = TaskArgs()
                _ta_0.add_tensor(make_tensor_arg(orch._worker, tensors["row__ssa_v0"]), TensorArgType.INPUT)
                _ta_0.add_tensor(make_tensor_arg(orch._worker, tensors["sum__ssa_v0"]), TensorArgType.OUTPUT_EXISTING)
                _ta_0.add_tensor(__comm_d0[r].buffers["data"].tensor(shapes=(64,), dtype=DataType.INT32), TensorArgType.INOUT)
                _ta_0.add_tensor(make_tensor_arg(orch._worker, tensors["__comm_d0_ord"][r]), TensorArgType.INOUT)
                _ta_0.add_scalar(__comm_d0[r].buffers["data"].base - __comm_d0[r].local_window_base)
                _ta_0.add_scalar(__comm_d0[r].buffers["signal"].base - __comm_d0[r].local_window_base)
                _ta_0.add_scalar(__comm_d0[r].device_ctx)
                _ta_0.add_scalar(__comm_d0[r].domain_size)
                _keep.append(_ta_0)
                _submit_chip(orch, callables["sum"], _ta_0, config, r)
                tensors["sum__ssa_v1"] = tensors["sum__ssa_v0"]
            for q in range((world_size - 1), -1, -1):
                tensors["part"] = tensors["y"][q:q + 1, 0:N]
                tensors["total"] = tensors["z"][q]
                _ta_1 = TaskArgs()
                _ta_1.add_tensor(make_tensor_arg(orch._worker, tensors["part"]), TensorArgType.INPUT)
                _ta_1.add_tensor(make_tensor_arg(orch._worker, tensors["total"]), TensorArgType.OUTPUT_EXISTING)
                _ta_1.add_tensor(make_tensor_arg(orch._worker, tensors["__comm_d1_ord"][q]), TensorArgType.INOUT)
                _ta_1.add_scalar(__comm_d1[q].buffers["data"].base - __comm_d1[q].local_window_base)
                _ta_1.add_scalar(__comm_d1[q].buffers["signal"].base - __comm_d1[q].local_window_base)
                _ta_1.add_scalar(__comm_d1[q].device_ctx)
                _keep.append(_ta_1)
                _submit_chip(orch, callables["sum"], _ta_1, config, q)
            if (offset < 0):
                distance = abs(offset)
            else:
                distance = offset
            first = int((float(max(distance, 1)) * scale))
            if ((not marked) or (scale <= 0.000000)):
                tensors["spare"] = tensors["z"][0, 0:4]
                tensors["out__phi"] = tensors["spare"]
            else:
                tensors["out__phi"] = tensors["marks"]
            _ta_2 = TaskArgs()
            if "filled" not in tensors:
                tensors["filled"] = torch.zeros((8,), dtype=torch.int32).share_memory_()
            _ta_2.add_tensor(make_tensor_arg(orch._worker, tensors["filled"]), TensorArgType.OUTPUT_EXISTING)
            _ta_2.add_scalar(first)
            _ta_2_config = CallConfig()
            _ta_2_config.aicpu_thread_num = config.aicpu_thread_num
            _keep.append(_ta_2)
            orch.submit_next_level(callables["builtin.tensor.fill__int32"], _ta_2, _ta_2_config, worker=1)
            _ta_3 = TaskArgs()
            _ta_3.add_tensor(make_tensor_arg(orch._worker, tensors["filled"]), TensorArgType.INPUT)
            _ta_3.add_tensor(make_tensor_arg(orch._worker, tensors["out__phi"]), TensorArgType.INOUT)
            orch.submit_sub(sub_ids["tally"], _ta_3)

mixed._pypto_distributed_entry = True
