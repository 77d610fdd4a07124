//! Runs: submission, acceptance, ends, order, depth, and what a build refuses.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use pto_simpler_sys::{
    Access, Backend, Call, CallConfig, ChipId, DomainState, RunId, RunOutcome, RunState, SubmitError, TensorPlace,
};

use super::super::rig::{
    Built, Must, Rig, args, broken, ensure, fresh, i32s, lock, packed, refused, refused_error, refused_submit, same,
};
use super::super::{BackendFactory, Outcome, Stop};
use crate::kernels;

/// A run without tasks is accepted and ends like any other.
pub fn an_empty_run_is_accepted_and_ends(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let (run, ()) = rig.submit(|_| Ok(()))?;
    rig.succeeds(run)?;
    same("ends", rig.ends.count(run), 1)?;
    rig.finish()
}

/// Each accepted run ends exactly once, and runs end in the order in which they were accepted.
pub fn runs_end_exactly_once_in_the_order_of_acceptance(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let mut accepted = Vec::new();
    for round in 0..12u32 {
        let out = rig.host(&[0; 8])?;
        let (run, ()) = rig.submit(|o| match round % 3 {
            0 => Ok(()),
            1 => rig.store(o, ChipId(0), TensorPlace::Host(out), 2, 1),
            _ => rig.domain(o, &packed(2, &[64])).map(|_| ()),
        })?;
        accepted.push(run);
    }
    for run in &accepted {
        rig.succeeds(*run)?;
    }
    same("order of the ends", rig.ends.runs(), accepted)?;
    rig.finish()
}

/// The builder is called once, on the submitting thread, and sees the id of its run.
pub fn the_builder_is_called_once_on_the_submitting_thread(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let run = rig.fresh_run();
    let (result, built) = rig.attempt(run, |o| Ok((o.run(), thread::current().id())));
    result.must("submit")?;
    same("calls", built.calls, 1)?;
    same("run and thread of the build", built.out.must("build")?, Ok((run, thread::current().id())))?;
    rig.succeeds(run)?;
    rig.finish()
}

/// A failed build cancels the run: `submit` says so, no end is reported, the run stays unknown, and the worker is
/// usable.
pub fn a_failed_build_cancels_the_run(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let run = rig.fresh_run();
    let out = rig.host(&[0; 8])?;
    let (result, built) = rig.attempt(run, |o| {
        rig.store(o, ChipId(0), TensorPlace::Host(out), 2, 1)?;
        broken::<()>("the builder gives up")
    });
    ensure!(matches!(result, Err(SubmitError::Build(_))), "submit returned {result:?}");
    same("calls", built.calls, 1)?;
    same("state of the run", rig.backend.run_state(run), RunState::Unknown)?;
    rig.backend.release_buffer(out).must("release an argument of the cancelled run")?;
    rig.is_usable()?;
    same("ends of the cancelled run", rig.ends.count(run), 0)?;
    rig.finish()
}

/// A failed build frees the domains that its run allocated.
pub fn a_failed_build_frees_its_domains(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    // The first domain may commit memory that stays (a communicator); compare after it.
    rig.run(|o| rig.domain(o, &packed(2, &[64])).map(|_| ()))?;
    let committed = rig.committed()?;
    let name = fresh("swept");
    let mut id = None;
    let (result, _) = rig.attempt(rig.fresh_run(), |o| {
        let mut reply = pto_simpler_sys::DomainAllocation::new();
        o.allocate_domain(&name, &packed(2, &[4096]), &mut reply).must("allocate_domain")?;
        id = reply.id();
        broken::<()>("the builder gives up")
    });
    ensure!(matches!(result, Err(SubmitError::Build(_))), "submit returned {result:?}");
    let id = id.must("id of the domain")?;
    same("state of the domain", rig.backend.domain_state(id).must("domain_state")?, DomainState::Freed)?;
    same("committed device memory", rig.committed()?, committed)?;
    rig.run(|o| {
        let mut reply = pto_simpler_sys::DomainAllocation::new();
        o.allocate_domain(&name, &packed(2, &[64]), &mut reply).must("allocate under the same name")
    })?;
    rig.finish()
}

/// A run id is used once: another submission under it is refused before anything is built.
pub fn a_run_id_is_used_once(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let (run, ()) = rig.submit(|_| Ok(()))?;
    rig.succeeds(run)?;
    let mut built = Built::new(|_| Ok(()));
    refused_submit("submit under a used id", rig.backend.submit(run, &CallConfig::new(), &mut built))?;
    same("builds", built.calls, 0)?;
    same("state of the first run", rig.backend.run_state(run), RunState::Ended)?;
    rig.is_usable()?;
    rig.finish()
}

/// Two submissions under one id that wait for their turn together give one run: the other one is refused before it
/// builds anything, although the id was free when it came.
pub fn two_submissions_under_one_id_give_one_run(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let (first, second) = (rig.fresh_run(), rig.fresh_run());
    let builds = AtomicU32::new(0);
    let twice = || {
        let mut built = Built::new(|_| {
            builds.fetch_add(1, Ordering::SeqCst);
            Ok(())
        });
        rig.backend.submit(second, &CallConfig::new(), &mut built)
    };
    let (result, results) = thread::scope(|scope| {
        let mut others = Vec::new();
        // Both find the id free, because this build has to end before either of them can have it.
        let (result, _) = rig.attempt(first, |_| {
            others.extend((0..2).map(|_| scope.spawn(twice)));
            thread::sleep(rig.grace());
            Ok(())
        });
        let results: Vec<_> = others.into_iter().map(|other| other.join().must("submitting thread")).collect();
        (result, results)
    });
    result.must("submit")?;
    let results = results.into_iter().collect::<Result<Vec<_>, _>>()?;
    same("submissions that were accepted", results.iter().filter(|result| result.is_ok()).count(), 1)?;
    rig.note_accepted(second);
    for result in results.into_iter().filter(Result::is_err) {
        refused_submit("submit under an id that was taken meanwhile", result)?;
    }
    same("builds under that id", builds.load(Ordering::SeqCst), 1)?;
    rig.succeeds(first)?;
    rig.succeeds(second)?;
    same("ends of the run", rig.ends.count(second), 1)?;
    rig.is_usable()?;
    rig.finish()
}

/// `run_state` says unknown, running, ended.
pub fn run_state_follows_a_run(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    same("state of a run never submitted", rig.backend.run_state(RunId(u64::MAX)), RunState::Unknown)?;
    let (run, gate) = rig.held()?;
    same("state of a held run", rig.backend.run_state(run), RunState::Running)?;
    same("ends of a held run", rig.ends.count(run), 0)?;
    gate.open()?;
    rig.succeeds(run)?;
    same("state of an ended run", rig.backend.run_state(run), RunState::Ended)?;
    drop(gate);
    rig.backend.close().must("close")?;
    same("state of an ended run after close", rig.backend.run_state(run), RunState::Ended)?;
    rig.finish()
}

/// `submit` inside a build of the same backend is refused, and the outer build goes on.
pub fn submit_inside_a_build_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let inner = rig.fresh_run();
    rig.run(|_| {
        let mut built = Built::new(|_| Ok(()));
        refused_submit("submit inside a build", rig.backend.submit(inner, &CallConfig::new(), &mut built))?;
        same("inner builds", built.calls, 0)
    })?;
    same("state of the inner run", rig.backend.run_state(inner), RunState::Unknown)?;
    rig.is_usable()?;
    rig.finish()
}

/// `close` inside a build is refused, and the worker stays open.
pub fn close_inside_a_build_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.run(|_| refused("close inside a build", Call::Close, rig.backend.close()))?;
    rig.is_usable()?;
    rig.finish()
}

/// `start` inside a build is refused.
pub fn start_inside_a_build_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.run(|_| refused("start inside a build", Call::Start, rig.backend.start(Arc::clone(&rig.ends) as _)))?;
    rig.is_usable()?;
    rig.finish()
}

/// `release_buffer` inside a build is refused; creating, writing, reading and filling are allowed there.
pub fn release_buffer_inside_a_build_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let buffer = rig.host(&[3; 16])?;
    rig.run(|_| {
        refused("release_buffer inside a build", Call::ReleaseBuffer, rig.backend.release_buffer(buffer))?;
        let made = rig.backend.create_buffer(16).must("create_buffer inside a build")?;
        rig.backend.fill_buffer(made, 9).must("fill_buffer inside a build")?;
        rig.backend.write_buffer(made, 4, &[1, 2]).must("write_buffer inside a build")?;
        same("what was written", rig.host_bytes(made, 8)?, vec![9, 9, 9, 9, 1, 2, 9, 9])
    })?;
    same("the buffer", rig.host_bytes(buffer, 16)?, vec![3; 16])?;
    rig.backend.release_buffer(buffer).must("release_buffer after the build")?;
    rig.finish()
}

/// Graph builds of several threads never overlap, and each thread's run does its own work.
pub fn builds_of_two_threads_are_serialised(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let building = AtomicU32::new(0);
    let overlapped = AtomicBool::new(false);
    let one_thread = || -> Outcome {
        for _ in 0..8 {
            let out = rig.host(&[0; 8])?;
            rig.run(|o| {
                if building.fetch_add(1, Ordering::SeqCst) != 0 {
                    overlapped.store(true, Ordering::SeqCst);
                }
                rig.store(o, ChipId(0), TensorPlace::Host(out), 2, 5)?;
                thread::yield_now();
                building.fetch_sub(1, Ordering::SeqCst);
                Ok(())
            })?;
            same("what the task stored", rig.host_i32(out, 2)?, vec![5, 6])?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(one_thread)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().must("submitting thread")?)
    })?;
    ensure!(!overlapped.load(Ordering::SeqCst), "two graphs were built at the same time");
    rig.finish()
}

/// As many runs as the depth guarantees are accepted while none of them has ended.
pub fn as_many_runs_as_the_depth_are_in_flight_together(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let (first, gate) = rig.held()?;
    let mut runs = vec![first];
    for _ in 1..rig.depth.guaranteed() {
        let (run, ()) = rig.submit(|_| Ok(()))?;
        runs.push(run);
    }
    for run in &runs {
        same("state while the first is held", rig.backend.run_state(*run), RunState::Running)?;
    }
    gate.open()?;
    for run in &runs {
        rig.succeeds(*run)?;
    }
    same("order of the ends", rig.ends.runs(), runs)?;
    drop(gate);
    rig.finish()
}

/// One submission more than the depth allows waits until the oldest run is over, before it builds anything.
pub fn a_submission_over_the_depth_waits_before_it_builds(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    if rig.depth.guaranteed() < rig.depth.most() {
        return Err(Stop::Skipped(format!("the depth {:?} does not say when to wait", rig.depth)));
    }
    let (first, gate) = rig.held()?;
    for _ in 1..rig.depth.most() {
        rig.submit(|_| Ok(()))?;
    }
    rig.while_held(&gate, "a submission over the depth was built", |passed| {
        let (run, ()) = rig.submit(|_| {
            passed.mark();
            Ok(())
        })?;
        rig.succeeds(run)
    })?;
    rig.succeeds(first)?;
    drop(gate);
    rig.finish()
}

/// A run that allocated a domain has ordered cleanup: the next build finds that domain freed.
pub fn the_next_build_finds_the_previous_runs_domain_freed(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let gate = rig.gate()?;
    let (first, domain) = rig.submit(|o| {
        let domain = rig.domain(o, &packed(2, &[64]))?;
        gate.hold(o)?;
        Ok(domain)
    })?;
    gate.wait_entered()?;
    let held = rig.backend.domain_state(domain.id).must("domain_state")?;
    let state = rig.while_held(&gate, "the next submission was built", |passed| {
        let (run, state) = rig.submit(|_| {
            passed.mark();
            rig.backend.domain_state(domain.id).must("domain_state")
        })?;
        rig.succeeds(run)?;
        Ok(state)
    })?;
    same("state while its run was held", held, DomainState::Live)?;
    same("state of the predecessor's domain", state, DomainState::Freed)?;
    rig.succeeds(first)?;
    drop(gate);
    rig.finish()
}

/// The receiver of ends may release and fill host buffers, release domains and ask for states: the backend holds
/// no lock of its own while it reports.
pub fn ends_are_reported_without_a_lock(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let kept = rig.host(&[1; 8])?;
    let gone = rig.host(&[1; 8])?;
    let (run, domain) = {
        let seen: Arc<Mutex<Option<Outcome>>> = Arc::default();
        let domain_id: Arc<Mutex<Option<pto_simpler_sys::DomainId>>> = Arc::default();
        let backend: std::sync::Weak<dyn Backend> = Arc::downgrade(&rig.backend);
        let (told, asked) = (Arc::clone(&seen), Arc::clone(&domain_id));
        rig.on_end(move |run, _: &RunOutcome| {
            let Some(backend) = backend.upgrade() else { return };
            let result = (|| {
                backend.release_buffer(gone).must("release_buffer while an end is reported")?;
                backend.fill_buffer(kept, 7).must("fill_buffer while an end is reported")?;
                same("state of the ended run", backend.run_state(run), RunState::Ended)?;
                if let Some(id) = *lock(&asked) {
                    backend.domain_state(id).must("domain_state while an end is reported")?;
                    backend.release_domain(id).must("release_domain while an end is reported")?;
                }
                Ok(())
            })();
            *lock(&told) = Some(result);
        });
        let (run, domain) = rig.submit(|o| {
            let domain = rig.domain(o, &packed(2, &[64]))?;
            *lock(&domain_id) = Some(domain.id);
            rig.store(o, ChipId(0), TensorPlace::Host(gone), 2, 1)?;
            Ok(domain)
        })?;
        rig.succeeds(run)?;
        let told = lock(&seen).take();
        told.must("call of the receiver")??;
        (run, domain)
    };
    rig.on_end(|_, _| {});
    same("what the receiver filled", rig.host_bytes(kept, 8)?, vec![7; 8])?;
    let read = rig.backend.read_buffer(gone, 0, &mut [0; 4]);
    refused("read a buffer that the receiver released", Call::ReadBuffer, read)?;
    same("state of the domain", rig.backend.domain_state(domain.id).must("domain_state")?, DomainState::Freed)?;
    same("state of the run", rig.backend.run_state(run), RunState::Ended)?;
    rig.finish()
}

/// Ends come without anybody waiting: nobody asks, and yet the run's end is reported.
pub fn ends_come_without_anybody_waiting(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let (told, end) = std::sync::mpsc::channel();
    rig.on_end(move |run, _| {
        let _ = told.send(run);
    });
    let run = rig.fresh_run();
    rig.backend.submit(run, &CallConfig::new(), &mut Built::new(|_| Ok(()))).must("submit")?;
    rig.note_accepted(run);
    same("reported run", end.recv().must("an end")?, run)?;
    rig.outcome(run);
    rig.finish()
}

/// A misuse inside a build that the builder swallows leaves the run accepted and successful: nothing was done.
pub fn a_swallowed_misuse_leaves_the_run_successful(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.run(|o| {
        match o.alloc(0) {
            Err(error) => refused_error("scratch of zero bytes", Call::AllocScratch, &error)?,
            Ok(id) => return broken(format!("scratch of zero bytes: {id:?}")),
        }
        Ok(())
    })?;
    rig.is_usable()?;
    rig.finish()
}

/// A configuration that [`CallConfig::check`] refuses is refused by each call that takes one, before any effect: nothing
/// is built, the run id stays free, no task is made.
pub fn a_configuration_that_the_runtime_refuses_is_refused_before_any_effect(
    factory: &dyn BackendFactory,
) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let mut swimlane = CallConfig::new();
    swimlane.swimlane = true;
    let mut heap = CallConfig::new();
    heap.ring_heap = Some([1; 4]);
    let mut prefix = CallConfig::new();
    prefix.output_prefix = Some("p".repeat(1024).into());
    for (what, config) in
        [("swimlane without a prefix", swimlane), ("a tiny ring", heap), ("a long prefix", prefix)]
    {
        let run = rig.fresh_run();
        let mut built = Built::new(|_| Ok(()));
        refused_submit(what, rig.backend.submit(run, &config, &mut built))?;
        same("builds", built.calls, 0)?;
        same("state of the refused run", rig.backend.run_state(run), RunState::Unknown)?;
        let (result, _) = rig.attempt(run, |_| Ok(()));
        result.must("submit under the id of a refused one")?;
        rig.succeeds(run)?;

        let out = rig.host(&[7; 8])?;
        let (run, ()) = rig.submit(|o| {
            let store = rig.callable(kernels::STORE)?;
            let args = args([i32s(TensorPlace::Host(out), 2, Access::Output)], [1]);
            refused(what, Call::SubmitNextLevel, o.submit_next_level(store, &args, Some(&config), ChipId(0)))?;
            let group = o.submit_next_level_group(store, &[args], Some(&config), &[ChipId(0)]);
            refused(what, Call::SubmitNextLevelGroup, group)
        })?;
        rig.succeeds(run)?;
        same("output of tasks that were refused", rig.host_bytes(out, 8)?, vec![7; 8])?;
    }
    rig.is_usable()?;
    rig.finish()
}
