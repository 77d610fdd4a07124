//! Retained domains: found again, kept between successful runs, freed after failed ones, released by the caller.

use pto_simpler_sys::{
    Call, ChipId, DomainAllocation, DomainId, DomainState, Retention, RunId, SubmitError, TensorPlace,
};

use super::super::rig::{Domain, Gate, Must, Rig, broken, ensure, fresh, packed, refused, same};
use super::super::{BackendFactory, Outcome, Stop};

fn start(factory: &dyn BackendFactory) -> Result<Rig<'_>, Stop> {
    let rig = Rig::start(factory, 2)?;
    rig.needs_retention()?;
    Ok(rig)
}

fn state(rig: &Rig<'_>, domain: DomainId) -> Result<DomainState, Stop> {
    rig.backend.domain_state(domain).must("domain_state")
}

/// Asking again gives the same domain and describes the same mapping, in the same run and in later ones.
pub fn asking_again_finds_the_same_mapping(factory: &dyn BackendFactory) -> Outcome {
    let rig = start(factory)?;
    let (name, request) = (fresh("kept"), packed(2, &[64, 17]));
    let first = rig.run(|o| {
        let first = rig.retained(o, &name, &request)?;
        let again = rig.retained(o, &name, &request)?;
        same("reply in the same run", &again.reply, &first.reply)?;
        Ok(first)
    })?;
    for _ in 0..3 {
        let again = rig.run(|o| rig.retained(o, &name, &request))?;
        same("reply in a later run", &again.reply, &first.reply)?;
    }
    rig.finish()
}

/// A retained domain survives successful runs, also those that do not ask for it.
pub fn a_retained_domain_survives_successful_runs(factory: &dyn BackendFactory) -> Outcome {
    let rig = start(factory)?;
    let (name, request) = (fresh("kept"), packed(2, &[64]));
    let domain = rig.run(|o| rig.retained(o, &name, &request))?;
    let committed = rig.committed()?;
    rig.run(|o| rig.domain(o, &packed(2, &[4096])).map(|_| ()))?;
    rig.run(|_| Ok(()))?;
    same("state", state(&rig, domain.id)?, DomainState::Live)?;
    same("committed device memory", rig.committed()?, committed)?;
    same("id", rig.run(|o| rig.retained(o, &name, &request))?.id, domain.id)?;
    rig.finish()
}

/// What a run leaves in a retained domain, the next run finds.
pub fn contents_of_a_retained_domain_persist(factory: &dyn BackendFactory) -> Outcome {
    let rig = start(factory)?;
    let (name, request) = (fresh("kept"), packed(2, &[64, 17]));
    rig.run(|o| {
        let domain = rig.retained(o, &name, &request)?;
        same("a fresh retained window", rig.read(o, domain.place(1, 0)?, 64)?, vec![0; 64])?;
        rig.write(o, domain.place(0, 1)?, &[9; 17])?;
        rig.store(o, ChipId(1), domain.tensor(1, 0)?, 16, 5)
    })?;
    rig.run(|o| {
        let domain = rig.retained(o, &name, &request)?;
        same("what was copied", rig.read(o, domain.place(0, 1)?, 17)?, vec![9; 17])?;
        same("untouched bytes", rig.read(o, domain.place(0, 0)?, 64)?, vec![0; 64])?;
        let words = super::super::rig::to_i32(&rig.read(o, domain.place(1, 0)?, 64)?);
        same("what a task stored", words, (5..21).collect())
    })?;
    rig.finish()
}

/// A changed request is refused, whatever changed, and the retained domain is untouched.
pub fn a_changed_request_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = start(factory)?;
    let (name, request) = (fresh("kept"), packed(2, &[64, 32]));
    let domain = rig.run(|o| {
        let domain = rig.retained(o, &name, &request)?;
        rig.write(o, domain.place(0, 0)?, &[4; 64])?;
        Ok(domain)
    })?;
    let mut changed = Vec::new();
    let mut change = |what: &'static str, edit: &dyn Fn(&mut pto_simpler_sys::DomainRequest)| {
        let mut other = request.clone();
        edit(&mut other);
        changed.push((what, other));
    };
    change("window", &|r| r.window_bytes += 32);
    change("fewer workers", &|r| r.workers.truncate(1));
    change("order of workers", &|r| r.workers.reverse());
    change("buffer name", &|r| r.buffers[0].name = "other".into());
    change("dtype", &|r| r.buffers[0].dtype = "fp32".into());
    change("count", &|r| r.buffers[1].count += 1);
    change("nbytes", &|r| r.buffers[1].nbytes -= 1);
    change("order of buffers", &|r| r.buffers.reverse());
    change("fewer buffers", &|r| r.buffers.truncate(1));
    rig.run(|o| {
        for (what, other) in &changed {
            let mut reply = DomainAllocation::new();
            let result = o.get_or_allocate_domain(&name, other, true, &mut reply);
            refused(what, Call::GetOrAllocateDomain, result)?;
        }
        let again = rig.retained(o, &name, &request)?;
        same("reply after the refusals", &again.reply, &domain.reply)?;
        same("bytes after the refusals", rig.read(o, again.place(0, 0)?, 64)?, vec![4; 64])
    })?;
    rig.finish()
}

/// An invalid request is refused by the retaining call as by the plain one.
pub fn an_invalid_retained_request_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = start(factory)?;
    let mut slim = packed(2, &[40, 40]);
    slim.window_bytes = 79;
    rig.run(|o| {
        for (what, request) in [
            ("no workers", packed(0, &[64])),
            ("window 0", packed(2, &[])),
            ("buffers over the window", slim.clone()),
            ("worker out of range", packed(3, &[64])),
        ] {
            let mut reply = DomainAllocation::new();
            let result = o.get_or_allocate_domain(&fresh("invalid"), &request, true, &mut reply);
            refused(what, Call::GetOrAllocateDomain, result)?;
        }
        Ok(())
    })?;
    rig.is_usable()?;
    rig.finish()
}

/// A plain allocation under the name of a retained domain is refused: the name is live.
pub fn a_retained_name_is_live(factory: &dyn BackendFactory) -> Outcome {
    let rig = start(factory)?;
    let (name, request) = (fresh("kept"), packed(2, &[64]));
    rig.run(|o| rig.retained(o, &name, &request).map(|_| ()))?;
    rig.run(|o| {
        let mut reply = DomainAllocation::new();
        let result = o.allocate_domain(&name, &request, &mut reply);
        refused("a retained name", Call::AllocateDomain, result)
    })?;
    rig.finish()
}

/// Finding a retained domain is not control: it may follow tasks. Allocating one is, and may not.
pub fn finding_may_follow_tasks_and_allocating_may_not(factory: &dyn BackendFactory) -> Outcome {
    let rig = start(factory)?;
    let (name, request) = (fresh("kept"), packed(2, &[64]));
    let domain = rig.run(|o| rig.retained(o, &name, &request))?;
    let out = rig.host(&[0; 8])?;
    rig.run(|o| {
        rig.store(o, ChipId(0), TensorPlace::Host(out), 2, 1)?;
        same("id found after a task", rig.retained(o, &name, &request)?.id, domain.id)?;
        let mut reply = DomainAllocation::new();
        let result = o.get_or_allocate_domain(&fresh("late"), &request, true, &mut reply);
        refused("allocate after a task", Call::GetOrAllocateDomain, result)
    })?;
    rig.finish()
}

/// Without `retain_after_run` the domain is freed after its run.
pub fn without_retention_the_domain_is_freed(factory: &dyn BackendFactory) -> Outcome {
    let rig = start(factory)?;
    let (name, request) = (fresh("passing"), packed(2, &[64]));
    let first = rig.run(|o| {
        let mut reply = DomainAllocation::new();
        o.get_or_allocate_domain(&name, &request, false, &mut reply).must("get_or_allocate_domain")?;
        Domain::new(name.clone(), &request, reply)
    })?;
    same("state", state(&rig, first.id)?, DomainState::Freed)?;
    let second = rig.run(|o| rig.retained(o, &name, &request))?;
    ensure!(first.id != second.id, "a freed domain was found again");
    rig.finish()
}

/// A failed run frees the retained domains that are registered with it, and only those.
pub fn a_failed_run_frees_its_retained_domains(factory: &dyn BackendFactory) -> Outcome {
    let rig = start(factory)?;
    let (used, unused, request) = (fresh("used"), fresh("unused"), packed(2, &[64]));
    let (used_id, unused_id) =
        rig.run(|o| Ok((rig.retained(o, &used, &request)?.id, rig.retained(o, &unused, &request)?.id)))?;
    let (run, ()) = rig.submit(|o| {
        rig.retained(o, &used, &request)?;
        rig.fail(o, ChipId(0))
    })?;
    ensure!(rig.outcome(run).result.is_err(), "{run} succeeded with a failing task");
    same("state of the domain registered with the failed run", state(&rig, used_id)?, DomainState::Freed)?;
    same("state of the other domain", state(&rig, unused_id)?, DomainState::Live)?;
    rig.backend.close().must("close")?;
    same("state of the other domain after close", state(&rig, unused_id)?, DomainState::Freed)?;
    rig.finish()
}

/// A failed build frees the retained domains registered with its run, also one that earlier runs had retained.
pub fn a_failed_build_frees_its_retained_domains(factory: &dyn BackendFactory) -> Outcome {
    let rig = start(factory)?;
    let (name, request) = (fresh("kept"), packed(2, &[64]));
    let old = rig.run(|o| rig.retained(o, &name, &request))?;
    let mut new = None;
    let (result, _) = rig.attempt(rig.fresh_run(), |o| {
        rig.retained(o, &name, &request)?;
        new = Some(rig.retained(o, &fresh("new"), &request)?.id);
        broken::<()>("the builder gives up")
    });
    ensure!(matches!(result, Err(SubmitError::Build(_))), "submit returned {result:?}");
    same("state of the old domain", state(&rig, old.id)?, DomainState::Freed)?;
    same("state of the new domain", state(&rig, new.must("new domain")?)?, DomainState::Freed)?;
    let again = rig.run(|o| {
        let again = rig.retained(o, &name, &request)?;
        same("the domain allocated anew", rig.read(o, again.place(0, 0)?, 64)?, vec![0; 64])?;
        Ok(again)
    })?;
    ensure!(again.id != old.id, "a freed domain was found again");
    rig.finish()
}

/// Releasing an idle retained domain frees it before the call returns; its name is free and its memory is back.
pub fn releasing_an_idle_domain_frees_it(factory: &dyn BackendFactory) -> Outcome {
    let rig = start(factory)?;
    rig.run(|o| rig.domain(o, &packed(2, &[64])).map(|_| ()))?;
    let before = rig.committed()?;
    let (name, request) = (fresh("kept"), packed(2, &[1 << 16]));
    let first = rig.run(|o| {
        let domain = rig.retained(o, &name, &request)?;
        rig.write(o, domain.place(1, 0)?, &[1; 1 << 16])?;
        Ok(domain)
    })?;
    rig.backend.release_domain(first.id).must("release_domain")?;
    same("state", state(&rig, first.id)?, DomainState::Freed)?;
    same("committed device memory", rig.committed()?, before)?;
    let second = rig.run(|o| {
        let second = rig.retained(o, &name, &packed(2, &[64]))?;
        same("a fresh window under the released name", rig.read(o, second.place(1, 0)?, 64)?, vec![0; 64])?;
        Ok(second)
    })?;
    ensure!(first.id != second.id, "a released domain was found again");
    rig.finish()
}

/// Releasing twice is Ok and frees once; an unknown id is refused.
pub fn releasing_twice_frees_once(factory: &dyn BackendFactory) -> Outcome {
    let rig = start(factory)?;
    let request = packed(2, &[64]);
    let (gone, kept) =
        rig.run(|o| Ok((rig.retained(o, &fresh("a"), &request)?, rig.retained(o, &fresh("b"), &request)?)))?;
    rig.backend.release_domain(gone.id).must("release_domain")?;
    let committed = rig.committed()?;
    rig.backend.release_domain(gone.id).must("release_domain again")?;
    same("committed device memory", rig.committed()?, committed)?;
    same("state of the other domain", state(&rig, kept.id)?, DomainState::Live)?;
    let unknown = DomainId::new(u32::MAX, u32::MAX);
    refused("release an unknown domain", Call::ReleaseDomain, rig.backend.release_domain(unknown))?;
    rig.finish()
}

/// A domain whose run is in flight is not freed by a release, but in that run's cleanup.
pub fn a_domain_in_flight_is_freed_only_after_its_run(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let gate = rig.gate()?;
    let (run, domain) = rig.submit(|o| {
        let domain = rig.domain(o, &packed(2, &[64]))?;
        gate.hold(o)?;
        Ok(domain)
    })?;
    freed_after(&rig, &gate, run, domain.id)?;
    drop(gate);
    rig.finish()
}

/// Releases a domain while `run` uses it and is held at `gate`: it is freed once the run is over.
fn freed_after(rig: &Rig<'_>, gate: &Gate<'_>, run: RunId, domain: DomainId) -> Outcome {
    gate.wait_entered()?;
    rig.backend.release_domain(domain).must("release_domain while its run is in flight")?;
    same("state while its run is in flight", state(rig, domain)?, DomainState::Released)?;
    gate.open()?;
    rig.succeeds(run)?;
    same("state after its run", state(rig, domain)?, DomainState::Freed)
}

/// A retained domain that a run in flight has registered is not freed by a release before that run is over.
pub fn a_registered_domain_is_freed_only_after_its_run(factory: &dyn BackendFactory) -> Outcome {
    let rig = start(factory)?;
    let (name, request) = (fresh("kept"), packed(2, &[64]));
    let domain = rig.run(|o| rig.retained(o, &name, &request))?;
    let gate = rig.gate()?;
    let (run, ()) = rig.submit(|o| {
        rig.retained(o, &name, &request)?;
        gate.hold(o)
    })?;
    freed_after(&rig, &gate, run, domain.id)?;
    drop(gate);
    rig.finish()
}

/// `close` frees retained domains; releasing one afterwards is Ok.
pub fn close_frees_retained_domains(factory: &dyn BackendFactory) -> Outcome {
    let rig = start(factory)?;
    let (name, request) = (fresh("kept"), packed(2, &[64]));
    let domain = rig.run(|o| rig.retained(o, &name, &request))?;
    rig.backend.close().must("close")?;
    same("state after close", state(&rig, domain.id)?, DomainState::Freed)?;
    rig.backend.release_domain(domain.id).must("release_domain after close")?;
    rig.finish()
}

/// Where the capabilities say that domains cannot be retained, the retaining call is refused with what is missing,
/// whether or not it asks to retain, and nothing else changes.
pub fn retention_that_is_unsupported_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 2)?;
    let Retention::Unsupported { missing } = rig.caps().retention.clone() else {
        return Err(Stop::Skipped("domains can be retained".into()));
    };
    let (name, request) = (fresh("unkept"), packed(2, &[64]));
    rig.run(|o| {
        let mut reply = DomainAllocation::new();
        for retain in [true, false] {
            let result = o.get_or_allocate_domain(&name, &request, retain, &mut reply);
            let message = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
            refused("a retained domain", Call::GetOrAllocateDomain, result)?;
            ensure!(message.contains(&*missing), "the refusal does not name {missing:?}: {message:?}");
            same("id of the reply", reply.id(), None)?;
        }
        o.allocate_domain(&name, &request, &mut reply).must("allocate under the refused name")
    })?;
    rig.is_usable()?;
    rig.finish()
}
