//! Host entries: what they are refused for, where they run, whom they ask, and how they fail.

use std::cell::{Cell, RefCell};
use std::thread::{self, ThreadId};

use pto_simpler_sys::{
    BuildFailed, Call, CallConfig, CallableId, CallbackError, DomainAllocation, DomainId, DomainRequest,
    DomainState, EntryArg, EntryCall, EntryHost, EntryValue, Family, Orchestrator,
};

use super::super::rig::{Must, Rig, broken, ensure, fresh, refused_error, same};
use super::super::{BackendFactory, Outcome, Stop};
use crate::kernels;

/// Gives an entry its domains, and notes what it was asked for and by whom.
struct Host<'a> {
    orchestrator: &'a dyn Orchestrator,
    /// The name under which the backend gets the domain.
    name: String,
    /// No domain for anybody.
    refuses: bool,
    opened: Cell<bool>,
    asked: RefCell<Vec<(String, DomainRequest, ThreadId)>>,
    given: Cell<Option<DomainId>>,
}

impl<'a> Host<'a> {
    fn new(orchestrator: &'a dyn Orchestrator, refuses: bool) -> Self {
        let (opened, asked, given) = (Cell::default(), RefCell::default(), Cell::default());
        Self { orchestrator, name: fresh("entry"), refuses, opened, asked, given }
    }
}

impl EntryHost for Host<'_> {
    fn open(&self, _task: bool) -> Result<(), BuildFailed> {
        self.opened.set(true);
        Ok(())
    }

    fn retains(&self) -> bool {
        false
    }

    fn domain(&self, name: &str, request: &DomainRequest, reply: &mut DomainAllocation) -> Result<(), BuildFailed> {
        self.asked.borrow_mut().push((name.to_owned(), request.clone(), thread::current().id()));
        if self.refuses {
            return Err(BuildFailed);
        }
        let allocated = self.orchestrator.allocate_domain(&self.name, request, reply);
        self.given.set(reply.id());
        allocated.map_err(|_| BuildFailed)
    }
}

/// A started backend with the entry of the library.
fn start(factory: &dyn BackendFactory) -> Result<(Rig<'_>, CallableId), Stop> {
    let mut rig = Rig::unstarted(factory, 2)?;
    if !rig.caps().entries {
        return Err(Stop::Skipped("no host entries".into()));
    }
    let registered = match rig.backend.register(&kernels::entry_spec()) {
        Ok(registered) => registered,
        Err(error) if error.family() == Family::Misuse => {
            return Err(Stop::Skipped(format!("no callable {}: {error}", kernels::ENTRY)));
        }
        Err(error) => return broken(format!("register {}: {error:?}", kernels::ENTRY)),
    };
    ensure!(registered.takes_domains, "{} takes its domains from the host: {registered:?}", kernels::ENTRY);
    rig.begin()?;
    Ok((rig, registered.id))
}

fn run_entry(o: &dyn Orchestrator, entry: CallableId, code: u64, host: &Host<'_>) -> Result<(), CallbackError> {
    let args = [EntryArg { name: "code".into(), value: EntryValue::Scalar(code) }];
    o.run_entry(entry, &EntryCall { args: &args, config: &CallConfig::new(), frame: 0 }, host)
}

/// An entry that is none is refused: an id that was never given out, a callable of another kind. The host is not
/// asked for anything.
pub fn an_entry_that_is_none_is_refused(factory: &dyn BackendFactory) -> Outcome {
    let rig = Rig::start(factory, 1)?;
    rig.run(|o| {
        let host = Host::new(o, false);
        for (what, id) in [
            ("an unknown callable", CallableId::new(u32::MAX, u32::MAX)),
            ("a chip kernel", rig.callable(kernels::ADD)?),
        ] {
            match run_entry(o, id, 0, &host) {
                Err(CallbackError::Backend(error)) => refused_error(what, Call::RunEntry, &error)?,
                other => return broken(format!("{what} as an entry: {other:?}")),
            }
        }
        same("requests of an entry that is none", host.asked.take().len(), 0)?;
        ensure!(!host.opened.get(), "opened by an entry that is none");
        Ok(())
    })?;
    rig.is_usable()?;
    rig.finish()
}

/// An entry runs on the building thread and leases its domain from its host, with the request that the program makes;
/// the domain is then one of the run.
pub fn an_entry_leases_its_domain_from_its_host(factory: &dyn BackendFactory) -> Outcome {
    let (rig, entry) = start(factory)?;
    let mut ids = Vec::new();
    for _ in 0..2 {
        let id = rig.run(|o| {
            let host = Host::new(o, false);
            run_entry(o, entry, 0, &host).must("run_entry")?;
            let asked = (kernels::ENTRY.to_owned(), kernels::entry_request(), thread::current().id());
            same("what the host was asked for", host.asked.take(), vec![asked])?;
            ensure!(!host.opened.get(), "opened by an entry that reaches no device");
            let id = host.given.get().must("id of the domain")?;
            let state = rig.backend.domain_state(id).must("domain_state")?;
            same("state of the domain after the entry", state, DomainState::Live)?;
            Ok(id)
        })?;
        same("state after the run", rig.backend.domain_state(id).must("domain_state")?, DomainState::Freed)?;
        ids.push(id);
    }
    ensure!(ids.first() != ids.last(), "two runs share the domain {ids:?}");
    rig.is_usable()?;
    rig.finish()
}

/// A host that gives no domain ends the entry, and the caller learns that it was the host; an entry that fails by itself
/// is a runtime failure with what it said. The build goes on after both, and what the entry leased ends with the run.
pub fn a_failed_entry_says_who_failed(factory: &dyn BackendFactory) -> Outcome {
    let (rig, entry) = start(factory)?;
    let id = rig.run(|o| {
        let host = Host::new(o, true);
        let result = run_entry(o, entry, 0, &host);
        ensure!(matches!(result, Err(CallbackError::Build(_))), "refused by its host: {result:?}");
        same("requests", host.asked.take().len(), 1)?;

        let host = Host::new(o, false);
        let Err(CallbackError::Backend(error)) = run_entry(o, entry, 77, &host) else {
            return broken("an entry told to fail did not say so");
        };
        same("family", error.family(), Family::Backend)?;
        let failure = error.runtime().must("runtime failure")?;
        ensure!(failure.message.contains("77"), "what the entry said is lost: {failure:?}");
        let failed = host.given.get().must("id of the domain")?;

        run_entry(o, entry, 0, &Host::new(o, false)).must("run_entry after a failed one")?;
        Ok(failed)
    })?;
    same("state after the run", rig.backend.domain_state(id).must("domain_state")?, DomainState::Freed)?;
    rig.is_usable()?;
    rig.finish()
}
