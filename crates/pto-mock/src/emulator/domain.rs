//! Domains: validation, allocation, reuse, release and the freeing of windows.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use pto_simpler_sys::{
    BackendError, BufferWindow, Call, ChipId, DomainAllocation, DomainId, DomainRequest, DomainState, Effect,
    FailureKind, MemberWindow, Retention, RunId, RuntimeFailure,
};

use super::Core;
use super::state::{Domain, Member, State};
use super::window::{ContextEntry, DomainWindows, Span, Window};
use crate::builder::Mapping;
use crate::faults::FaultEffect;
use crate::journal::{EventKind, FreeCause};
use crate::memory::SegmentError;

/// What fresh memory is full of where the options say that it is dirty.
pub(crate) const DIRT: u8 = 0xA5;

/// What the emulator writes into padding at mapping, so that tests can see that nobody else writes there.
pub(crate) const PADDING: u8 = 0xEE;

/// Alignment of device addresses.
const ADDRESS_ALIGN: u64 = 2 << 20;

/// Checks a request as Simpler does; nothing has been done yet.
fn validate(core: &Core, call: Call, request: &DomainRequest) -> Result<(), BackendError> {
    let misuse = |message: String| Err(BackendError::misuse(call, message));
    let chips = core.capabilities.chips();
    let ranks = request.workers.len();
    if ranks == 0 {
        return misuse("workers must be non-empty; name at least 1 chip".to_owned());
    }
    if ranks > core.capabilities.limits.ranks as usize {
        return misuse(format!("{ranks} workers; at most {} ranks are permitted", core.capabilities.limits.ranks));
    }
    for (i, chip) in request.workers.iter().enumerate() {
        if chip.0 >= chips {
            return misuse(format!("worker {} lies outside [0, {chips}); name chips that exist", chip.0));
        }
        if request.workers[..i].contains(chip) {
            return misuse(format!("workers contains duplicates: {} stands twice", chip.0));
        }
    }
    if request.window_bytes == 0 {
        return misuse("window_bytes is 0; it must be positive".to_owned());
    }
    let mut sum = 0_u64;
    for (i, buffer) in request.buffers.iter().enumerate() {
        if request.buffers[..i].iter().any(|b| b.name == buffer.name) {
            return misuse(format!("duplicate buffer names: {:?} stands twice; rename one", buffer.name));
        }
        sum = match sum.checked_add(buffer.nbytes) {
            Some(sum) => sum,
            None => return misuse("the sum of the buffers exceeds 64 bits; ask for less".to_owned()),
        };
    }
    if sum > request.window_bytes {
        let window = request.window_bytes;
        return misuse(format!("buffers sum to {sum} bytes, exceeds window_bytes={window}; enlarge the window"));
    }
    Ok(())
}

/// The first field in which two requests differ, for messages.
fn difference(kept: &DomainRequest, asked: &DomainRequest) -> String {
    if kept.workers != asked.workers {
        format!("workers {:?} against {:?}", kept.workers, asked.workers)
    } else if kept.window_bytes != asked.window_bytes {
        format!("window_bytes {} against {}", kept.window_bytes, asked.window_bytes)
    } else {
        let pairs = kept.buffers.iter().zip(&asked.buffers).enumerate().find(|(_, (a, b))| a != b);
        match pairs {
            Some((i, (a, b))) => format!("buffer {i}: {a:?} against {b:?}"),
            None => format!("{} buffers against {}", kept.buffers.len(), asked.buffers.len()),
        }
    }
}

/// Windows that were made, and why no more were.
struct Made {
    windows: Vec<Window>,
    mapped_bytes: u64,
    failure: Option<RuntimeFailure>,
}

impl Core {
    /// Allocates a domain for a run. `retainable` ones can be found again by name.
    pub(crate) fn allocate(
        &self,
        call: Call,
        run: RunId,
        name: &str,
        request: &DomainRequest,
        retain: Option<bool>,
        reply: &mut DomainAllocation,
    ) -> Result<(), BackendError> {
        reply.clear();
        validate(self, call, request)?;
        self.control(run, call)?;
        {
            let state = self.state.lock();
            if let Some(id) = state.names.get(name) {
                return Err(already_live(call, name, *id, &state));
            }
            if let Some(dead) = request.workers.iter().find_map(|chip| state.lane(*chip)?.dead.clone()) {
                return Err(dead);
            }
        }
        let whole = self.faults.whole(call);
        match whole.map(|fired| fired.fault.effect) {
            Some(FaultEffect::Before) => return whole.map_or(Ok(()), |fired| Err(fired.error())),
            Some(FaultEffect::Hang) => {
                if let Some(fired) = &whole {
                    self.faults.hang(fired);
                }
            }
            _ => {}
        }
        let made = self.make_windows(call, request);
        let lost = whole.filter(|fired| fired.fault.effect != FaultEffect::Hang);
        self.publish(run, name, request, retain, made, lost.is_some(), reply)?;
        match lost {
            None => Ok(()),
            Some(fired) => {
                reply.clear();
                self.faults.around(Some(fired), || Ok(()))
            }
        }
    }

    /// Makes one window per rank until something fails. Without an injected fault a failure leaves nothing.
    fn make_windows(&self, call: Call, request: &DomainRequest) -> Made {
        let mut made = Made { windows: Vec::with_capacity(request.workers.len()), mapped_bytes: 0, failure: None };
        let Some(mapped) = self.options.mapping.mapped(request.window_bytes) else {
            made.failure = Some(no_room(call, request.window_bytes, "the mapping exceeds 64 bits", None));
            return made;
        };
        made.mapped_bytes = mapped;
        for chip in &request.workers {
            let part = self.faults.part(call, *chip);
            let effect = part.map(|fired| fired.fault.effect);
            let failure = part.map(|fired| fired.fault.to_failure(Some(*chip)));
            if effect == Some(FaultEffect::Before) {
                let before = if made.windows.is_empty() { Effect::None } else { Effect::Done };
                made.failure = failure.map(|failure| failure.with_effect(before));
                return made;
            }
            if let (Some(FaultEffect::Hang), Some(fired)) = (effect, &part) {
                self.faults.hang(fired);
            }
            match self.make_window(call, *chip, request.window_bytes, mapped) {
                Ok(window) => made.windows.push(window),
                Err(failure) => {
                    // A genuine lack of room is rolled back at once: the request did nothing.
                    made.windows.clear();
                    made.failure = Some(failure);
                    return made;
                }
            }
            if effect.is_some_and(|effect| effect != FaultEffect::Hang) {
                made.failure = failure;
                return made;
            }
        }
        made
    }

    fn make_window(&self, call: Call, chip: ChipId, requested: u64, mapped: u64) -> Result<Window, RuntimeFailure> {
        self.check_device_memory(call, chip, mapped)?;
        let segment = self.segments.zeroed(mapped, true).map_err(|e| segment_failure(call, &e).on_chip(chip))?;
        let filled = (|| {
            if self.options.dirty_windows {
                segment.fill(0, mapped, DIRT)?;
                segment.fill(0, requested, 0)?;
            }
            if self.options.mapping != Mapping::Exact {
                segment.fill(requested, mapped - requested, PADDING)?;
            }
            Ok::<_, crate::memory::OutOfBounds>(())
        })();
        filled.map_err(|e| RuntimeFailure::new(call, "OutOfBounds", e.to_string()).on_chip(chip))?;
        Ok(Window { segment: Arc::new(segment), freed: Arc::default() })
    }

    /// Fails where a chip has not that much device memory left.
    pub(crate) fn check_device_memory(&self, call: Call, chip: ChipId, bytes: u64) -> Result<(), RuntimeFailure> {
        let Some(limit) = self.options.device_memory else { return Ok(()) };
        let committed = self.state.lock().lane(chip).map_or(0, |lane| lane.committed_bytes);
        let free = limit.saturating_sub(committed);
        if bytes <= free {
            return Ok(());
        }
        let message = format!("{bytes} bytes asked for, {free} of {limit} bytes are free");
        Err(RuntimeFailure::new(call, "OutOfMemory", message)
            .with_kind(FailureKind::OutOfDeviceMemory { requested_bytes: bytes })
            .on_chip(chip))
    }

    /// Enters a new domain, complete or not, into the tables and describes it.
    #[allow(clippy::too_many_arguments, reason = "one step of `allocate`, which has them all")]
    fn publish(
        &self,
        run: RunId,
        name: &str,
        request: &DomainRequest,
        retain: Option<bool>,
        made: Made,
        lost: bool,
        reply: &mut DomainAllocation,
    ) -> Result<(), BackendError> {
        let failed = made.failure.map(BackendError::from);
        if made.windows.is_empty() {
            return failed.map_or(Ok(()), Err);
        }
        let complete = failed.is_none();
        let chips: Vec<ChipId> = request.workers.iter().copied().take(made.windows.len()).collect();
        let mut offset = 0;
        let spans = request.buffers.iter().map(|buffer| {
            let span = Span { offset, nbytes: buffer.nbytes };
            offset += buffer.nbytes;
            span
        });
        let windows = Arc::new(DomainWindows {
            window_bytes: request.window_bytes,
            buffers: spans.collect(),
            members: made.windows,
        });
        let mut state = self.state.lock();
        let mut members = Vec::with_capacity(chips.len());
        for chip in &chips {
            let context = state.next_context;
            state.next_context += 1;
            let Some(lane) = state.lane_mut(*chip) else { continue };
            let base = take_address(&mut lane.next_address, made.mapped_bytes);
            lane.committed_bytes = lane.committed_bytes.saturating_add(made.mapped_bytes);
            members.push(Member { chip: *chip, context, base, mapped_bytes: made.mapped_bytes, mapped: true });
        }
        for (rank, member) in members.iter().enumerate() {
            let entry = ContextEntry { chip: member.chip, rank, windows: Arc::clone(&windows) };
            self.contexts.insert(member.context, entry);
        }
        let name: Arc<str> = name.into();
        let order = state.next_order;
        state.next_order += 1;
        let domain = Domain {
            name: Arc::clone(&name),
            request: request.clone(),
            windows,
            members,
            order,
            complete,
            retainable: retain.is_some() && !lost,
            doomed: false,
            released: false,
            releasing: false,
            freeing: false,
            release_result: None,
            runs: vec![run],
        };
        let Some(id) = state.domains.insert(domain) else {
            return Err(BackendError::broken(Call::AllocateDomain, "the table of domains is full"));
        };
        if let Some(run) = state.run_mut(run) {
            run.ordered = true;
            run.register(id, retain == Some(true) && complete && !lost);
        }
        let kind = if complete && !lost {
            EventKind::Alloc { run, name: Arc::clone(&name), domain: id, window_bytes: request.window_bytes, chips }
        } else {
            EventKind::AllocFailed { run, name: Arc::clone(&name), domain: id, chips }
        };
        self.journal.record(kind);
        if complete {
            state.names.insert(name, id);
            self.describe(&state, id, reply);
        }
        failed.map_or(Ok(()), Err)
    }

    /// Fills the reply of an allocation.
    fn describe(&self, state: &State, id: DomainId, reply: &mut DomainAllocation) {
        let Some(domain) = state.domains.get(id) else { return };
        let spans = &domain.windows.buffers;
        reply.begin(id, spans.len());
        for (rank, member) in domain.members.iter().enumerate() {
            let mapped_bytes = match &self.options.reported_mapping {
                Some(report) => report(&domain.name, member.chip, member.mapped_bytes),
                None => member.mapped_bytes,
            };
            let window = MemberWindow {
                chip: member.chip,
                rank: u32::try_from(rank).unwrap_or(u32::MAX),
                device_context: member.context,
                base: member.base,
                mapped_bytes,
            };
            let buffers =
                spans.iter().map(|span| BufferWindow { address: member.base + span.offset, nbytes: span.nbytes });
            reply.push_member(window, buffers);
        }
    }

    /// Finds a retained domain or allocates it.
    pub(crate) fn get_or_allocate(
        &self,
        run: RunId,
        name: &str,
        request: &DomainRequest,
        retain: bool,
        reply: &mut DomainAllocation,
    ) -> Result<(), BackendError> {
        let call = Call::GetOrAllocateDomain;
        if let Retention::Unsupported { missing } = &self.capabilities.retention {
            let message = format!("this backend cannot retain domains: {missing} is missing; use allocate_domain");
            return Err(BackendError::misuse(call, message));
        }
        let found = {
            let state = self.state.lock();
            self.check_building(&state, run, call)?;
            self.find(&state, name, request)?
        };
        if found.is_none() {
            return self.allocate(call, run, name, request, Some(retain), reply);
        }
        reply.clear();
        let result = self.faults.around(self.faults.whole(call), || {
            let mut state = self.state.lock();
            let Some(id) = self.find(&state, name, request)? else {
                let message = format!("{name:?} was released while it was being looked up");
                return Err(BackendError::misuse(call, message));
            };
            if let Some(domain) = state.domains.get_mut(id)
                && !domain.runs.contains(&run)
            {
                domain.runs.push(run);
            }
            if let Some(run) = state.run_mut(run) {
                run.register(id, retain);
                run.ordered |= !retain;
            }
            let kept = state.domains.get(id).map(|domain| Arc::clone(&domain.name));
            self.journal.record(EventKind::Reuse { run, name: kept.unwrap_or_default(), domain: id });
            self.describe(&state, id, reply);
            Ok(())
        });
        if result.is_err() {
            reply.clear();
        }
        result
    }

    /// A retained domain that answers to `name` and `request`.
    fn find(&self, state: &State, name: &str, request: &DomainRequest) -> Result<Option<DomainId>, BackendError> {
        let call = Call::GetOrAllocateDomain;
        let Some(id) = state.names.get(name).copied() else { return Ok(None) };
        let Some(domain) = state.domains.get(id) else { return Ok(None) };
        if domain.doomed || !domain.retainable {
            return Err(already_live(call, name, id, state));
        }
        if domain.request != *request {
            let message = format!(
                "{name:?} is retained under another request: {}; repeat the first request or release the domain",
                difference(&domain.request, request)
            );
            return Err(BackendError::misuse(call, message));
        }
        Ok(Some(id))
    }

    pub(crate) fn release_domain(&self, id: DomainId) -> Result<(), BackendError> {
        let mut state = self.state.lock();
        loop {
            let ever = state.domains.ever(id);
            match state.domains.get_mut(id) {
                Some(domain) => {
                    if let Some(result) = &domain.release_result {
                        return result.clone();
                    }
                    if !domain.releasing && !domain.freeing {
                        domain.releasing = true;
                        break;
                    }
                }
                None if ever => {
                    return state.release_failures.get(&id).cloned().map_or(Ok(()), Err);
                }
                None => {
                    let message = format!("{id} was never allocated here");
                    return Err(BackendError::misuse(Call::ReleaseDomain, message));
                }
            }
            // Somebody else releases or frees it: wait for that outcome and repeat it.
            self.changed.wait(&mut state);
        }
        drop(state);
        let fired = self.faults.whole(Call::ReleaseDomain);
        let released = catch_unwind(AssertUnwindSafe(|| self.faults.around(fired, || self.release_now(id))));
        let result = match &released {
            Ok(result) => result.clone(),
            Err(_) => Err(RuntimeFailure::new(Call::ReleaseDomain, "panic", "the release unwound")
                .with_effect(Effect::Unknown)
                .into()),
        };
        let mut state = self.state.lock();
        if let Err(error) = &result {
            state.release_failures.insert(id, error.clone());
        }
        if let Some(domain) = state.domains.get_mut(id) {
            domain.releasing = false;
            domain.release_result = Some(result.clone());
        }
        self.changed.notify_all();
        drop(state);
        if let Err(payload) = released {
            resume_unwind(payload);
        }
        result
    }

    fn release_now(&self, id: DomainId) -> Result<(), BackendError> {
        {
            let mut state = self.state.lock();
            let Some(domain) = state.domains.get_mut(id) else { return Ok(()) };
            domain.released = true;
            let (name, in_use) = (Arc::clone(&domain.name), !domain.runs.is_empty());
            free_name(&mut state, &name, id);
            self.journal.record(EventKind::Release(id));
            if in_use {
                return Ok(());
            }
        }
        self.free_domain(id, FreeCause::Release)
    }

    /// Frees the windows of a domain; waits if somebody else does it already, and then reports what came of that.
    pub(crate) fn free_domain(&self, id: DomainId, cause: FreeCause) -> Result<(), BackendError> {
        let call = match cause {
            FreeCause::Release => Call::ReleaseDomain,
            FreeCause::Cleanup(_) => Call::Run,
            FreeCause::Sweep => Call::Close,
        };
        let mut state = self.state.lock();
        let members = loop {
            let Some(domain) = state.domains.get_mut(id) else {
                return state.release_failures.get(&id).cloned().map_or(Ok(()), Err);
            };
            let others_release = domain.releasing && cause != FreeCause::Release;
            if !domain.freeing && !others_release {
                domain.freeing = true;
                domain.released = true;
                let members = domain.members.iter().enumerate().filter(|(_, m)| m.mapped);
                break members.map(|(rank, m)| (rank, m.chip)).collect::<Vec<_>>();
            }
            self.changed.wait(&mut state);
        };
        if let Some(domain) = state.domains.get(id) {
            let name = Arc::clone(&domain.name);
            free_name(&mut state, &name, id);
        }
        drop(state);

        let (mut freed, mut first) = (Vec::new(), None);
        for (rank, chip) in members {
            let part = self.faults.part(call, chip);
            let effect = part.map(|fired| fired.fault.effect);
            if let (Some(FaultEffect::Hang), Some(fired)) = (effect, &part) {
                self.faults.hang(fired);
            }
            if effect != Some(FaultEffect::Before) {
                freed.push((rank, chip));
            }
            if let Some(fired) = part.filter(|fired| fired.fault.effect != FaultEffect::Hang) {
                let left = if effect == Some(FaultEffect::Before) { "is still mapped" } else { "was freed" };
                let mut failure = fired.fault.to_failure(Some(chip));
                failure.message = format!("the window of {id} on {chip} {left}: {}", failure.message);
                first.get_or_insert(BackendError::from(failure));
            }
        }

        let mut state = self.state.lock();
        let mut freed_bytes = Vec::with_capacity(freed.len());
        if let Some(domain) = state.domains.get_mut(id) {
            for (rank, chip) in &freed {
                if let Some(window) = domain.windows.members.get(*rank) {
                    window.freed.store(true, std::sync::atomic::Ordering::Release);
                }
                if let Some(member) = domain.members.get_mut(*rank) {
                    member.mapped = false;
                    self.contexts.remove(member.context);
                    freed_bytes.push((*chip, member.mapped_bytes));
                }
            }
            domain.freeing = false;
        }
        for (chip, bytes) in freed_bytes {
            if let Some(lane) = state.lane_mut(chip) {
                lane.committed_bytes -= bytes;
            }
        }
        if !freed.is_empty() {
            let chips = freed.into_iter().map(|(_, chip)| chip).collect();
            self.journal.record(EventKind::Free { domain: id, chips, cause });
        }
        let empty = state.domains.get(id).is_some_and(|domain| domain.members.iter().all(|m| !m.mapped));
        let gone = if empty { state.domains.remove(id) } else { None };
        if let (Some(error), None) = (&first, &gone)
            && let Some(domain) = state.domains.get_mut(id)
        {
            domain.release_result = Some(Err(error.clone()));
        }
        if let (Some(error), Some(_)) = (&first, &gone) {
            state.release_failures.insert(id, error.clone());
        }
        // Waiting kernels look again and find their memory freed.
        self.board.changed();
        self.changed.notify_all();
        drop(state);
        drop(gone);
        first.map_or(Ok(()), Err)
    }

    pub(crate) fn domain_state(&self, id: DomainId) -> Result<DomainState, BackendError> {
        let state = self.state.lock();
        match state.domains.get(id) {
            Some(domain) if domain.released => Ok(DomainState::Released),
            Some(_) => Ok(DomainState::Live),
            None if state.domains.ever(id) => Ok(DomainState::Freed),
            None => Err(BackendError::misuse(Call::DomainState, format!("{id} was never allocated here"))),
        }
    }
}

/// Forgets a name, if it still means this domain.
fn free_name(state: &mut State, name: &str, id: DomainId) {
    if state.names.get(name) == Some(&id) {
        state.names.remove(name);
    }
}

fn already_live(call: Call, name: &str, id: DomainId, state: &State) -> BackendError {
    let doomed = state.domains.get(id).is_some_and(|domain| domain.doomed);
    let why = if doomed { " and about to be freed after a failed run" } else { "" };
    BackendError::misuse(
        call,
        format!("domain {name:?} is already live as {id}{why}; release it or rename this one"),
    )
}

/// Hands out a device address for `bytes` bytes.
pub(crate) fn take_address(next: &mut u64, bytes: u64) -> u64 {
    let base = *next;
    let end = base.saturating_add(bytes);
    *next = end.checked_next_multiple_of(ADDRESS_ALIGN).unwrap_or(end);
    base
}

fn no_room(call: Call, bytes: u64, what: &str, chip: Option<ChipId>) -> RuntimeFailure {
    let mut failure = RuntimeFailure::new(call, "OutOfMemory", what)
        .with_kind(FailureKind::OutOfSharedMemory { requested_bytes: bytes });
    failure.chip = chip;
    failure
}

/// The failure of a call that could not get memory; nothing was done.
pub(crate) fn segment_failure(call: Call, error: &SegmentError) -> RuntimeFailure {
    match error {
        SegmentError::Full { bytes, .. } => no_room(call, *bytes, &error.to_string(), None),
        SegmentError::System { .. } => RuntimeFailure::new(call, "SystemError", error.to_string()),
    }
}
