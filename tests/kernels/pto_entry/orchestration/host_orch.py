"""The portable entry: leases the domain ``pto_entry`` on chips 0 and 1, then fails where ``code`` is not 0."""

from simpler.task_interface import CommBufferSpec


def host_orch(orch, _args, config, *, tensors, callables, sub_ids, _keep, world_size, _domain_provider=None):
    buffers = [CommBufferSpec(name="b", dtype="opaque", count=64, nbytes=64)]
    with (_domain_provider or orch.allocate_domain)(
        name="pto_entry", workers=[0, 1], window_size=64, buffers=buffers
    ):
        if tensors["code"] != 0:
            raise RuntimeError(f"told to fail with {tensors['code']}")


host_orch._pypto_distributed_entry = True
