//! Order between runs and within them: fences, what waits for them, and what tasks see.

use pto_simpler_sys::{Access, Call, ChipId, DevicePlace, DomainAllocation, Orchestrator, TensorPlace};

use super::super::rig::{Gate, Must, Rig, args, fresh, i32s, packed, same, to_i32};
use super::super::{BackendFactory, Outcome, Stop};
use crate::kernels;

/// Tasks of one chip that touch the same memory run in the order of their submission, within a run and across runs.
pub fn tasks_of_one_chip_see_their_predecessors(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let resident = rig.backend.alloc(ChipId(0), 16).must("alloc")?;
    let place = TensorPlace::Resident(resident);
    rig.run(|o| {
        rig.store(o, ChipId(0), place, 4, 10)?;
        rig.add(o, ChipId(0), place, 4, 5)?;
        rig.add(o, ChipId(0), place, 4, 100)
    })?;
    let mut runs = Vec::new();
    for _ in 0..6 {
        runs.push(rig.submit(|o| rig.add(o, ChipId(0), place, 4, 1000))?.0);
    }
    for run in runs {
        rig.succeeds(run)?;
    }
    let words = to_i32(&rig.peek(DevicePlace::Resident(resident), 16)?);
    same("sum of all tasks", words, vec![6115, 6116, 6117, 6118])?;
    rig.finish()
}

/// What one run leaves in a window or in host memory, the next run's tasks find, on every chip.
pub fn a_run_sees_the_results_of_the_previous_run(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let memory: Vec<_> =
        (0..2).map(|chip| rig.backend.alloc(ChipId(chip), 8).must("alloc")).collect::<Result<_, _>>()?;
    let host = [rig.host(&[0; 8])?, rig.host(&[0; 8])?];
    let each = |o: &dyn Orchestrator, task: &dyn Fn(ChipId, TensorPlace, TensorPlace) -> Outcome| -> Outcome {
        let _ = o;
        (0u32..).zip(memory.iter().zip(host)).try_for_each(|(chip, (device, host))| {
            task(ChipId(chip), TensorPlace::Resident(*device), TensorPlace::Host(host))
        })
    };
    let (first, ()) =
        rig.submit(|o| each(o, &|chip, device, _| rig.store(o, chip, device, 2, 20 + u64::from(chip.0))))?;
    let (second, ()) = rig.submit(|o| each(o, &|chip, device, host| rig.copy_task(o, chip, device, host, 2)))?;
    rig.succeeds(first)?;
    rig.succeeds(second)?;
    same("copied on chip 0", rig.host_i32(host[0], 2)?, vec![20, 21])?;
    same("copied on chip 1", rig.host_i32(host[1], 2)?, vec![21, 22])?;
    rig.finish()
}

/// Runs `control` in the build of a second run, while the first one is held.
fn overtakes<F>(rig: &Rig<'_>, gate: &Gate<'_>, control: F) -> Outcome
where
    F: FnOnce(&dyn Orchestrator) -> Outcome + Send,
{
    rig.while_held(gate, "control of the next run was done", |passed| {
        let (run, ()) = rig.submit(|o| {
            control(o)?;
            passed.mark();
            Ok(())
        })?;
        rig.succeeds(run)
    })
}

/// A control copy waits for the fence of the previous run: a reset never overtakes the tasks that still use the
/// window.
pub fn a_copy_waits_for_the_previous_runs_fence(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let resident = rig.backend.alloc(ChipId(0), 8).must("alloc")?;
    let (first, gate) = rig.held()?;
    overtakes(&rig, &gate, |o| rig.write(o, DevicePlace::Resident(resident), &[1; 8]))?;
    rig.succeeds(first)?;
    drop(gate);
    rig.finish()
}

/// A control copy out of the device waits for the fence of the previous run.
pub fn a_copy_out_waits_for_the_previous_runs_fence(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let resident = rig.backend.alloc(ChipId(0), 8).must("alloc")?;
    let (first, gate) = rig.held()?;
    overtakes(&rig, &gate, |o| rig.read(o, DevicePlace::Resident(resident), 8).map(|_| ()))?;
    rig.succeeds(first)?;
    drop(gate);
    rig.finish()
}

/// A batch of control copies waits for the fence of the previous run.
pub fn a_batch_waits_for_the_previous_runs_fence(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let resident = rig.backend.alloc(ChipId(0), 8).must("alloc")?;
    let (first, gate) = rig.held()?;
    overtakes(&rig, &gate, |o| {
        let mut results = Vec::new();
        let copy = rig.copy(DevicePlace::Resident(resident), &[1; 8])?;
        o.copy_batch(&[copy], &mut results).must("copy_batch")
    })?;
    rig.succeeds(first)?;
    drop(gate);
    rig.finish()
}

/// An allocation waits for the fence of the previous run.
pub fn an_allocation_waits_for_the_previous_runs_fence(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let (first, gate) = rig.held()?;
    overtakes(&rig, &gate, |o| rig.domain(o, &packed(2, &[64])).map(|_| ()))?;
    rig.succeeds(first)?;
    drop(gate);
    rig.finish()
}

/// Finding a retained domain does not wait: it is done while the previous run is still held.
pub fn finding_a_retained_domain_does_not_wait(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    rig.needs_retention()?;
    if rig.depth.guaranteed() < 2 {
        return Err(Stop::Skipped(format!("at depth {:?} the submission itself may wait", rig.depth)));
    }
    let (name, request) = (fresh("kept"), packed(2, &[64]));
    let domain = rig.run(|o| rig.retained(o, &name, &request))?;
    let (first, gate) = rig.held()?;
    let (second, found) = rig.submit(|o| {
        let mut reply = DomainAllocation::new();
        o.get_or_allocate_domain(&name, &request, true, &mut reply).must("get_or_allocate_domain")?;
        Ok(reply.id())
    })?;
    same("domain found while a run is held", found, Some(domain.id))?;
    gate.open()?;
    rig.succeeds(first)?;
    rig.succeeds(second)?;
    drop(gate);
    rig.finish()
}

fn outs(rig: &Rig<'_>) -> Result<[pto_simpler_sys::HostBufferId; 2], Stop> {
    Ok([rig.host(&[0; 4])?, rig.host(&[0; 4])?])
}

/// Chips run at the same time: a handshake, in which each rank waits for the other's signal, ends with [2, 1].
pub fn chips_run_at_the_same_time(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let outs = outs(&rig)?;
    rig.run(|o| {
        let domain = rig.domain(o, &packed(2, &[64]))?;
        for (rank, out) in outs.iter().enumerate() {
            let chip = domain.reply.member(rank).must("member")?.chip;
            let args = rig.handshake(&domain, rank, *out, 1)?;
            o.submit_next_level(rig.callable(kernels::HANDSHAKE)?, &args, None, chip).must("pto_handshake")?;
        }
        Ok(())
    })?;
    let seen = [rig.host_i32(outs[0], 1)?, rig.host_i32(outs[1], 1)?].concat();
    same("cells that the ranks saw", seen, vec![2, 1])?;
    rig.finish()
}

/// Signals go to the other ranks at the given offset, whatever order the ranks have on the chips.
pub fn signals_reach_the_other_ranks_cell(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let outs = outs(&rig)?;
    rig.run(|o| {
        let mut request = packed(2, &[64, 16]);
        request.workers.reverse();
        let domain = rig.domain(o, &request)?;
        for rank in 0..2 {
            let member = *domain.reply.member(rank).must("member")?;
            let signal =
                args([i32s(domain.tensor(rank, 1)?, 4, Access::NoDependency)], [member.device_context, 72]);
            o.submit_next_level(rig.callable(kernels::SIGNAL)?, &signal, None, member.chip).must("pto_signal")?;
        }
        for (rank, out) in outs.iter().enumerate() {
            let member = *domain.reply.member(rank).must("member")?;
            let out = i32s(TensorPlace::Host(*out), 1, Access::Output);
            let wait = args([out], [member.device_context, 72, 1]);
            o.submit_next_level(rig.callable(kernels::AWAIT)?, &wait, None, member.chip).must("pto_await")?;
        }
        Ok(())
    })?;
    let seen = [rig.host_i32(outs[0], 1)?, rig.host_i32(outs[1], 1)?].concat();
    same("cells that the ranks saw", seen, vec![2, 1])?;
    rig.finish()
}

/// A retained, reset window gives [2, 1] each time; without the reset the cells go on counting.
pub fn a_reset_makes_each_run_see_a_fresh_window(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    rig.needs_retention()?;
    let (name, request, zeros) = (fresh("kept"), packed(2, &[64]), rig.host(&[0; 64])?);
    for (reset, threshold, expected) in
        [(false, 1, [2, 1]), (true, 1, [2, 1]), (true, 1, [2, 1]), (false, 2, [4, 2])]
    {
        let outs = outs(&rig)?;
        rig.run(|o| {
            let domain = rig.retained(o, &name, &request)?;
            for rank in (0..2).filter(|_| reset) {
                let src = pto_simpler_sys::CopySource::Host(zeros);
                let copy = pto_simpler_sys::CopyTo { dst: domain.place(rank, 0)?, src, nbytes: 64 };
                o.copy_to(&copy).must("reset")?;
            }
            for (rank, out) in outs.iter().enumerate() {
                let chip = domain.reply.member(rank).must("member")?.chip;
                // Rank 0 hears 2 from rank 1, and rank 1 hears 1 from rank 0, per run since the reset.
                let args = rig.handshake(&domain, rank, *out, if rank == 0 { threshold * 2 } else { threshold })?;
                o.submit_next_level(rig.callable(kernels::HANDSHAKE)?, &args, None, chip).must("handshake")?;
            }
            Ok(())
        })?;
        let seen = [rig.host_i32(outs[0], 1)?, rig.host_i32(outs[1], 1)?].concat();
        same("cells that the ranks saw", seen, expected.to_vec())?;
    }
    rig.finish()
}

/// Device calls outside runs are refused while runs are in flight, and allowed again afterwards.
pub fn device_calls_are_refused_while_runs_are_in_flight(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let resident = rig.backend.alloc(ChipId(0), 8).must("alloc")?;
    let out = rig.host(&[0; 8])?;
    let place = DevicePlace::Resident(resident);
    let copy = rig.copy(place, &[6; 8])?;
    let (run, gate) = rig.held()?;
    let refusals = [
        (Call::CopyTo, rig.backend.copy_to(&copy).map(|()| None)),
        (Call::CopyFrom, rig.backend.copy_from(out, place, 8).map(|()| None)),
        (Call::Alloc, rig.backend.alloc(ChipId(0), 8).map(Some)),
        (Call::Free, rig.backend.free(resident).map(|()| None)),
    ];
    gate.open()?;
    rig.succeeds(run)?;
    for (call, result) in refusals {
        super::super::rig::refused(&format!("{call} while {run} is in flight"), call, result)?;
    }
    same("device memory", rig.peek(place, 8)?, vec![0; 8])?;
    rig.backend.copy_to(&copy).must("copy_to after the run")?;
    same("device memory", rig.peek(place, 8)?, vec![6; 8])?;
    drop(gate);
    rig.finish()
}
