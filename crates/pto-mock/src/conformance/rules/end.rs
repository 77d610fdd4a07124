//! The last resort, and what is left at the end.

use pto_simpler_sys::{Access, Call, CallConfig, ChipId, DomainState, RunState, SubmitError, TensorPlace};

use super::super::rig::{
    Built, Must, Rig, args, broken, ensure, fresh, i32s, packed, refused, refused_submit, same,
};
use super::super::{BackendFactory, Outcome, Stop};
use crate::kernels;

/// `abandon` ends kernels that wait for ever: their run ends once, as a failure, and `close` is Ok afterwards.
pub fn abandon_ends_waiting_kernels(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let outs = [rig.host(&[0; 4])?, rig.host(&[0; 4])?];
    let (run, domain) = rig.submit(|o| {
        let domain = rig.domain(o, &packed(2, &[64]))?;
        for (rank, out) in outs.iter().enumerate() {
            let member = *domain.reply.member(rank).must("member")?;
            let out = i32s(TensorPlace::Host(*out), 1, Access::Output);
            let wait = args([out], [member.device_context, 0, 1]);
            o.submit_next_level(rig.callable(kernels::AWAIT)?, &wait, None, member.chip).must("pto_await")?;
        }
        Ok(domain)
    })?;
    same("state before", rig.backend.run_state(run), RunState::Running)?;
    let report = rig.backend.abandon();
    ensure!(report.left.is_empty(), "left after abandon: {:?}", report.left);
    ensure!(rig.outcome(run).result.is_err(), "{run} succeeded although its kernels waited for ever");
    rig.backend.close().must("close after abandon")?;
    same("ends", rig.ends.count(run), 1)?;
    same("state after", rig.backend.run_state(run), RunState::Ended)?;
    same("domain", rig.backend.domain_state(domain.id).must("domain_state")?, DomainState::Freed)?;
    rig.finish()
}

/// `abandon` reports every run in flight as ended, once each, in order.
pub fn abandon_ends_every_run_in_flight(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let (first, gate) = rig.held()?;
    let mut runs = vec![first];
    for _ in 1..rig.depth.guaranteed() {
        runs.push(rig.submit(|_| Ok(()))?.0);
    }
    rig.backend.abandon();
    for run in &runs {
        ensure!(rig.outcome(*run).result.is_err(), "{run} succeeded although it was abandoned");
    }
    same("order of the ends", rig.ends.runs(), runs)?;
    drop(gate);
    rig.finish()
}

/// `abandon` of an idle worker closes it; again, it has nothing to do.
pub fn abandon_closes_an_idle_worker(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.is_usable()?;
    rig.run(|o| rig.domain(o, &packed(1, &[64])).map(|_| ()))?;
    let report = rig.backend.abandon();
    ensure!(report.left.is_empty(), "left after abandon: {:?}", report.left);
    let again = rig.backend.abandon();
    ensure!(again.left.is_empty() && again.ended.is_empty(), "abandoned twice: {again:?}");
    let run = rig.fresh_run();
    let submitted = rig.backend.submit(run, &CallConfig::new(), &mut Built::new(|_| Ok(())));
    refused_submit("submit after abandon", submitted)?;
    refused("create_buffer after abandon", Call::CreateBuffer, rig.backend.create_buffer(8))?;
    rig.finish()
}

/// `abandon` before `start` closes the worker.
pub fn abandon_before_start_closes(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::unstarted(factory, 1)?;
    rig.backend.abandon();
    let events = std::sync::Arc::clone(&rig.ends);
    refused("start after abandon", Call::Start, rig.backend.start(events as _))?;
    rig.finish()
}

/// A submission that waits for a held run is let go by `abandon`: it comes back, and its run ends or was never
/// accepted.
pub fn abandon_lets_waiting_submissions_go(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let resident = rig.backend.alloc(ChipId(0), 8).must("alloc")?;
    let (first, gate) = rig.held()?;
    let second = rig.fresh_run();
    let (entered, in_build) = std::sync::mpsc::channel();
    let entered = std::sync::Mutex::new(entered);
    let submit = || {
        let (result, _) = rig.attempt(second, |o| {
            let _ = super::super::rig::lock(&entered).send(());
            let copy = rig.copy(pto_simpler_sys::DevicePlace::Resident(resident), &[1; 8])?;
            match o.copy_to(&copy) {
                // The build gives up on whatever the copy came to.
                Err(_) => broken("the copy was interrupted"),
                Ok(()) => Ok(()),
            }
        });
        result
    };
    let waits = rig.depth.guaranteed() >= 2;
    let result = std::thread::scope(|scope| {
        let submitting = scope.spawn(submit);
        if waits {
            // At depth 1 the build itself may have to wait.
            let _ = in_build.recv();
        }
        rig.backend.abandon();
        submitting.join().must("submitting thread")
    })?;
    ensure!(rig.outcome(first).result.is_err(), "{first} succeeded although it was abandoned");
    match result {
        Ok(()) => ensure!(rig.outcome(second).result.is_err(), "{second} succeeded although it was abandoned"),
        Err(SubmitError::Build(_) | SubmitError::Backend(_)) => {
            same("state of the refused run", rig.backend.run_state(second), RunState::Unknown)?;
        }
    }
    drop(gate);
    rig.finish()
}

/// Nothing is left in shared memory: not after a close with everything still allocated, not after `abandon`, not
/// after a close before the start.
pub fn nothing_is_left_in_shared_memory(factory: &dyn BackendFactory) -> Outcome {
    let Some(before) = factory.shared_memory() else {
        return Err(Stop::Skipped("the factory cannot list shared memory".into()));
    };
    let same_as_before = |what: &str| {
        let left: Vec<_> =
            factory.shared_memory().unwrap_or_default().into_iter().filter(|n| !before.contains(n)).collect();
        same(&format!("left in shared memory after {what}"), left, Vec::new())
    };
    {
        let rig = Rig::unstarted(factory, 2)?;
        rig.host(&[1; 64])?;
        rig.finish()?;
        same_as_before("a close before the start")?;
    }
    for abandoned in [false, true] {
        let rig = Rig::start(factory, 2)?;
        rig.host(&[1; 1 << 16])?;
        rig.backend.create_zeros(1 << 16).must("create_zeros")?;
        rig.backend.alloc(ChipId(1), 1 << 16).must("alloc")?;
        rig.run(|o| rig.domain(o, &packed(2, &[1 << 16])).map(|_| ()))?;
        if rig.needs_retention().is_ok() {
            rig.run(|o| rig.retained(o, &fresh("kept"), &packed(2, &[64])).map(|_| ()))?;
        }
        if abandoned {
            rig.backend.abandon();
        }
        rig.finish()?;
        same_as_before(if abandoned { "abandon" } else { "close" })?;
    }
    Ok(())
}
