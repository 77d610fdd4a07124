//! Tasks: what a submission refuses, groups, failures, sub-workers, scratch and scopes.

use pto_simpler_sys::{
    Access, BackendError, BuildFailed, Call, CallableId, CallbackError, ChipId, DataType, DomainRequest,
    FailureKind, Family, NamedBuffer, Orchestrator, RunState, ScratchId, Shape, SubmitError, TaskArgs, TensorArg,
    TensorPlace,
};

use super::super::rig::{Must, Rig, args, broken, ensure, i32s, packed, refused, refused_error, same};
use super::super::{BackendFactory, Outcome, Stop};
use crate::kernels;

/// Builds a run in which each submission must be refused; the run is then empty and succeeds, and the worker goes
/// on.
fn all_refused<F>(factory: &dyn BackendFactory, chips: u32, body: F) -> Outcome
where
    F: FnOnce(&Rig<'_>, &dyn Orchestrator) -> Outcome,
{
    let rig = Rig::start(factory, chips)?;
    rig.run(|o| body(&rig, o))?;
    rig.is_usable()?;
    rig.finish()
}

fn refused_task(what: &str, result: Result<(), BackendError>) -> Outcome {
    refused(what, Call::SubmitNextLevel, result)
}

fn refused_group(what: &str, result: Result<(), BackendError>) -> Outcome {
    refused(what, Call::SubmitNextLevelGroup, result)
}

/// Scalars arrive in order and with their sign, tensors with their sizes.
pub fn arguments_arrive_unchanged(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let (a, b) = (rig.host(&[0xFF; 32])?, rig.host(&[0; 16])?);
    rig.run(|o| {
        rig.store(o, ChipId(0), TensorPlace::Host(a), 6, u64::from(u32::MAX - 1))?;
        rig.copy_task(o, ChipId(0), TensorPlace::Host(a), TensorPlace::Host(b), 3)
    })?;
    same("stored", rig.host_i32(a, 8)?, vec![-2, -1, 0, 1, 2, 3, -1, -1])?;
    same("copied", rig.host_i32(b, 4)?, vec![-2, -1, 0, 0])?;
    rig.finish()
}

/// A tensor with an offset spans exactly its own bytes.
pub fn a_tensor_spans_its_own_bytes(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let buffer = rig.host(&[0; 32])?;
    rig.run(|o| {
        let mut tensor = i32s(TensorPlace::Host(buffer), 2, Access::Output);
        tensor.byte_offset = 12;
        o.submit_next_level(rig.callable(kernels::STORE)?, &args([tensor], [7]), None, ChipId(0)).must("submit")
    })?;
    same("buffer", rig.host_i32(buffer, 8)?, vec![0, 0, 0, 7, 8, 0, 0, 0])?;
    rig.finish()
}

/// A chip that does not exist is refused.
pub fn a_task_on_an_unknown_chip_is_refused(factory: &dyn BackendFactory) -> Outcome {
    all_refused(factory, 2, |rig, o| {
        let args = args([i32s(TensorPlace::Host(rig.host(&[0; 8])?), 2, Access::Output)], [1]);
        for chip in [2, u32::MAX] {
            let result = o.submit_next_level(rig.callable(kernels::STORE)?, &args, None, ChipId(chip));
            refused_task(&format!("chip {chip} of 2"), result)?;
        }
        Ok(())
    })
}

/// An id that was never given out is refused.
pub fn an_unknown_callable_is_refused(factory: &dyn BackendFactory) -> Outcome {
    all_refused(factory, 1, |rig, o| {
        let unknown = CallableId::new(u32::MAX, u32::MAX);
        let args = args([i32s(TensorPlace::Host(rig.host(&[0; 8])?), 2, Access::Output)], [1]);
        refused_task("an unknown callable", o.submit_next_level(unknown, &args, None, ChipId(0)))?;
        let group = o.submit_next_level_group(unknown, &[args], None, &[ChipId(0)]);
        refused_group("an unknown callable in a group", group)
    })
}

/// A callable of another kind is refused: a sub-worker function on a chip, a chip kernel in a sub-worker.
pub fn a_callable_of_another_kind_is_refused(factory: &dyn BackendFactory) -> Outcome {
    all_refused(factory, 1, |rig, o| {
        rig.needs_sub_workers()?;
        let args = args([i32s(TensorPlace::Host(rig.host(&[0; 8])?), 2, Access::InOut)], [1]);
        let result = o.submit_next_level(rig.callable(kernels::SUB_ADD)?, &args, None, ChipId(0));
        refused_task("a sub-worker function on a chip", result)?;
        let result = o.submit_sub(rig.callable(kernels::ADD)?, &args);
        refused("a chip kernel in a sub-worker", Call::SubmitSub, result)
    })
}

/// Arguments that do not match the signature in number are refused; runtimes crash on them.
pub fn a_wrong_number_of_arguments_is_refused(factory: &dyn BackendFactory) -> Outcome {
    all_refused(factory, 1, |rig, o| {
        let tensor = i32s(TensorPlace::Host(rig.host(&[0; 8])?), 2, Access::InOut);
        let add = rig.callable(kernels::ADD)?;
        for (what, args) in [
            ("no arguments", TaskArgs::new()),
            ("no scalar", args([tensor], [])),
            ("no tensor", args([], [1])),
            ("a tensor too many", args([tensor, tensor], [1])),
            ("a scalar too many", args([tensor], [1, 2])),
        ] {
            refused_task(what, o.submit_next_level(add, &args, None, ChipId(0)))?;
            let group = o.submit_next_level_group(add, &[args], None, &[ChipId(0)]);
            refused_group(&format!("{what}, in a group"), group)?;
        }
        Ok(())
    })
}

/// Arguments over a limit of the capabilities are refused, whoever would take them, and nothing is queued: a runtime
/// that gets them loses the process that they were meant for. A callable of the library that no limit allows is
/// refused with the right arguments, too; a group is refused with its members.
pub fn arguments_over_a_limit_are_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let limits = rig.caps().limits;
    let tensor = i32s(TensorPlace::Host(rig.host(&[0; 64])?), 1, Access::InOut);
    let many = |tensors: u64, scalars: u64| {
        let mut args = TaskArgs::new();
        (0..tensors).for_each(|_| {
            args.tensor(tensor);
        });
        (0..scalars).for_each(|value| {
            args.scalar(value);
        });
        args
    };
    // A scalar takes at least its own 8 bytes.
    let heavy = limits.argument_bytes / 8 + 1;
    rig.run(|o| {
        let refused_both = |what: String, callable, args: TaskArgs| {
            refused_task(&what, o.submit_next_level(callable, &args, None, ChipId(0)))?;
            let group = o.submit_next_level_group(callable, &[args], None, &[ChipId(0)]);
            refused_group(&format!("{what}, in a group"), group)
        };
        let add = rig.callable(kernels::ADD)?;
        for (tensors, scalars) in [
            (u64::from(limits.tensors) + 1, 1),
            (1, u64::from(limits.scalars) + 1),
            (u64::from(limits.tensors) + 1, u64::from(limits.scalars) + 1),
            (1, heavy),
        ] {
            // What is practically no limit is not looked for.
            if tensors + scalars > 1 << 16 {
                continue;
            }
            let what = format!("{tensors} tensors and {scalars} scalars under {limits:?}");
            refused_both(what, add, many(tensors, scalars))?;
        }
        for name in kernels::CHIP {
            let signature = kernels::signature(name);
            let (tensors, scalars) = (signature.tensors.len() as u64, u64::from(signature.scalars));
            if tensors > limits.tensors.into() || scalars > limits.scalars.into() || scalars >= heavy {
                let what = format!("{name} under {limits:?}");
                refused_both(what, rig.callable(name)?, many(tensors, scalars))?;
            }
        }
        Ok(())
    })?;
    rig.is_usable()?;
    rig.finish()
}

/// A tensor outside its memory is refused: too long, an offset beyond the end, sizes that overflow.
pub fn a_tensor_out_of_bounds_is_refused(factory: &dyn BackendFactory) -> Outcome {
    all_refused(factory, 1, |rig, o| {
        let domain = rig.domain(o, &packed(1, &[16, 16]))?;
        let add = rig.callable(kernels::ADD)?;
        for place in [TensorPlace::Host(rig.host(&[0; 16])?), domain.tensor(0, 0)?] {
            let tensor = i32s(place, 4, Access::InOut);
            let huge = Shape::new(&[u32::MAX, u32::MAX, u32::MAX]).must("shape")?;
            let large = Shape::new(&[5]).must("shape")?;
            for (what, tensor) in [
                ("20 bytes of 16", TensorArg { shape: large, ..tensor }),
                ("an offset of 4", TensorArg { byte_offset: 4, ..tensor }),
                ("an offset beyond the end", TensorArg { byte_offset: 16, ..tensor }),
                ("an offset that overflows", TensorArg { byte_offset: u64::MAX - 3, ..tensor }),
                ("a shape that overflows", TensorArg { shape: huge, dtype: DataType::Int64, ..tensor }),
            ] {
                let result = o.submit_next_level(add, &args([tensor], [1]), None, ChipId(0));
                refused_task(&format!("{what} in {place:?}"), result)?;
            }
        }
        Ok(())
    })
}

/// An offset that is no multiple of the element size is refused.
pub fn a_misaligned_tensor_is_refused(factory: &dyn BackendFactory) -> Outcome {
    all_refused(factory, 1, |rig, o| {
        let mut tensor = i32s(TensorPlace::Host(rig.host(&[0; 16])?), 2, Access::InOut);
        tensor.byte_offset = 2;
        let result = o.submit_next_level(rig.callable(kernels::ADD)?, &args([tensor], [1]), None, ChipId(0));
        refused_task("an offset of 2 for 4-byte elements", result)
    })
}

/// A tensor that lives on another chip is refused, in windows and in resident memory.
pub fn a_tensor_on_another_chip_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let resident = rig.backend.alloc(ChipId(1), 16).must("alloc")?;
    rig.run(|o| {
        let domain = rig.domain(o, &DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("b", 16)]))?;
        let alone = rig.domain(o, &DomainRequest::packed([1], vec![NamedBuffer::bytes("b", 16)]))?;
        let no_member = TensorPlace::DomainBuffer { domain: alone.id, chip: ChipId(0), buffer: 0 };
        for (what, place) in [
            ("a window of chip 1", domain.tensor(1, 0)?),
            ("a domain without chip 0", no_member),
            ("resident memory of chip 1", TensorPlace::Resident(resident)),
        ] {
            let args = args([i32s(place, 4, Access::InOut)], [1]);
            let result = o.submit_next_level(rig.callable(kernels::ADD)?, &args, None, ChipId(0));
            refused_task(&format!("{what} for a task on chip 0"), result)?;
        }
        Ok(())
    })?;
    rig.is_usable()?;
    rig.finish()
}

/// Memory that is gone is refused: a released host buffer, freed resident memory, a freed domain, unknown ids.
pub fn a_tensor_in_memory_that_is_gone_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let host = rig.host(&[0; 16])?;
    rig.backend.release_buffer(host).must("release_buffer")?;
    let resident = rig.backend.alloc(ChipId(0), 16).must("alloc")?;
    rig.backend.free(resident).must("free")?;
    let domain = rig.run(|o| rig.domain(o, &packed(1, &[16])))?;
    rig.run(|o| {
        for place in [
            TensorPlace::Host(host),
            TensorPlace::Resident(resident),
            domain.tensor(0, 0)?,
            TensorPlace::Scratch(ScratchId::new(u32::MAX, 3)),
        ] {
            let args = args([i32s(place, 4, Access::InOut)], [1]);
            let result = o.submit_next_level(rig.callable(kernels::ADD)?, &args, None, ChipId(0));
            refused_task(&format!("{place:?}, which is gone"), result)?;
        }
        Ok(())
    })?;
    rig.is_usable()?;
    rig.finish()
}

/// A group is refused where its lists differ in length, are empty, or name a worker twice or an unknown one.
pub fn a_malformed_group_is_refused(factory: &dyn BackendFactory) -> Outcome {
    all_refused(factory, 2, |rig, o| {
        let store = rig.callable(kernels::STORE)?;
        let one = args([i32s(TensorPlace::Host(rig.host(&[0; 8])?), 2, Access::Output)], [1]);
        let two = [one.clone(), one.clone()];
        for (what, args, workers) in [
            ("an empty group", &two[..0], &[][..]),
            ("more workers than arguments", &two[..1], &[ChipId(0), ChipId(1)][..]),
            ("more arguments than workers", &two[..], &[ChipId(0)][..]),
            ("a worker twice", &two[..], &[ChipId(1), ChipId(1)][..]),
            ("an unknown worker", &two[..], &[ChipId(0), ChipId(2)][..]),
        ] {
            refused_group(what, o.submit_next_level_group(store, args, None, workers))?;
        }
        Ok(())
    })
}

/// A group starts on all its chips together: ranks that wait for each other end.
pub fn a_group_starts_on_all_its_chips(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 3)?;
    let outs = [rig.host(&[0; 4])?, rig.host(&[0; 4])?, rig.host(&[0; 4])?];
    rig.run(|o| {
        let domain = rig.domain(o, &packed(3, &[64]))?;
        let mut all = Vec::new();
        let mut workers = Vec::new();
        for ((rank, out), threshold) in outs.iter().enumerate().zip([5, 4, 3]) {
            // Each rank waits for the signals of both others: 2 + 3, 1 + 3 and 1 + 2.
            all.push(rig.handshake(&domain, rank, *out, threshold)?);
            workers.push(domain.reply.member(rank).must("member")?.chip);
        }
        o.submit_next_level_group(rig.callable(kernels::HANDSHAKE)?, &all, None, &workers).must("group")
    })?;
    let seen = [rig.host_i32(outs[0], 1)?, rig.host_i32(outs[1], 1)?, rig.host_i32(outs[2], 1)?].concat();
    same("cells that the ranks saw", seen, vec![5, 4, 3])?;
    rig.finish()
}

/// A failed task fails its run: the end is reported once, with the chip and the kind, and the run counts as ended.
pub fn a_failed_task_is_reported_with_its_chip(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let (run, ()) = rig.submit(|o| rig.fail(o, ChipId(1)))?;
    let outcome = rig.outcome(run);
    let Err(error) = outcome.result else { return broken(format!("{run} succeeded with a failing task")) };
    same("family", error.family(), Family::Backend)?;
    let failure = error.runtime().must("runtime failure")?;
    same("kind", failure.kind, FailureKind::Task)?;
    same("chip", failure.chip, Some(ChipId(1)))?;
    ensure!(!failure.type_name.is_empty() && !failure.message.is_empty(), "an empty report: {failure:?}");
    same("cleanup", outcome.cleanup, None)?;
    same("state", rig.backend.run_state(run), RunState::Ended)?;
    rig.backend.close().must("close after a failed task")?;
    rig.finish()
}

/// A failed task is final for the worker exactly where the capabilities say so: the failure says it, and the worker
/// recovers or refuses accordingly.
pub fn a_failed_task_is_final_as_the_capabilities_say(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let (run, ()) = rig.submit(|o| rig.fail(o, ChipId(0)))?;
    let Err(error) = rig.outcome(run).result else { return broken(format!("{run} succeeded")) };
    same("whether the failure is final", error.must_reprepare(), rig.caps().failed_task_is_final)?;
    if !rig.caps().failed_task_is_final {
        rig.is_usable()?;
        rig.run(|o| rig.domain(o, &packed(1, &[64])).map(|_| ()))?;
    }
    rig.finish()
}

/// After a failed task the chips that did not fail are not left waiting: the run ends although a peer waits for a
/// signal that will never come.
pub fn a_failed_task_ends_peers_that_wait_for_it(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let out = rig.host(&[0; 4])?;
    let (run, ()) = rig.submit(|o| {
        let domain = rig.domain(o, &packed(2, &[64]))?;
        let chip = domain.reply.member(0).must("member")?.chip;
        let args = rig.handshake(&domain, 0, out, 1)?;
        o.submit_next_level(rig.callable(kernels::HANDSHAKE)?, &args, None, chip).must("pto_handshake")?;
        rig.fail(o, ChipId(1))
    })?;
    ensure!(rig.outcome(run).result.is_err(), "{run} succeeded with a failing task");
    rig.finish()
}

/// A failed task of one run does not touch the outcome of the runs around it.
pub fn a_failed_run_leaves_its_neighbours_alone(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    if rig.caps().failed_task_is_final {
        return Err(Stop::Skipped("a failed task is final".into()));
    }
    let out = rig.host(&[0; 8])?;
    let (before, ()) = rig.submit(|o| rig.store(o, ChipId(0), TensorPlace::Host(out), 2, 1))?;
    let (failing, ()) = rig.submit(|o| rig.fail(o, ChipId(0)))?;
    let (after, ()) = rig.submit(|o| rig.add(o, ChipId(0), TensorPlace::Host(out), 2, 10))?;
    rig.succeeds(before)?;
    ensure!(rig.outcome(failing).result.is_err(), "{failing} succeeded with a failing task");
    rig.succeeds(after)?;
    same("host memory", rig.host_i32(out, 2)?, vec![11, 12])?;
    rig.finish()
}

/// A sub-worker task computes in host memory.
pub fn a_sub_task_computes_in_host_memory(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.needs_sub_workers()?;
    let buffer = rig.host(&[1, 0, 0, 0, 2, 0, 0, 0])?;
    rig.run(|o| {
        let args = args([i32s(TensorPlace::Host(buffer), 2, Access::InOut)], [40]);
        o.submit_sub(rig.callable(kernels::SUB_ADD)?, &args).must("submit_sub")
    })?;
    same("host memory", rig.host_i32(buffer, 2)?, vec![41, 42])?;
    rig.finish()
}

/// A sub-worker takes host memory only, and its arguments are checked like a chip task's.
pub fn a_sub_task_refuses_device_memory_and_wrong_arguments(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.needs_sub_workers()?;
    let resident = rig.backend.alloc(ChipId(0), 8).must("alloc")?;
    let host = TensorPlace::Host(rig.host(&[0; 8])?);
    rig.run(|o| {
        let domain = rig.domain(o, &packed(1, &[8]))?;
        let add = rig.callable(kernels::SUB_ADD)?;
        let mut outside = i32s(host, 2, Access::InOut);
        outside.byte_offset = 4;
        for (what, args) in [
            ("resident memory", args([i32s(TensorPlace::Resident(resident), 2, Access::InOut)], [1])),
            ("a window", args([i32s(domain.tensor(0, 0)?, 2, Access::InOut)], [1])),
            ("no scalar", args([i32s(host, 2, Access::InOut)], [])),
            ("a tensor out of bounds", args([outside], [1])),
        ] {
            refused(what, Call::SubmitSub, o.submit_sub(add, &args))?;
        }
        Ok(())
    })?;
    rig.is_usable()?;
    rig.finish()
}

/// A failed sub-worker task fails its run, names no chip, and is never final.
pub fn a_failed_sub_task_is_not_final(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.needs_sub_workers()?;
    let (run, ()) =
        rig.submit(|o| o.submit_sub(rig.callable(kernels::SUB_FAIL)?, &args([], [3])).must("submit_sub"))?;
    let Err(error) = rig.outcome(run).result else { return broken(format!("{run} succeeded")) };
    let failure = error.runtime().must("runtime failure")?;
    same("chip", failure.chip, None)?;
    ensure!(!error.must_reprepare(), "a failed sub-worker task is reported as final: {error:?}");
    rig.is_usable()?;
    rig.finish()
}

/// Scratch passes results from task to task of one run; zero bytes are refused.
pub fn scratch_passes_results_between_tasks(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let out = rig.host(&[0; 8])?;
    rig.run(|o| {
        refused("scratch of zero bytes", Call::AllocScratch, o.alloc(0))?;
        let (a, b) = (o.alloc(8).must("alloc")?, o.alloc(8).must("alloc")?);
        ensure!(a != b, "two pieces of scratch share the id {a}");
        rig.store(o, ChipId(0), TensorPlace::Scratch(a), 2, 30)?;
        rig.store(o, ChipId(0), TensorPlace::Scratch(b), 2, 90)?;
        rig.copy_task(o, ChipId(0), TensorPlace::Scratch(a), TensorPlace::Host(out), 2)
    })?;
    same("what passed through scratch", rig.host_i32(out, 2)?, vec![30, 31])?;
    rig.finish()
}

/// Scratch lives as long as its run: a later run cannot name it.
pub fn scratch_ends_with_its_run(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let scratch = rig.run(|o| o.alloc(8).must("alloc"))?;
    rig.run(|o| {
        let args = args([i32s(TensorPlace::Scratch(scratch), 2, Access::Output)], [1]);
        let result = o.submit_next_level(rig.callable(kernels::STORE)?, &args, None, ChipId(0));
        refused_task("scratch of an earlier run", result)
    })?;
    rig.finish()
}

/// Tasks in nested scopes run like others, in order.
pub fn tasks_in_scopes_run(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let resident = rig.backend.alloc(ChipId(0), 8).must("alloc")?;
    let place = TensorPlace::Resident(resident);
    rig.run(|o| {
        let mut inner = Ok(());
        let result = o.scope(&mut || {
            inner = rig.store(o, ChipId(0), place, 2, 1);
            let nested = o.scope(&mut || rig.add(o, ChipId(0), place, 2, 10).map_err(|_| BuildFailed));
            nested.map_err(|_| BuildFailed)
        });
        result.must("scope")?;
        inner?;
        rig.add(o, ChipId(0), place, 2, 100)
    })?;
    let words = super::super::rig::to_i32(&rig.peek(pto_simpler_sys::DevicePlace::Resident(resident), 8)?);
    same("sum of the tasks", words, vec![111, 112])?;
    rig.finish()
}

/// A scope whose body fails says so, calls the body once, and leaves the build usable.
pub fn a_failed_scope_body_is_reported(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let out = rig.host(&[0; 8])?;
    rig.run(|o| {
        let mut calls = 0;
        let result = o.scope(&mut || {
            calls += 1;
            Err(BuildFailed)
        });
        ensure!(matches!(result, Err(CallbackError::Build(_))), "scope returned {result:?}");
        same("calls of the body", calls, 1)?;
        rig.store(o, ChipId(0), TensorPlace::Host(out), 2, 8)
    })?;
    same("what a task stored", rig.host_i32(out, 2)?, vec![8, 9])?;
    rig.finish()
}

fn nest(o: &dyn Orchestrator, levels: u32) -> Result<(), SubmitError> {
    if levels == 0 {
        return Ok(());
    }
    let mut inner = Ok(());
    let outer = o.scope(&mut || {
        inner = nest(o, levels - 1);
        if inner.is_ok() { Ok(()) } else { Err(BuildFailed) }
    });
    inner.and(outer)
}

/// Scopes nest as deep as the capabilities say, and not one deeper.
pub fn scopes_nest_to_the_limit(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let limit = rig.caps().limits.scope_depth;
    rig.run(|o| {
        nest(o, limit).must(&format!("{limit} nested scopes"))?;
        match nest(o, limit + 1) {
            Err(SubmitError::Backend(error)) => refused_error("one scope too many", Call::Scope, &error),
            other => broken(format!("{} nested scopes: {other:?}", limit + 1)),
        }
    })?;
    rig.finish()
}
