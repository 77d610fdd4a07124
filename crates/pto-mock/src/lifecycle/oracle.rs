//! The oracle: the invariants of the design, read off the emulator's journal and nothing else.
//!
//! It shares no code with the crates under test and no state with the model. It is also useful by itself: record a
//! journal, call [`check`].

use std::collections::{BTreeMap, BTreeSet};

use pto_simpler_sys::{ChipId, DevicePlace, DomainId, DomainRequest, HostBufferId, RunId};

use crate::{Event, EventKind, FreeCause};

/// What the oracle needs to know beyond the journal.
#[derive(Clone, Copy)]
pub struct Rules<'a> {
    /// Most dispatches in flight (I9).
    pub frames: usize,
    /// Whether each reuse of a domain is preceded by a reset (I8).
    pub resets: bool,
    /// The request behind a domain's name, as the backend knows it.
    pub request: &'a dyn Fn(&str) -> Option<DomainRequest>,
    /// Whether the worker is closed: everything must be gone (I4, I11).
    pub closed: bool,
}

impl std::fmt::Debug for Rules<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rules").field("frames", &self.frames).field("closed", &self.closed).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Run {
    accepted: bool,
    failed_build: bool,
    fenced: bool,
    ended: bool,
    tasks_running: usize,
    task_submitted: bool,
    reused: Vec<DomainId>,
    zeroed: BTreeMap<(DomainId, ChipId), BTreeSet<u64>>,
    buffers: Vec<HostBufferId>,
}

impl Run {
    fn over(&self) -> bool {
        self.failed_build || self.ended
    }
}

#[derive(Debug)]
struct Domain {
    name: String,
    users: BTreeSet<RunId>,
    released: bool,
    left: BTreeSet<ChipId>,
}

/// Checks every invariant that a journal can show.
///
/// # Errors
///
/// The first violation, naming the invariant and the event.
pub fn check(events: &[Event], rules: Rules<'_>) -> Result<(), String> {
    let mut book = Book { rules, runs: BTreeMap::new(), domains: BTreeMap::new(), loose: Vec::new(), last: None };
    for event in events {
        book.event(&event.kind).map_err(|what| format!("{what}, at event `{event}`"))?;
    }
    if rules.closed { book.at_the_end() } else { Ok(()) }
}

struct Book<'a> {
    rules: Rules<'a>,
    runs: BTreeMap<RunId, Run>,
    domains: BTreeMap<DomainId, Domain>,
    /// Host buffers made since the last admission: staging of the run that is admitted next.
    loose: Vec<HostBufferId>,
    last: Option<RunId>,
}

impl Book<'_> {
    fn run(&mut self, run: RunId) -> &mut Run {
        self.runs.entry(run).or_default()
    }

    fn event(&mut self, event: &EventKind) -> Result<(), String> {
        match event {
            EventKind::Start { .. } => self.loose.clear(),
            EventKind::BufferCreate { buffer, .. } => self.loose.push(*buffer),
            EventKind::BufferRelease { buffer, .. } => self.buffer_released(*buffer)?,
            EventKind::Admit(run) => self.admitted(*run)?,
            EventKind::Accept(run) => self.run(*run).accepted = true,
            EventKind::BuildFailed(run) => self.run(*run).failed_build = true,
            EventKind::Fence(run) => self.run(*run).fenced = true,
            EventKind::Ended(run, _) => self.ended(*run)?,
            EventKind::Alloc { run, name, domain, chips, .. } => self.allocated(*run, name, *domain, chips)?,
            EventKind::AllocFailed { run, name, domain, chips } => {
                let entry = Domain {
                    name: format!("{name} (failed)"),
                    users: BTreeSet::from([*run]),
                    released: false,
                    left: chips.iter().copied().collect(),
                };
                self.domains.insert(*domain, entry);
            }
            EventKind::Reuse { run, domain, .. } => {
                let Some(entry) = self.domains.get_mut(domain) else {
                    return Err(format!("I6: {domain} is reused and was never allocated"));
                };
                if entry.released || entry.left.is_empty() {
                    return Err(format!("I6: {domain} is reused after its release"));
                }
                entry.users.insert(*run);
                self.run(*run).reused.push(*domain);
            }
            EventKind::Copy { run: Some(run), chip, dst, nbytes, zero } => {
                self.copied(*run, *chip, *dst, *nbytes, *zero)?;
            }
            EventKind::TaskSubmit { run, .. } => self.task_submitted(*run)?,
            EventKind::TaskStart { run, .. } => {
                self.run(*run).tasks_running += 1;
                if let Some(earlier) = self.runs.iter().find(|(id, r)| **id < *run && r.accepted && !r.fenced) {
                    return Err(format!("order: {run} starts a task before the fence of {}", earlier.0));
                }
            }
            EventKind::TaskEnd { run, .. } => self.run(*run).tasks_running -= 1,
            EventKind::Release(domain) => {
                if let Some(entry) = self.domains.get_mut(domain) {
                    entry.released = true;
                }
            }
            EventKind::Free { domain, chips, cause } => self.freed(*domain, chips, *cause)?,
            _ => {}
        }
        Ok(())
    }

    fn admitted(&mut self, run: RunId) -> Result<(), String> {
        if self.last.is_some_and(|last| last >= run) {
            return Err(format!("I9: {run} is built after {:?}", self.last));
        }
        self.last = Some(run);
        let buffers = std::mem::take(&mut self.loose);
        self.run(run).buffers = buffers;
        let open = self.runs.values().filter(|r| !r.over()).count();
        if open > self.rules.frames {
            return Err(format!("I9: {open} dispatches hold {} frames", self.rules.frames));
        }
        Ok(())
    }

    fn ended(&mut self, run: RunId) -> Result<(), String> {
        let entry = self.run(run);
        if entry.ended || !entry.accepted || !entry.fenced {
            return Err(format!("I10: {run} ends twice, or unaccepted, or before its fence"));
        }
        entry.ended = true;
        if let Some(earlier) = self.runs.iter().find(|(id, r)| **id < run && r.accepted && !r.ended) {
            return Err(format!("I10: {run} ends before {}", earlier.0));
        }
        Ok(())
    }

    fn allocated(&mut self, run: RunId, name: &str, id: DomainId, chips: &[ChipId]) -> Result<(), String> {
        if self.domains.contains_key(&id) {
            return Err(format!("I2: {id} is given out twice"));
        }
        let twin = self.domains.values().find(|d| d.name == name && !d.released && !d.left.is_empty());
        if let Some(twin) = twin {
            return Err(format!("I1: `{name}` is allocated while an earlier one lives ({twin:?})"));
        }
        let left = chips.iter().copied().collect();
        let users = BTreeSet::from([run]);
        self.domains.insert(id, Domain { name: name.to_owned(), users, released: false, left });
        Ok(())
    }

    fn freed(&mut self, id: DomainId, chips: &[ChipId], cause: FreeCause) -> Result<(), String> {
        let Some(entry) = self.domains.get_mut(&id) else {
            return Err(format!("I4: {id} is freed and was never allocated"));
        };
        for chip in chips {
            if !entry.left.remove(chip) {
                return Err(format!("I4: {id} is freed twice on {chip}"));
            }
        }
        for user in &entry.users {
            let run = self.runs.get(user);
            let own = cause == FreeCause::Cleanup(*user);
            let in_flight = run.is_some_and(|r| r.tasks_running > 0 || !(own || r.fenced || r.failed_build));
            if in_flight {
                return Err(format!("I5: {id} is freed while {user} may use it"));
            }
        }
        Ok(())
    }

    fn buffer_released(&mut self, buffer: HostBufferId) -> Result<(), String> {
        self.loose.retain(|b| *b != buffer);
        for (id, run) in &mut self.runs {
            if run.buffers.contains(&buffer) {
                if !run.over() {
                    return Err(format!("I5: staging buffer {buffer} is released before the end of {id}"));
                }
                run.buffers.retain(|b| *b != buffer);
            }
        }
        Ok(())
    }

    fn copied(
        &mut self,
        run: RunId,
        chip: ChipId,
        dst: DevicePlace,
        nbytes: u64,
        zero: bool,
    ) -> Result<(), String> {
        if let Some(earlier) = self.runs.iter().find(|(id, r)| **id < run && r.accepted && !r.fenced) {
            return Err(format!("I8: {run} copies before the fence of {} (S27)", earlier.0));
        }
        let (domain, bytes) = match dst {
            DevicePlace::DomainBuffer { domain, buffer, .. } => {
                let request = self.request(domain)?;
                let Some(target) = request.buffers.get(buffer as usize) else {
                    return Err(format!("I8: a copy into buffer {buffer} of {domain}, which has none"));
                };
                let start: u64 = request.buffers[..buffer as usize].iter().map(|b| b.nbytes).sum();
                if nbytes > target.nbytes {
                    return Err(format!("I8: {nbytes} bytes into a buffer of {}", target.nbytes));
                }
                (domain, start..start + nbytes)
            }
            DevicePlace::Window { domain, offset, .. } => {
                if offset + nbytes > self.request(domain)?.window_bytes {
                    return Err(format!("I8: a copy writes past the requested window of {domain}"));
                }
                (domain, offset..offset + nbytes)
            }
            DevicePlace::Resident(_) => return Ok(()),
        };
        if !self.domains.get(&domain).is_some_and(|d| d.users.contains(&run)) {
            return Err(format!("I8: {run} copies into {domain}, which it has not registered (rule 12)"));
        }
        if zero {
            let done = self.run(run).zeroed.entry((domain, chip)).or_default();
            for byte in bytes {
                if !done.insert(byte) {
                    return Err(format!("I8: byte {byte} of {domain} on {chip} is zeroed twice"));
                }
            }
        }
        Ok(())
    }

    fn request(&self, domain: DomainId) -> Result<DomainRequest, String> {
        let name = self.domains.get(&domain).map_or("", |d| d.name.as_str());
        (self.rules.request)(name).ok_or_else(|| format!("{domain} (`{name}`) is no domain of any program"))
    }

    /// All that the run has found again must be zero before its first task.
    fn task_submitted(&mut self, run: RunId) -> Result<(), String> {
        if std::mem::replace(&mut self.run(run).task_submitted, true) || !self.rules.resets {
            return Ok(());
        }
        for domain in self.run(run).reused.clone() {
            let request = self.request(domain)?;
            for chip in &request.workers {
                let named: u64 = request.buffers.iter().map(|b| b.nbytes).sum();
                let done = self.run(run).zeroed.get(&(domain, *chip)).map_or(0, BTreeSet::len) as u64;
                if done != named && done != request.window_bytes {
                    return Err(format!(
                        "I8: {run} submits a task with {done} of {named} bytes of {domain} zeroed on {chip}"
                    ));
                }
            }
        }
        Ok(())
    }

    fn at_the_end(&self) -> Result<(), String> {
        if let Some((id, domain)) = self.domains.iter().find(|(_, d)| !d.left.is_empty()) {
            return Err(format!("I4: {id} (`{}`) is never freed on {:?}", domain.name, domain.left));
        }
        if let Some((id, run)) = self.runs.iter().find(|(_, r)| r.accepted && !r.ended) {
            return Err(format!("I10: {id} never ends ({run:?})"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(_: &str) -> Option<DomainRequest> {
        Some(DomainRequest::packed([0], vec![pto_simpler_sys::NamedBuffer::bytes("b", 8)]))
    }

    fn verdict(resets: bool, closed: bool, kinds: Vec<EventKind>) -> Result<(), String> {
        let events: Vec<Event> =
            kinds.into_iter().enumerate().map(|(seq, kind)| Event { seq: seq as u64, kind }).collect();
        check(&events, Rules { frames: 2, resets, request: &request, closed })
    }

    fn alloc(run: u64, domain: u32) -> EventKind {
        EventKind::Alloc {
            run: RunId(run),
            name: "p0:d0".into(),
            domain: DomainId::new(domain, 0),
            window_bytes: 8,
            chips: vec![ChipId(0)],
        }
    }

    fn life(run: u64) -> Vec<EventKind> {
        vec![EventKind::Accept(RunId(run)), EventKind::Fence(RunId(run)), EventKind::Ended(RunId(run), true)]
    }

    fn zero(run: u64) -> EventKind {
        EventKind::Copy {
            run: Some(RunId(run)),
            chip: ChipId(0),
            dst: DevicePlace::DomainBuffer { domain: DomainId::new(0, 0), chip: ChipId(0), buffer: 0 },
            nbytes: 8,
            zero: true,
        }
    }

    fn task(run: u64) -> EventKind {
        EventKind::TaskSubmit {
            run: RunId(run),
            chip: Some(ChipId(0)),
            callable: pto_simpler_sys::CallableId::new(0, 0),
        }
    }

    fn reuse(run: u64) -> EventKind {
        EventKind::Reuse { run: RunId(run), name: "p0:d0".into(), domain: DomainId::new(0, 0) }
    }

    fn free(cause: FreeCause) -> EventKind {
        EventKind::Free { domain: DomainId::new(0, 0), chips: vec![ChipId(0)], cause }
    }

    #[test]
    fn the_oracle_accepts_a_sound_life() {
        let mut kinds = vec![EventKind::Admit(RunId(1)), alloc(1, 0), task(1)];
        kinds.extend(life(1));
        kinds.extend([EventKind::Admit(RunId(2)), reuse(2), zero(2), task(2)]);
        kinds.extend(life(2));
        kinds.push(free(FreeCause::Release));
        assert_eq!(verdict(true, true, kinds), Ok(()));
    }

    #[test]
    fn the_oracle_sees_each_kind_of_breach() {
        let breach = |name: &str, resets, closed, kinds: Vec<EventKind>| {
            let found = verdict(resets, closed, kinds).expect_err(name);
            assert!(found.starts_with(name), "{found}");
        };
        let first = |mut rest: Vec<EventKind>| {
            let mut kinds = vec![EventKind::Admit(RunId(1)), alloc(1, 0)];
            kinds.append(&mut rest);
            kinds
        };
        breach("I1", false, false, first(vec![alloc(1, 1)]));
        breach("I2", false, false, first(vec![alloc(1, 0)]));
        breach("I4", false, true, first(life(1)));
        breach("I5", false, false, first(vec![EventKind::Accept(RunId(1)), free(FreeCause::Release)]));
        let mut twice = first(life(1));
        twice.extend([free(FreeCause::Release), free(FreeCause::Sweep)]);
        breach("I4", false, false, twice);
        let mut unreset = first(life(1));
        unreset.extend([EventKind::Admit(RunId(2)), reuse(2), task(2)]);
        breach("I8", true, false, unreset);
        let mut early = first(vec![EventKind::Accept(RunId(1))]);
        early.extend([EventKind::Admit(RunId(2)), reuse(2), zero(2)]);
        breach("I8", true, false, early);
        let mut unregistered = first(life(1));
        unregistered.extend([EventKind::Admit(RunId(2)), zero(2), reuse(2)]);
        breach("I8", true, false, unregistered);
        breach("I9", false, false, (1..4).map(|run| EventKind::Admit(RunId(run))).collect());
        let mut ends = first(life(1));
        ends.push(EventKind::Ended(RunId(1), true));
        breach("I10", false, false, ends);
    }
}
