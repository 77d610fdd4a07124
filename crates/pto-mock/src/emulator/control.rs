//! Control: what must come before the tasks of a run and wait until the run heads the device, and direct device
//! calls outside runs.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use parking_lot::{Condvar, Mutex};
use pto_simpler_sys::{
    BackendError, Call, ChipId, CopyGranularity, CopyResult, CopySource, CopyTo, DevicePlace, Effect, HostBufferId,
    RunId, RuntimeFailure,
};

use super::Core;
use super::run::{abandoned, closed_by_abandon};
use super::state::State;
use super::window::Region;
use crate::board::Board;
use crate::faults::FaultControl;
use crate::journal::{EventKind, Journal, WaitFor};

/// Permission for a direct device call. Outside runs it keeps tasks from starting until it is dropped.
pub(crate) struct Access<'a> {
    core: &'a Core,
    pub(crate) run: Option<RunId>,
}

impl Drop for Access<'_> {
    fn drop(&mut self) {
        if self.run.is_none() {
            self.core.state.lock().direct -= 1;
            self.core.wake_all_lanes();
            self.core.changed.notify_all();
        }
    }
}

/// A copy that has been checked.
#[derive(Clone)]
struct Prepared {
    chip: ChipId,
    place: DevicePlace,
    target: Region,
    source: Source,
    nbytes: u64,
}

#[derive(Clone)]
enum Source {
    Host(Region),
    Fill(u8),
}

/// A copy of a batch, by its position there, or why it cannot be made.
type Entry = (usize, Result<Prepared, BackendError>);
type Entries = Vec<Entry>;

/// What a copy needs besides its operands; cheap to send to a chip's thread.
#[derive(Clone)]
struct Tools {
    faults: FaultControl,
    journal: Journal,
    board: Arc<Board>,
}

impl Tools {
    fn copy(&self, run: Option<RunId>, copy: &Prepared) -> Result<(), BackendError> {
        let fired = self.faults.single(Call::CopyTo, copy.chip);
        self.faults.around(fired, || {
            let target = &copy.target;
            if target.freed.load(Ordering::Acquire) {
                return Err(BackendError::misuse(
                    Call::CopyTo,
                    "the place was freed meanwhile; drain before freeing",
                ));
            }
            let zero = match &copy.source {
                Source::Host(source) => {
                    target.segment.copy_from(target.start, &source.segment, source.start, copy.nbytes)
                }
                Source::Fill(byte) => target.segment.fill(target.start, copy.nbytes, *byte).map(|()| *byte == 0),
            };
            let zero = zero.map_err(|e| BackendError::broken(Call::CopyTo, e.to_string()))?;
            self.board.changed();
            let (chip, dst, nbytes) = (copy.chip, copy.place, copy.nbytes);
            self.journal.record(EventKind::Copy { run, chip, dst, nbytes, zero });
            Ok(())
        })
    }

    /// The copies of one chip, in order; after a failure the rest is skipped.
    fn copy_all(&self, run: Option<RunId>, copies: &[Entry]) -> Share {
        let mut share = Share::default();
        let mut failed = false;
        for (index, copy) in copies {
            let result = if failed {
                CopyResult::Skipped
            } else {
                match copy {
                    Err(error) => CopyResult::Failed(error.clone()),
                    Ok(copy) => match catch_unwind(AssertUnwindSafe(|| self.copy(run, copy))) {
                        Ok(Ok(())) => CopyResult::Done,
                        Ok(Err(error)) => CopyResult::Failed(error),
                        Err(payload) => {
                            share.payload = Some(payload);
                            let failure = RuntimeFailure::new(Call::CopyTo, "panic", "the copy unwound");
                            CopyResult::Failed(failure.with_effect(Effect::Unknown).into())
                        }
                    },
                }
            };
            failed |= result != CopyResult::Done;
            share.results.push((*index, result));
        }
        share
    }
}

/// What the copies of one chip came to.
#[derive(Default)]
struct Share {
    results: Vec<(usize, CopyResult)>,
    payload: Option<Box<dyn Any + Send>>,
}

/// Collects the shares of all chips.
#[derive(Default)]
struct Latch {
    shares: Mutex<Vec<Share>>,
    arrived: Condvar,
}

/// The chip that a place names by itself.
fn named_chip(place: DevicePlace) -> Option<ChipId> {
    match place {
        DevicePlace::DomainBuffer { chip, .. } | DevicePlace::Window { chip, .. } => Some(chip),
        DevicePlace::Resident(_) => None,
    }
}

impl Core {
    /// The run must be the one being built, and on the right thread by construction.
    pub(crate) fn check_building(&self, state: &State, run: RunId, call: Call) -> Result<(), BackendError> {
        if state.abandoned {
            return Err(abandoned(call));
        }
        if state.building.is_none_or(|building| building.run != run) {
            return Err(BackendError::misuse(call, "only valid while the graph of the run is being built"));
        }
        Ok(())
    }

    /// The control rule: before any task of the run, and at the head of the device queue.
    pub(crate) fn control(&self, run: RunId, call: Call) -> Result<(), BackendError> {
        let mut state = self.state.lock();
        let mut told = false;
        loop {
            self.check_building(&state, run, call)?;
            if state.run(run).is_some_and(|run| run.tasks_seen) {
                let message = "direct device control cannot follow a task submission of the same run; \
                               allocate and copy first";
                return Err(BackendError::misuse(call, message));
            }
            if self.options.early_control || (state.heads(run) && state.direct == 0) {
                return Ok(());
            }
            if !std::mem::replace(&mut told, true) {
                self.journal.record(EventKind::Wait { run, on: WaitFor::Head });
            }
            self.changed.wait(&mut state);
        }
    }

    /// Permission for a direct device call: control on the building thread, else only without runs in flight.
    pub(crate) fn access(&self, call: Call) -> Result<Access<'_>, BackendError> {
        let mut state = self.state.lock();
        if let Some(building) = state.building
            && building.thread == thread::current().id()
        {
            drop(state);
            self.control(building.run, call)?;
            return Ok(Access { core: self, run: Some(building.run) });
        }
        if state.abandoned {
            return Err(closed_by_abandon(call));
        }
        self.require_ready(&state, call)?;
        let in_flight = state.runs.len();
        if in_flight > 0 {
            let message = format!("{in_flight} run(s) still in flight; wait for their end first");
            return Err(BackendError::misuse(call, message));
        }
        state.direct += 1;
        Ok(Access { core: self, run: None })
    }

    fn tools(&self) -> Tools {
        Tools { faults: self.faults.clone(), journal: self.journal.clone(), board: Arc::clone(&self.board) }
    }

    pub(crate) fn copy_to(&self, run: Option<RunId>, copy: &CopyTo) -> Result<(), BackendError> {
        let prepared = self.prepare_copy(&self.state.lock(), copy)?;
        self.tools().copy(run, &prepared)
    }

    pub(crate) fn copy_from(
        &self,
        run: Option<RunId>,
        dst: HostBufferId,
        src: DevicePlace,
        nbytes: u64,
    ) -> Result<(), BackendError> {
        let call = Call::CopyFrom;
        let (chip, source, target) = {
            let state = self.state.lock();
            let (chip, source) = self.resolve_place(&state, call, src)?;
            let target = host_region(&state, call, dst)?;
            if !target.writable {
                return Err(BackendError::misuse(call, format!("{dst} is a read-only buffer of zeros")));
            }
            self.check_length(call, nbytes, source.len, target.len, true)?;
            (chip, source, target)
        };
        self.faults.around(self.faults.single(call, chip), || {
            target
                .segment
                .copy_from(target.start, &source.segment, source.start, nbytes)
                .map_err(|e| BackendError::broken(call, e.to_string()))?;
            self.board.changed();
            self.journal.record(EventKind::CopyFrom { run, chip, src, nbytes });
            Ok(())
        })
    }

    pub(crate) fn copy_batch(&self, run: RunId, copies: &[CopyTo], results: &mut Vec<CopyResult>) {
        let mut lanes: Vec<(Option<ChipId>, Entries)> = Vec::new();
        {
            let state = self.state.lock();
            for (index, copy) in copies.iter().enumerate() {
                let prepared = self.prepare_copy(&state, copy);
                let chip = prepared.as_ref().map_or_else(|_| named_chip(copy.dst), |p| Some(p.chip));
                match lanes.iter_mut().find(|(c, _)| chip.is_some() && *c == chip) {
                    Some((_, entries)) => entries.push((index, prepared)),
                    None => lanes.push((chip, vec![(index, prepared)])),
                }
            }
        }
        results.resize(copies.len(), CopyResult::Skipped);
        let shares = self.spread(run, lanes);
        let mut unwound = None;
        for share in shares {
            unwound = unwound.or(share.payload);
            for (index, result) in share.results {
                if let Some(place) = results.get_mut(index) {
                    *place = result;
                }
            }
        }
        if let Some(payload) = unwound {
            resume_unwind(payload);
        }
    }

    /// Runs the copies of each chip on that chip's own thread, all chips at once.
    fn spread(&self, run: RunId, mut lanes: Vec<(Option<ChipId>, Entries)>) -> Vec<Share> {
        let tools = self.tools();
        // One chip, or a copy that belongs nowhere, needs no second thread.
        let mut shares: Vec<Share> = Vec::with_capacity(lanes.len());
        if lanes.len() == 1 {
            shares.extend(lanes.iter().map(|(_, copies)| tools.copy_all(Some(run), copies)));
            return shares;
        }
        if self.options.early_control {
            // Chips may be busy with an earlier run then.
            thread::scope(|scope| {
                let spawned: Vec<_> =
                    lanes.iter().map(|(_, copies)| scope.spawn(|| tools.copy_all(Some(run), copies))).collect();
                shares.extend(spawned.into_iter().filter_map(|thread| thread.join().ok()));
            });
            return shares;
        }
        let latch = Arc::new(Latch::default());
        let mut expected = 0;
        let own = lanes.pop();
        {
            let mut state = self.state.lock();
            for (chip, copies) in lanes {
                let (latch_, tools_) = (Arc::clone(&latch), tools.clone());
                let work = move || {
                    let share = tools_.copy_all(Some(run), &copies);
                    latch_.shares.lock().push(share);
                    latch_.arrived.notify_all();
                };
                let lane = chip.and_then(|chip| state.lane_mut(chip)).filter(|lane| !lane.end);
                expected += 1;
                match lane {
                    Some(lane) => lane.jobs.push_back(Box::new(work)),
                    None => parking_lot::MutexGuard::unlocked(&mut state, work),
                }
            }
        }
        self.wake_all_lanes();
        shares.extend(own.map(|(_, copies)| tools.copy_all(Some(run), &copies)));
        let mut arrived = latch.shares.lock();
        while arrived.len() < expected {
            latch.arrived.wait(&mut arrived);
        }
        shares.append(&mut arrived);
        shares
    }

    fn prepare_copy(&self, state: &State, copy: &CopyTo) -> Result<Prepared, BackendError> {
        let call = Call::CopyTo;
        let (chip, target) = self.resolve_place(state, call, copy.dst)?;
        let source = match copy.src {
            CopySource::Host(id) => {
                let source = host_region(state, call, id)?;
                self.check_length(call, copy.nbytes, target.len, source.len, true)?;
                Source::Host(source)
            }
            CopySource::Fill(byte) => {
                if !self.capabilities.device_fill {
                    let message = "the device cannot fill memory (capability device_fill); copy from a host buffer";
                    return Err(BackendError::misuse(call, message));
                }
                self.check_length(call, copy.nbytes, target.len, copy.nbytes, false)?;
                Source::Fill(byte)
            }
        };
        if let Some(dead) = state.lane(chip).and_then(|lane| lane.dead.clone()) {
            return Err(dead);
        }
        Ok(Prepared { chip, place: copy.dst, target, source, nbytes: copy.nbytes })
    }

    /// Length rules: never zero, never past the device side, never past the host side; and all of the host side
    /// where the backend copies whole buffers.
    fn check_length(
        &self,
        call: Call,
        nbytes: u64,
        device: u64,
        host: u64,
        from_host: bool,
    ) -> Result<(), BackendError> {
        if nbytes == 0 {
            return Err(BackendError::misuse(call, "nbytes is 0; copy at least 1 byte"));
        }
        if nbytes > device {
            let message = format!("{nbytes} bytes exceeds the {device}-byte backing; copy fewer");
            return Err(BackendError::misuse(call, message));
        }
        if nbytes > host {
            let message = format!("{nbytes} bytes exceeds the {host}-byte host buffer; copy fewer");
            return Err(BackendError::misuse(call, message));
        }
        let whole = self.capabilities.copy_granularity == CopyGranularity::WholeBuffer;
        if whole && from_host && nbytes != host {
            let message = format!("this backend copies whole host buffers: nbytes is {nbytes}, it must be {host}");
            return Err(BackendError::misuse(call, message));
        }
        Ok(())
    }

    /// The memory of a place, from where on it may be accessed.
    fn resolve_place(
        &self,
        state: &State,
        call: Call,
        place: DevicePlace,
    ) -> Result<(ChipId, Region), BackendError> {
        match place {
            DevicePlace::DomainBuffer { domain, chip, buffer } => {
                Ok((chip, self.domain_buffer(state, call, domain, chip, buffer)?))
            }
            DevicePlace::Window { domain, chip, offset } => {
                if self.capabilities.copy_granularity == CopyGranularity::WholeBuffer {
                    let message = "this backend copies named buffers only; a window range needs range copies";
                    return Err(BackendError::misuse(call, message));
                }
                let window = self.window(state, call, domain, chip)?;
                let size = window.len;
                let part = size.checked_sub(offset).and_then(|left| window.part(offset, left));
                let part = part.ok_or_else(|| {
                    BackendError::misuse(call, format!("offset {offset} lies outside the {size}-byte window"))
                })?;
                Ok((chip, part))
            }
            DevicePlace::Resident(id) => {
                let resident = state.residents.get(id).ok_or_else(|| {
                    BackendError::misuse(call, format!("{id} is not contained in a live allocation"))
                })?;
                Ok((resident.chip, resident.region.clone()))
            }
        }
    }

    /// The requested bytes of a member's window.
    fn window(
        &self,
        state: &State,
        call: Call,
        id: pto_simpler_sys::DomainId,
        chip: ChipId,
    ) -> Result<Region, BackendError> {
        let domain = state.domains.get(id).filter(|domain| domain.complete && !domain.released);
        let domain = domain
            .ok_or_else(|| BackendError::misuse(call, format!("{id} is not contained in a live allocation")))?;
        let rank = domain.request.rank_of(chip).and_then(|rank| domain.windows.window(rank));
        rank.ok_or_else(|| {
            let members = &domain.request.workers;
            BackendError::misuse(call, format!("{chip} is no member of {id}; members are {members:?}"))
        })
    }

    /// A named buffer of a member's window.
    pub(crate) fn domain_buffer(
        &self,
        state: &State,
        call: Call,
        id: pto_simpler_sys::DomainId,
        chip: ChipId,
        buffer: u32,
    ) -> Result<Region, BackendError> {
        let window = self.window(state, call, id, chip)?;
        let spans = state.domains.get(id).map_or(&[][..], |domain| &domain.windows.buffers);
        let span = usize::try_from(buffer).ok().and_then(|index| spans.get(index));
        span.and_then(|span| window.part(span.offset, span.nbytes)).ok_or_else(|| {
            let count = spans.len();
            BackendError::misuse(call, format!("buffer {buffer} does not exist; {id} has {count} named buffers"))
        })
    }
}

/// The memory of a host buffer.
pub(crate) fn host_region(state: &State, call: Call, id: HostBufferId) -> Result<Region, BackendError> {
    state.hosts.get(id).map(|memory| memory.region.clone()).ok_or_else(|| {
        let what = if state.hosts.ever(id) { "was released" } else { "was never created here" };
        BackendError::misuse(call, format!("{id} {what}; pass a live host buffer"))
    })
}
