//! The state machine of a worker: register, start, close, and what each state refuses.

use std::sync::Arc;
use std::thread;

use pto_simpler_sys::{
    BackendPhase, Call, CallConfig, CallableSpec, ChipId, Depth, HostBufferId, RunState, Signature, TensorPlace,
};

use super::super::rig::{Built, Must, Rig, args, ensure, i32s, refused, refused_submit, same};
use super::super::{BackendFactory, Outcome};
use crate::kernels;

/// Capabilities are known before the start, describe what was asked for, and do not change.
pub fn capabilities_are_known_before_the_start_and_constant(factory: &dyn BackendFactory) -> Outcome {
    let mut rig = Rig::unstarted(factory, 2)?;
    let before = rig.caps().clone();
    same("chip workers", before.chips(), 2)?;
    ensure!(!before.platform.is_empty() && !before.runtime.is_empty(), "no platform or no runtime: {before:?}");
    ensure!(before.limits.ranks > 0 && before.limits.callables > 0, "limits of zero: {:?}", before.limits);
    rig.begin()?;
    same("capabilities after the start", rig.caps(), &before)?;
    rig.finish()
}

/// The negotiated depth is 1 or 2.
pub fn the_negotiated_depth_is_one_or_two(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let (Depth::Exactly(most) | Depth::AtMost(most)) = rig.depth;
    ensure!(most == 1 || most == 2, "depth {:?}", rig.depth);
    ensure!(rig.depth.guaranteed() >= 1, "no run is guaranteed to be accepted: {:?}", rig.depth);
    rig.finish()
}

/// A thread that is attached to nothing may block.
pub fn a_plain_thread_may_block(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.backend.check_blocking().must("check_blocking")?;
    rig.finish()
}

/// The phase tells where the backend is in its life.
pub fn the_phase_follows_the_life(factory: &dyn BackendFactory) -> Outcome {
    let mut rig = Rig::unstarted(factory, 1)?;
    same("phase before the start", rig.backend.phase(), BackendPhase::New)?;
    rig.begin()?;
    same("phase after the start", rig.backend.phase(), BackendPhase::Ready)?;
    rig.is_usable()?;
    same("phase after a run", rig.backend.phase(), BackendPhase::Ready)?;
    rig.backend.close().must("close")?;
    same("phase after close", rig.backend.phase(), BackendPhase::Closed)?;
    rig.finish()?;
    let rig = Rig::unstarted(factory, 1)?;
    rig.backend.close().must("close in New")?;
    same("phase after a close in New", rig.backend.phase(), BackendPhase::Closed)?;
    rig.finish()
}

/// A second `start` is refused and changes nothing.
pub fn start_twice_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    refused("second start", Call::Start, rig.backend.start(Arc::clone(&rig.ends) as _))?;
    rig.is_usable()?;
    rig.finish()
}

/// A closed worker never starts.
pub fn start_after_close_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::unstarted(factory, 1)?;
    rig.backend.close().must("close in New")?;
    refused("start after close", Call::Start, rig.backend.start(Arc::clone(&rig.ends) as _))?;
    rig.finish()
}

/// `close` in `New` is Ok, any number of times.
pub fn close_before_start_is_ok(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::unstarted(factory, 1)?;
    rig.backend.close().must("close in New")?;
    rig.backend.close().must("close in Closed")?;
    rig.finish()
}

/// `close` is idempotent after success.
pub fn close_is_idempotent(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.is_usable()?;
    rig.backend.close().must("first close")?;
    rig.backend.close().must("second close")?;
    rig.finish()
}

/// Two threads may close at once; both get the outcome of the one close.
pub fn two_threads_may_close_at_once(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.is_usable()?;
    let (first, second) = thread::scope(|scope| {
        let other = scope.spawn(|| rig.backend.close());
        (rig.backend.close(), other.join())
    });
    first.must("close")?;
    second.must("closing thread")?.must("close at the same time")?;
    rig.finish()
}

/// `close` waits for accepted runs: their ends are reported before it returns.
pub fn close_waits_for_accepted_runs(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let (run, gate) = rig.held()?;
    rig.while_held(&gate, "close returned", |passed| {
        rig.backend.close().must("close")?;
        passed.mark();
        Ok(())
    })?;
    same("ends reported when close returned", rig.ends.count(run), 1)?;
    rig.succeeds(run)?;
    drop(gate);
    rig.finish()
}

/// `submit` before `start` is refused; nothing is built and the run stays unknown.
pub fn submit_before_start_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::unstarted(factory, 1)?;
    let run = rig.fresh_run();
    let mut built = Built::new(|_| Ok(()));
    refused_submit("submit in New", rig.backend.submit(run, &CallConfig::new(), &mut built))?;
    same("builds", built.calls, 0)?;
    same("state of the run", rig.backend.run_state(run), RunState::Unknown)?;
    rig.finish()
}

/// `submit` after `close` is refused; nothing is built and the run stays unknown.
pub fn submit_after_close_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.backend.close().must("close")?;
    let run = rig.fresh_run();
    let mut built = Built::new(|_| Ok(()));
    refused_submit("submit in Closed", rig.backend.submit(run, &CallConfig::new(), &mut built))?;
    same("builds", built.calls, 0)?;
    same("state of the run", rig.backend.run_state(run), RunState::Unknown)?;
    rig.finish()
}

/// Calls that reach a device are refused before `start`.
pub fn device_calls_before_start_are_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::unstarted(factory, 1)?;
    refused("alloc in New", Call::Alloc, rig.backend.alloc(ChipId(0), 64))?;
    let committed = rig.backend.committed_device_memory(ChipId(0));
    refused("committed_device_memory in New", Call::CommittedDeviceMemory, committed)?;
    rig.finish()
}

/// After `close` every call but `close`, `abandon`, `run_state` and `domain_state` is refused.
pub fn calls_after_close_are_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let device = rig.backend.alloc(ChipId(0), 64).must("alloc")?;
    rig.backend.close().must("close")?;
    refused("create_buffer", Call::CreateBuffer, rig.backend.create_buffer(64))?;
    refused("create_zeros", Call::CreateBuffer, rig.backend.create_zeros(64))?;
    refused("alloc", Call::Alloc, rig.backend.alloc(ChipId(0), 64))?;
    refused("free", Call::Free, rig.backend.free(device))?;
    let committed = rig.backend.committed_device_memory(ChipId(0));
    refused("committed_device_memory", Call::CommittedDeviceMemory, committed)?;
    let spec = CallableSpec::chip(kernels::STORE, kernels::signature(kernels::STORE));
    refused("register", Call::Register, rig.backend.register(&spec))?;
    rig.finish()
}

/// Host buffers are released by `close`: afterwards their ids name nothing.
pub fn close_releases_host_buffers(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    let buffer: HostBufferId = rig.host(&[1; 64])?;
    rig.backend.close().must("close")?;
    refused("read_buffer", Call::ReadBuffer, rig.backend.read_buffer(buffer, 0, &mut [0; 4]))?;
    refused("write_buffer", Call::WriteBuffer, rig.backend.write_buffer(buffer, 0, &[0; 4]))?;
    rig.finish()
}

/// A host buffer made before `start` is the same memory afterwards, also for tasks.
pub fn host_buffers_made_before_start_serve_tasks(factory: &dyn BackendFactory) -> Outcome {
    let mut rig = Rig::unstarted(factory, 1)?;
    let buffer = rig.host(&[5, 0, 0, 0, 6, 0, 0, 0])?;
    rig.begin()?;
    rig.run(|o| rig.add(o, ChipId(0), TensorPlace::Host(buffer), 2, 10))?;
    same("what the task left", rig.host_i32(buffer, 2)?, vec![15, 16])?;
    rig.finish()
}

/// A name that the backend does not know is refused at registration.
pub fn registering_an_unknown_name_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::unstarted(factory, 1)?;
    let spec = CallableSpec::chip("pto_no_such_kernel", Signature::new([], 0));
    refused("register an unknown name", Call::Register, rig.backend.register(&spec))?;
    rig.finish()
}

/// Registration reports the signature that submissions are checked against.
pub fn registration_reports_the_signature(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::unstarted(factory, 1)?;
    let spec = CallableSpec::chip(kernels::ADD, kernels::signature(kernels::ADD));
    let registered = rig.backend.register(&spec).must("register")?;
    same("signature", registered.signature, Some(kernels::signature(kernels::ADD)))?;
    ensure!(!registered.takes_domains, "a chip callable takes no domains");
    rig.finish()
}

/// Equal content may be registered twice; whatever ids come of it, both work.
pub fn equal_content_may_be_registered_twice(factory: &dyn BackendFactory) -> Outcome {
    let mut rig = Rig::unstarted(factory, 1)?;
    let spec = CallableSpec::chip(kernels::ADD, kernels::signature(kernels::ADD));
    let first = rig.backend.register(&spec).must("register")?.id;
    let second = rig.backend.register(&spec).must("register again")?.id;
    rig.begin()?;
    let buffer = rig.host(&[0; 4])?;
    rig.run(|o| {
        for id in [first, second] {
            let args = args([i32s(TensorPlace::Host(buffer), 1, pto_simpler_sys::Access::InOut)], [4]);
            o.submit_next_level(id, &args, None, ChipId(0)).must("submit")?;
        }
        Ok(())
    })?;
    same("sum of both tasks", rig.host_i32(buffer, 1)?, vec![8])?;
    rig.finish()
}

/// The limit of callables is real: as many can be registered as the capabilities say, and not one more.
pub fn callables_are_limited_as_the_capabilities_say(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::unstarted(factory, 1)?;
    let limit = rig.caps().limits.callables as usize;
    let spec = CallableSpec::chip(kernels::STORE, kernels::signature(kernels::STORE));
    for _ in rig.registered()..limit {
        rig.backend.register(&spec).must("register within the limit")?;
    }
    refused("register over the limit", Call::Register, rig.backend.register(&spec))?;
    rig.finish()
}
