//! Faults over any backend.

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::sync::Arc;

use parking_lot::Mutex;
use pto_simpler_sys::{
    AbandonReport, Backend, BackendError, BuildFailed, Call, CallConfig, CallableSpec, ChipId, CopyTo,
    DeviceBufferId, DevicePlace, DomainId, DomainState, GraphBuilder, HostBufferId, Negotiated, Orchestrator,
    Registered, RunEvents, RunId, RunOutcome, RunState, SubmitError,
};

use super::faulty_graph::FaultyGraph;
use crate::faults::{FaultControl, FaultEffect, FaultSchedule, Fired};

/// What the parts of a [`FaultyBackend`] share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) faults: FaultControl,
    /// Chips of resident device memory, which copies name by id alone.
    residents: Mutex<HashMap<DeviceBufferId, ChipId>>,
    /// Task faults that have fired, by run: they show when the run ends.
    tasks: Mutex<HashMap<RunId, Vec<Fired>>>,
}

impl Shared {
    /// The fault, if any, of a call that concerns several chips: one of the whole call, else the first of a part.
    pub(super) fn several(&self, call: Call, chips: &[ChipId]) -> Option<Fired> {
        let whole = self.faults.whole(call);
        // Every part is counted, whoever fires.
        let parts: Vec<Fired> = chips.iter().filter_map(|chip| self.faults.part(call, *chip)).collect();
        whole.or_else(|| parts.first().copied())
    }

    /// The fault, if any, of a call on a place in device memory.
    pub(super) fn on_place(&self, call: Call, place: DevicePlace) -> Option<Fired> {
        match self.chip_of(place) {
            Some(chip) => self.faults.single(call, chip),
            None => self.faults.whole(call),
        }
    }

    pub(super) fn chip_of(&self, place: DevicePlace) -> Option<ChipId> {
        match place {
            DevicePlace::DomainBuffer { chip, .. } | DevicePlace::Window { chip, .. } => Some(chip),
            DevicePlace::Resident(id) => self.residents.lock().get(&id).copied(),
        }
    }

    /// Remembers that a task of `run` fails, to be shown in its outcome.
    pub(super) fn fail_task(&self, run: RunId, fired: Fired) {
        self.tasks.lock().entry(run).or_default().push(fired);
    }
}

/// A backend that fails as a schedule says.
///
/// # What the effects mean from outside
///
/// * **before**: the call is not forwarded. **after**, **no-reply**: it is forwarded, and if it succeeds an error is
///   reported instead; its ids are lost, and the backend's close cleans them up. **hang**: it is forwarded once
///   released. **unwind**: it is forwarded and then unwinds.
/// * A fault of one chip hits a call that concerns several chips as a whole (an allocation, a group); a wrapper
///   cannot leave half an allocation behind. The emulator's own faults can.
/// * Each entry of a `copy_batch` counts as a `copy_to`. Entries that fail before their effect, and what follows
///   them on the same chip, are taken out; the others are forwarded as one batch. An entry that hangs holds up the
///   batch.
/// * **task** faults are decided when the task is submitted and show when the run ends, as its failure. Before: the
///   task is not forwarded. Hang: the report of the end is held.
/// * **run** faults change the report of the end: before and no-reply make the run fail, after adds a failed
///   cleanup, hang holds the report (and with it the backend's reporting thread).
/// * A host entry runs inside the wrapped backend; its own calls are not seen here.
#[derive(Debug)]
pub struct FaultyBackend {
    inner: Arc<dyn Backend>,
    shared: Arc<Shared>,
}

impl FaultyBackend {
    /// Wraps a backend.
    #[must_use]
    pub fn new(inner: Arc<dyn Backend>, schedule: FaultSchedule) -> Self {
        let shared = Shared {
            faults: FaultControl::new(schedule, None),
            residents: Mutex::default(),
            tasks: Mutex::default(),
        };
        Self { inner, shared: Arc::new(shared) }
    }

    /// The armed faults, and the calls that hang.
    #[must_use]
    pub fn faults(&self) -> FaultControl {
        self.shared.faults.clone()
    }

    /// The wrapped backend.
    #[must_use]
    pub fn inner(&self) -> &Arc<dyn Backend> {
        &self.inner
    }

    fn whole<T>(
        &self,
        call: Call,
        forward: impl FnOnce(&dyn Backend) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let faults = &self.shared.faults;
        faults.around(faults.whole(call), || forward(&*self.inner))
    }

    fn on_chip<T>(
        &self,
        call: Call,
        chip: ChipId,
        forward: impl FnOnce(&dyn Backend) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let faults = &self.shared.faults;
        faults.around(faults.single(call, chip), || forward(&*self.inner))
    }
}

/// Reports ends as the faults have it.
struct FaultyEvents {
    outer: Arc<dyn RunEvents>,
    shared: Arc<Shared>,
}

impl RunEvents for FaultyEvents {
    fn ended(&self, run: RunId, mut outcome: RunOutcome) {
        let tasks = self.shared.tasks.lock().remove(&run).unwrap_or_default();
        for fired in tasks {
            match fired.fault.effect {
                FaultEffect::Hang => self.shared.faults.hang(&fired),
                _ => outcome.result = outcome.result.and(Err(fired.error())),
            }
        }
        if let Some(fired) = self.shared.faults.whole(Call::Run) {
            match fired.fault.effect {
                FaultEffect::Before | FaultEffect::NoReply => {
                    outcome.result = outcome.result.and(Err(fired.error()));
                }
                FaultEffect::After | FaultEffect::Unwind => {
                    outcome.cleanup.get_or_insert_with(|| fired.error());
                }
                FaultEffect::Hang => self.shared.faults.hang(&fired),
            }
        }
        self.outer.ended(run, outcome);
    }
}

/// Hands the outer graph a faulty orchestrator.
struct FaultyBuild<'a> {
    outer: &'a mut dyn GraphBuilder,
    shared: &'a Shared,
}

impl GraphBuilder for FaultyBuild<'_> {
    fn build(&mut self, orchestrator: &dyn Orchestrator) -> Result<(), BuildFailed> {
        self.outer.build(&FaultyGraph::new(orchestrator, self.shared))
    }
}

#[deny(clippy::missing_trait_methods)]
impl Backend for FaultyBackend {
    pto_simpler_sys::forward_backend!(
        inner: capabilities, phase, check_blocking, run_state,
    );

    fn register(&self, callable: &CallableSpec) -> Result<Registered, BackendError> {
        self.whole(Call::Register, |inner| inner.register(callable))
    }

    fn start(&self, events: Arc<dyn RunEvents>) -> Result<Negotiated, BackendError> {
        let events: Arc<dyn RunEvents> = Arc::new(FaultyEvents { outer: events, shared: Arc::clone(&self.shared) });
        let chips: Vec<ChipId> = (0..self.capabilities().chips()).map(ChipId).collect();
        let fired = self.shared.several(Call::Start, &chips);
        self.shared.faults.around(fired, || self.inner.start(events))
    }

    fn submit(&self, run: RunId, config: &CallConfig, graph: &mut dyn GraphBuilder) -> Result<(), SubmitError> {
        let fired = self.shared.faults.whole(Call::Submit);
        let effect = fired.map(|fired| fired.fault.effect);
        match (effect, &fired) {
            (Some(FaultEffect::Before), Some(fired)) => return Err(fired.error().into()),
            (Some(FaultEffect::Hang), Some(fired)) => self.shared.faults.hang(fired),
            _ => {}
        }
        let mut build = FaultyBuild { outer: graph, shared: &self.shared };
        let submitted = self.inner.submit(run, config, &mut build);
        if submitted.is_err() && self.inner.run_state(run) == RunState::Unknown {
            self.shared.tasks.lock().remove(&run);
        }
        submitted?;
        match (effect, fired) {
            (Some(FaultEffect::After | FaultEffect::NoReply), Some(fired)) => Err(fired.error().into()),
            (Some(FaultEffect::Unwind), Some(fired)) => {
                resume_unwind(Box::new(format!("injected unwind: {}", fired.fault)))
            }
            _ => Ok(()),
        }
    }

    fn create_buffer(&self, nbytes: u64) -> Result<HostBufferId, BackendError> {
        self.whole(Call::CreateBuffer, |inner| inner.create_buffer(nbytes))
    }

    fn create_zeros(&self, nbytes: u64) -> Result<HostBufferId, BackendError> {
        self.whole(Call::CreateBuffer, |inner| inner.create_zeros(nbytes))
    }

    fn write_buffer(&self, buffer: HostBufferId, offset: u64, bytes: &[u8]) -> Result<(), BackendError> {
        self.whole(Call::WriteBuffer, |inner| inner.write_buffer(buffer, offset, bytes))
    }

    fn read_buffer(&self, buffer: HostBufferId, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError> {
        self.whole(Call::ReadBuffer, |inner| inner.read_buffer(buffer, offset, bytes))
    }

    fn fill_buffer(&self, buffer: HostBufferId, byte: u8) -> Result<(), BackendError> {
        self.whole(Call::FillBuffer, |inner| inner.fill_buffer(buffer, byte))
    }

    fn release_buffer(&self, buffer: HostBufferId) -> Result<(), BackendError> {
        self.whole(Call::ReleaseBuffer, |inner| inner.release_buffer(buffer))
    }

    fn alloc(&self, chip: ChipId, nbytes: u64) -> Result<DeviceBufferId, BackendError> {
        self.on_chip(Call::Alloc, chip, |inner| {
            let buffer = inner.alloc(chip, nbytes)?;
            self.shared.residents.lock().insert(buffer, chip);
            Ok(buffer)
        })
    }

    fn free(&self, buffer: DeviceBufferId) -> Result<(), BackendError> {
        let fired = self.shared.on_place(Call::Free, DevicePlace::Resident(buffer));
        self.shared.faults.around(fired, || {
            self.inner.free(buffer)?;
            self.shared.residents.lock().remove(&buffer);
            Ok(())
        })
    }

    fn copy_to(&self, copy: &CopyTo) -> Result<(), BackendError> {
        let fired = self.shared.on_place(Call::CopyTo, copy.dst);
        self.shared.faults.around(fired, || self.inner.copy_to(copy))
    }

    fn copy_from(&self, dst: HostBufferId, src: DevicePlace, nbytes: u64) -> Result<(), BackendError> {
        let fired = self.shared.on_place(Call::CopyFrom, src);
        self.shared.faults.around(fired, || self.inner.copy_from(dst, src, nbytes))
    }

    fn release_domain(&self, domain: DomainId) -> Result<(), BackendError> {
        self.whole(Call::ReleaseDomain, |inner| inner.release_domain(domain))
    }

    fn domain_state(&self, domain: DomainId) -> Result<DomainState, BackendError> {
        self.whole(Call::DomainState, |inner| inner.domain_state(domain))
    }

    fn committed_device_memory(&self, chip: ChipId) -> Result<u64, BackendError> {
        self.on_chip(Call::CommittedDeviceMemory, chip, |inner| inner.committed_device_memory(chip))
    }

    fn close(&self) -> Result<(), BackendError> {
        self.whole(Call::Close, |inner| inner.close())
    }

    fn abandon(&self) -> AbandonReport {
        // What hangs goes on, or the backend could not end.
        self.shared.faults.open();
        self.inner.abandon()
    }
}
