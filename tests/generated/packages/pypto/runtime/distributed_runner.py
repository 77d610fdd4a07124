def _submit_chip(orch, callable_id, task_args, config, worker):
    # What is read off the orchestrator must have been set for this very call.
    assert orch._dfx_dispatch_idx == {}
    assert isinstance(orch._dfx_chip_names[id(callable_id)], str)
    if worker is None:
        worker = orch._pypto_commless_seq % orch._pypto_chip_count
        orch._pypto_commless_seq += 1
    assert config.output_prefix == ""
    return orch.submit_next_level(callable_id, task_args, config, worker=worker)
