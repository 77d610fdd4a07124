//! Preparing a worker (design rules 1 to 3).
//!
//! 1. Programs and options are checked; nothing of the backend exists yet.
//! 2. The backend is made, and compared with what the programs were compiled for.
//! 3. Callables of all programs are registered; host intermediates are made, one set per frame, and the zeros of a
//!    range-copying backend.
//! 4. The backend starts.
//!
//! A failure at any step closes what was opened, once, and reports the first error; so does a panic, which goes on in the
//! caller. A backend that is not in `New` belongs to somebody else and is left as it is.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use pto_domain::{DomainTable, ProgramIndex};
use pto_reset::Method;
use pto_simpler_sys::{
    Backend, BackendError, BackendPhase, Call, CallableKind, Capabilities, FRAMES, HostBufferId, Registered,
    Retention,
};

use crate::completion::CellPool;
use crate::error::Error;
use crate::finish::Sink;
use crate::frame::Admission;
use crate::inner::{Callable, Failures, FrameSlot, Inner, OpeningPlan, PreparedProgram, guarded, panic_text};
use crate::options::{Mode, Options};
use crate::program::{Program, ProgramSpec, Target};
use crate::shutdown::{Shutdown, close_after};
use crate::staging::StagingCache;
use crate::sync::{AtomicUsize, Mutex, Rank};

static NEXT_WORKER: AtomicU64 = AtomicU64::new(1);

/// Prepares a worker on the backend that `backend` makes.
pub(crate) fn prepare(
    programs: &[Arc<dyn Program>],
    options: &Options,
    backend: impl FnOnce(Option<&Target>) -> Result<Arc<dyn Backend>, BackendError>,
) -> Result<Arc<Inner>, Error> {
    // Asked for once, and while there is nothing to give back: it is the user's code.
    let programs: Vec<Declared> = programs.iter().map(|program| (program, program.spec())).collect();
    let target = check_programs(&programs)?;
    let mode = options.resolve()?;
    let backend = backend(target)?;
    let phase = guarded(Call::Start, || Ok(backend.phase()))?;
    if phase != BackendPhase::New {
        return Err(Error::BackendInUse { phase });
    }
    let prepared = catch_unwind(AssertUnwindSafe(|| prepare_on(&programs, mode, target, Arc::clone(&backend))));
    let first = match prepared {
        Ok(Ok(inner)) => return Ok(inner),
        Ok(Err(first)) => first,
        Err(payload) => {
            let text = format!("the preparation panicked: {}", panic_text(&*payload));
            close_after(&*backend, Error::broken(text));
            resume_unwind(payload);
        }
    };
    match taken_over(&*backend, &first) {
        Some(phase) => Err(Error::BackendInUse { phase }),
        None => Err(close_after(&*backend, first)),
    }
}

/// Whether another thread has started or closed the backend between our look at its phase and this failure; it is
/// theirs then, and not ours to close. A start that did anything at all is our own.
fn taken_over(backend: &dyn Backend, first: &Error) -> Option<BackendPhase> {
    let Error::Backend(BackendError::Misuse(refused)) = first else { return None };
    let phase = guarded(Call::Start, || Ok(backend.phase())).ok()?;
    let elsewhere = matches!(
        phase,
        BackendPhase::Starting | BackendPhase::Ready | BackendPhase::Closing | BackendPhase::Closed
    );
    tracing::debug!(%refused, ?phase, "a failed preparation");
    elsewhere.then_some(phase)
}

/// A program and what it declares.
type Declared<'a> = (&'a Arc<dyn Program>, &'a ProgramSpec);

fn prepare_on(
    programs: &[Declared<'_>],
    mode: Mode,
    target: Option<&Target>,
    backend: Arc<dyn Backend>,
) -> Result<Arc<Inner>, Error> {
    backend.check_blocking()?;
    let capabilities = backend.capabilities().clone();
    if let Some(target) = target {
        check_backend(programs, target, &capabilities)?;
    }
    if mode.persistent
        && let Retention::Unsupported { missing } = &capabilities.retention
    {
        return Err(Error::NoRetention { missing: Arc::clone(missing) });
    }
    let requested = programs.iter().map(|(_, spec)| spec.callables.len()).sum();
    let permitted = capabilities.limits.callables;
    if requested > permitted as usize {
        return Err(Error::TooManyCallables { requested, permitted });
    }
    let method = Method::of(&capabilities);
    let prepared = programs
        .iter()
        .enumerate()
        .map(|(index, program)| prepare_program(&*backend, index, *program, mode))
        .collect::<Result<Vec<_>, Error>>()?;
    let zeros = match method {
        Method::ByteRange { chunk_bytes } if mode.reset => {
            Some(guarded(Call::CreateBuffer, || backend.create_zeros(chunk_bytes))?)
        }
        _ => None,
    };
    let programs =
        u32::try_from(prepared.len()).map_err(|_| Error::broken("more programs than a table can number"))?;
    let (table, authority) = DomainTable::new(programs);
    let inner = Arc::new(Inner {
        id: NEXT_WORKER.fetch_add(1, Ordering::Relaxed),
        backend,
        capabilities,
        mode,
        method,
        negotiated: OnceLock::new(),
        authority,
        programs: prepared,
        admission: Admission::new(),
        slots: [FrameSlot::new(), FrameSlot::new()],
        table: Mutex::new(Rank::Table, table),
        pool: CellPool::new(),
        staging: StagingCache::new(mode.staging),
        zeros,
        ordered: AtomicUsize::new(0),
        failures: Mutex::new(Rank::Failures, Failures::default()),
        resident: Mutex::new(Rank::Resident, Vec::new()),
        deferred: Mutex::new(Rank::Deferred, Vec::new()),
        shutdown: Shutdown::new(),
    });
    let events = Arc::new(Sink(Arc::downgrade(&inner)));
    let negotiated = guarded(Call::Start, || inner.backend.start(events))?;
    inner.negotiated.get_or_init(|| negotiated);
    tracing::debug!(worker = inner.id, programs, persistent = mode.persistent, reset = mode.reset, "prepared");
    Ok(inner)
}

/// What can be checked without a backend. Returns the target that the programs agree on.
fn check_programs<'a>(programs: &[Declared<'a>]) -> Result<Option<&'a Target>, Error> {
    if programs.is_empty() {
        return Err(Error::NoPrograms);
    }
    for (second, (program, spec)) in programs.iter().enumerate() {
        if let Some(first) = programs[..second].iter().position(|(p, _)| Arc::ptr_eq(p, program)) {
            return Err(Error::DuplicateProgram { name: Arc::clone(&spec.name), first, second });
        }
        if let Some(index) = spec.intermediates.iter().position(|nbytes| *nbytes == 0) {
            return Err(Error::Declaration {
                program: Arc::clone(&spec.name),
                message: format!("host intermediate {index} has 0 bytes: declare at least 1"),
            });
        }
    }
    for (_, spec) in programs {
        if let Err(error) = spec.config.check(Call::Submit) {
            let message = match error {
                BackendError::Misuse(misuse) => misuse.message.clone(),
                other => other.to_string(),
            };
            return Err(Error::Declaration { program: Arc::clone(&spec.name), message });
        }
    }
    let mut agreed: Option<(usize, &Target)> = None;
    for (index, (_, spec)) in programs.iter().enumerate() {
        let Some(target) = &spec.target else { continue };
        let Some((first, wanted)) = agreed else {
            agreed = Some((index, target));
            continue;
        };
        let owner = |at: usize| format!("program `{}` (position {at})", programs[at].1.name);
        compare_targets(wanted, &owner(first), target, &owner(index))?;
    }
    Ok(agreed.map(|(_, target)| target))
}

fn check_backend(programs: &[Declared<'_>], target: &Target, capabilities: &Capabilities) -> Result<(), Error> {
    let owner = programs
        .iter()
        .find(|(_, spec)| spec.target.is_some())
        .map_or_else(String::new, |(_, spec)| format!("program `{}`", spec.name));
    let backend = Target {
        platform: Arc::clone(&capabilities.platform),
        runtime: Arc::clone(&capabilities.runtime),
        device_ids: capabilities.device_ids.clone(),
    };
    compare_targets(target, &owner, &backend, "the backend")
}

fn compare_targets(first: &Target, first_owner: &str, second: &Target, second_owner: &str) -> Result<(), Error> {
    let mismatch = |what, first: String, second: String| {
        Err(Error::TargetMismatch {
            what,
            first_owner: first_owner.to_owned(),
            first,
            second_owner: second_owner.to_owned(),
            second,
        })
    };
    if first.platform != second.platform {
        return mismatch("platform", format!("`{}`", first.platform), format!("`{}`", second.platform));
    }
    if first.runtime != second.runtime {
        return mismatch("runtime", format!("`{}`", first.runtime), format!("`{}`", second.runtime));
    }
    if first.device_ids != second.device_ids {
        return mismatch("device ids", format!("{:?}", first.device_ids), format!("{:?}", second.device_ids));
    }
    Ok(())
}

fn prepare_program(
    backend: &dyn Backend,
    index: usize,
    (program, spec): Declared<'_>,
    mode: Mode,
) -> Result<PreparedProgram, Error> {
    let mut callables = Vec::with_capacity(spec.callables.len());
    for callable in &spec.callables {
        let Registered { id, signature, takes_domains } = guarded(Call::Register, || backend.register(callable))?;
        if callable.kind == CallableKind::Entry && mode.persistent && !takes_domains {
            return Err(Error::EntryWithoutProvider {
                program: Arc::clone(&spec.name),
                entry: Arc::clone(&callable.name),
            });
        }
        let signature = callable.signature.clone().or(signature);
        callables.push(Callable { id, name: Arc::clone(&callable.name), kind: callable.kind, signature });
    }
    let mut intermediates: [Vec<(HostBufferId, u64)>; FRAMES] = Default::default();
    for frame in &mut intermediates {
        for &nbytes in &spec.intermediates {
            let id = guarded(Call::CreateBuffer, || backend.create_buffer(nbytes))?;
            guarded(Call::FillBuffer, || backend.fill_buffer(id, 0))?;
            frame.push((id, nbytes));
        }
    }
    let index = u32::try_from(index).map_err(|_| Error::broken("more programs than a table can number"))?;
    Ok(PreparedProgram {
        program: Arc::clone(program),
        name: Arc::clone(&spec.name),
        index: ProgramIndex::new(index),
        callables,
        intermediates,
        plan: Mutex::new(Rank::Plan, Arc::new(OpeningPlan::default())),
        counters: crate::stats::Counters::default(),
    })
}
