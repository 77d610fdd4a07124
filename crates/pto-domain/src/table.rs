//! All retained domains of one prepared worker.

use std::sync::Arc;

use pto_simpler_sys::{ChipId, DomainAllocation, DomainId, DomainRequest, MemberWindow};

use crate::error::{DomainError, TableError};
use crate::key::{DomainKey, DomainName, ProgramIndex};
use crate::lease::{Lease, LeaseAuthority, LeaseParts};
use crate::request::difference;
use crate::state::{DomainPhase, Event, Life, ReleaseOutcome};

/// Names an entry of one [`DomainTable`], for that table's whole life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(usize);

/// A domain that the table has been told of, in whatever phase it is.
#[derive(Debug)]
pub struct RetainedDomain {
    key: DomainKey,
    backend_name: Arc<str>,
    request: Arc<DomainRequest>,
    allocation: Arc<DomainAllocation>,
    id: DomainId,
    /// Published dispatches that leased it.
    epoch: u64,
    life: Life,
}

impl RetainedDomain {
    /// Its key.
    #[must_use]
    pub fn key(&self) -> &DomainKey {
        &self.key
    }

    /// The name by which the backend knows it: the key's text, `p0:comm_d0`.
    #[must_use]
    pub fn backend_name(&self) -> &str {
        &self.backend_name
    }

    /// What was asked for at first use.
    #[must_use]
    pub fn request(&self) -> &Arc<DomainRequest> {
        &self.request
    }

    /// What the backend answered.
    #[must_use]
    pub fn allocation(&self) -> &Arc<DomainAllocation> {
        &self.allocation
    }

    /// The physical domain.
    #[must_use]
    pub fn id(&self) -> DomainId {
        self.id
    }

    /// How many published dispatches have leased it.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Where it is in its life.
    #[must_use]
    pub fn phase(&self) -> DomainPhase {
        self.life.phase()
    }

    /// How its release ended, once it has.
    #[must_use]
    pub fn release_outcome(&self) -> Option<ReleaseOutcome> {
        self.life.release_outcome()
    }
}

/// The retained domains of one prepared worker, in the order of their first use.
///
/// Entries are never removed, so a [`Slot`] stays good and a key or an id never comes twice.
#[derive(Debug)]
pub struct DomainTable {
    /// In first-use order over all programs; a slot is a position.
    domains: Vec<RetainedDomain>,
    /// The slots of each program, in first-use order.
    by_program: Vec<Vec<Slot>>,
    poisoned: bool,
    closing: bool,
}

impl DomainTable {
    /// An empty table for a worker prepared from so many programs, and the authority over its leases.
    #[must_use]
    pub fn new(programs: u32) -> (Self, LeaseAuthority) {
        let by_program = (0..programs).map(|_| Vec::new()).collect();
        (Self { domains: Vec::new(), by_program, poisoned: false, closing: false }, LeaseAuthority::new())
    }

    /// The domain that `program` calls `name`, if it is retained; the request must equal the first one (rule 9, I7).
    /// Allocates nothing on success.
    ///
    /// # Errors
    ///
    /// [`DomainError::Poisoned`] and [`DomainError::Closing`] whatever is asked for (I6);
    /// [`DomainError::SpecChanged`] where the request differs; [`DomainError::NotLive`] where this domain is no
    /// longer the table's to serve; [`DomainError::Table`] for an unknown program.
    pub fn lookup(
        &self,
        program: ProgramIndex,
        name: &str,
        request: &DomainRequest,
    ) -> Result<Option<Slot>, DomainError> {
        self.check_serving()?;
        let Some(slot) = self.find(program, name)? else { return Ok(None) };
        let domain = self.entry(slot)?;
        Self::check_live(domain)?;
        match difference(&domain.request, request) {
            None => Ok(Some(slot)),
            Some(difference) => Err(DomainError::SpecChanged { key: domain.key.clone(), difference }),
        }
    }

    /// Takes over a domain that the backend has just allocated for `program` under the key's backend name. It is live,
    /// and its epoch is 0 until a dispatch that leased it is published.
    ///
    /// # Errors
    ///
    /// [`DomainError::Poisoned`] and [`DomainError::Closing`]: the table takes nothing over any more, the domain is
    /// the backend's. [`DomainError::Table`] for a key that is present already (I1), for an id or device memory that
    /// another domain has (I2), for a reply without an id and for an unknown program. The table is as it was.
    pub fn insert(
        &mut self,
        program: ProgramIndex,
        name: &str,
        request: &DomainRequest,
        allocation: DomainAllocation,
    ) -> Result<Slot, DomainError> {
        self.check_serving()?;
        let key = DomainKey::new(program, DomainName::new(name));
        if self.find(program, name)?.is_some() {
            return Err(TableError::DuplicateKey { key }.into());
        }
        let id = allocation.id().ok_or_else(|| TableError::NoId { key: key.clone() })?;
        for other in &self.domains {
            if other.id == id {
                return Err(TableError::DuplicateId { id, first: other.key.clone(), second: key }.into());
            }
            // A domain that is no longer live may be gone, and its memory another's by right.
            if other.phase() == DomainPhase::Live
                && let Some(chip) = shared_chip(&other.allocation, &allocation)
            {
                return Err(TableError::SharedMemory { chip, first: other.key.clone(), second: key }.into());
            }
        }
        let slot = Slot(self.domains.len());
        self.slots_mut(program)?.push(slot);
        self.domains.push(RetainedDomain {
            backend_name: key.to_string().into(),
            key,
            request: Arc::new(request.clone()),
            allocation: Arc::new(allocation),
            id,
            epoch: 0,
            life: Life::new(),
        });
        self.debug_check();
        Ok(slot)
    }

    /// The live domains of a program in first-use order: what its dispatches register with their run, and reset. None
    /// for an unknown program.
    pub fn retained(&self, program: ProgramIndex) -> impl Iterator<Item = Slot> {
        self.program_slots(program)
            .unwrap_or(&[])
            .iter()
            .copied()
            .filter(|slot| self.domain(*slot).is_some_and(|domain| domain.phase() == DomainPhase::Live))
    }

    /// What is known of a domain.
    #[must_use]
    pub fn domain(&self, slot: Slot) -> Option<&RetainedDomain> {
        self.domains.get(slot.0)
    }

    /// Leases a live domain to the build `'b`. Its epoch counts the dispatch being built, which is not published yet:
    /// leasing again in the same dispatch gives the same lease, and a dispatch that is never published leaves no
    /// trace. Allocates nothing on success.
    ///
    /// The authority's holder answers for `'b`, as in [`Lease::new`]: the table cannot know where a build ends.
    ///
    /// # Errors
    ///
    /// [`DomainError::Poisoned`] and [`DomainError::Closing`] (I6); [`DomainError::NotLive`];
    /// [`DomainError::Table`] for an unknown slot.
    pub fn lease<'b>(&self, slot: Slot, authority: &LeaseAuthority) -> Result<Lease<'b>, DomainError> {
        self.check_serving()?;
        let domain = self.entry(slot)?;
        Self::check_live(domain)?;
        Ok(Lease::new(
            authority,
            LeaseParts {
                domain: domain.id,
                key: domain.key.clone(),
                // Saturating: 2^64 dispatches do not happen, and an epoch that stops growing is no reason to panic.
                epoch: domain.epoch.saturating_add(1),
                first_use: domain.epoch == 0,
                request: Arc::clone(&domain.request),
                allocation: Arc::clone(&domain.allocation),
            },
        ))
    }

    /// A dispatch that leased the domain was published: its epoch goes up by one. Call it once per dispatch and
    /// domain, however often the dispatch asked for the lease. Counts in a poisoned table too, where an older
    /// dispatch failed while this one was being published.
    ///
    /// # Errors
    ///
    /// [`TableError::Broken`] once its release has begun; [`TableError::UnknownSlot`].
    pub fn commit_lease(&mut self, slot: Slot) -> Result<(), TableError> {
        self.step(slot, Event::Published)?;
        let domain = self.entry_mut(slot)?;
        domain.epoch = domain.epoch.saturating_add(1);
        Ok(())
    }

    /// A failure has poisoned persistent dispatch (rule 17): all live domains become the backend's, nothing is leased
    /// or taken over any more. Idempotent; legal at any time.
    pub fn poison(&mut self) {
        self.poisoned = true;
        for domain in self.domains.iter_mut().filter(|domain| domain.phase() == DomainPhase::Live) {
            // Every live domain may be disowned, by the table of legal edges.
            let stepped = domain.life.step(Event::Disown);
            debug_assert_eq!(stepped, Ok(()), "a live domain may become the backend's");
        }
        self.debug_check();
    }

    /// This one domain becomes the backend's to clean; the others stay as they are. Its key stays taken, because its
    /// memory may still be there (I1). Idempotent.
    ///
    /// # Errors
    ///
    /// [`TableError::Broken`] once its release has begun; [`TableError::UnknownSlot`].
    pub fn backend_owned(&mut self, slot: Slot) -> Result<(), TableError> {
        self.step(slot, Event::Disown)
    }

    /// Close has begun: nothing is leased or taken over from here on (I6). Idempotent.
    pub fn stop_leasing(&mut self) {
        self.closing = true;
    }

    /// The live domains in reverse first-use order: what close releases, in that order (rule 20). Empty when poisoned.
    #[must_use]
    pub fn release_plan(&self) -> Vec<Slot> {
        (0..self.domains.len())
            .rev()
            .filter(|index| self.domains[*index].phase() == DomainPhase::Live)
            .map(Slot)
            .collect()
    }

    /// The backend is about to be asked to release this domain; returns the id to ask with. Legal once per domain.
    ///
    /// # Errors
    ///
    /// [`TableError::Broken`] unless it is live; [`TableError::UnknownSlot`].
    pub fn begin_release(&mut self, slot: Slot) -> Result<DomainId, TableError> {
        self.step(slot, Event::BeginRelease)?;
        Ok(self.entry(slot)?.id)
    }

    /// How that release ended. Final: it is never tried again.
    ///
    /// # Errors
    ///
    /// [`TableError::Broken`] unless its release has begun and is not finished; [`TableError::UnknownSlot`].
    pub fn finish_release(&mut self, slot: Slot, outcome: ReleaseOutcome) -> Result<(), TableError> {
        self.step(slot, Event::FinishRelease(outcome))
    }

    /// Whether a failure has poisoned persistent dispatch.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    /// Whether close has begun.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        self.closing
    }

    /// How many domains the table has been told of, in whatever phase they are: the distinct keys used (I3).
    #[must_use]
    pub fn len(&self) -> usize {
        self.domains.len()
    }

    /// Whether no domain has been used yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.domains.is_empty()
    }

    /// All slots in first-use order.
    pub fn slots(&self) -> impl DoubleEndedIterator<Item = Slot> + ExactSizeIterator {
        (0..self.domains.len()).map(Slot)
    }

    /// Checks the table's own invariants, slowly: I1 (one entry per key), I2 (no shared id or memory), I6 (nothing
    /// live when poisoned), and that both indexes agree. For tests; debug builds run it after each insertion and poison.
    ///
    /// # Errors
    ///
    /// What is wrong.
    pub fn self_check(&self) -> Result<(), TableError> {
        let wrong = |what: String| Err(TableError::Inconsistent { what });
        for (index, domain) in self.domains.iter().enumerate() {
            if *domain.backend_name != *domain.key.to_string() {
                return wrong(format!("{} is known to the backend as {}", domain.key, domain.backend_name));
            }
            if domain.allocation.id() != Some(domain.id) {
                return wrong(format!("the allocation of {} is {:?}", domain.key, domain.allocation.id()));
            }
            if self.poisoned && domain.phase() == DomainPhase::Live {
                return wrong(format!("{} is live in a poisoned table (I6)", domain.key));
            }
            for other in &self.domains[..index] {
                if other.key == domain.key {
                    return Err(TableError::DuplicateKey { key: domain.key.clone() });
                }
                let (first, second) = (other.key.clone(), domain.key.clone());
                if other.id == domain.id {
                    return Err(TableError::DuplicateId { id: domain.id, first, second });
                }
                if other.phase() == DomainPhase::Live
                    && domain.phase() == DomainPhase::Live
                    && let Some(chip) = shared_chip(&other.allocation, &domain.allocation)
                {
                    return Err(TableError::SharedMemory { chip, first, second });
                }
            }
            let listed = self.program_slots(domain.key.program())?.iter().filter(|slot| slot.0 == index).count();
            if listed != 1 {
                return wrong(format!("{} is listed {listed} times under its program", domain.key));
            }
        }
        let listed: usize = self.by_program.iter().map(Vec::len).sum();
        if listed != self.domains.len() {
            return wrong(format!("{listed} slots are listed for {} domains", self.domains.len()));
        }
        if self.by_program.iter().any(|slots| !slots.is_sorted()) {
            return wrong("a program's slots are out of first-use order".into());
        }
        Ok(())
    }

    fn check_serving(&self) -> Result<(), DomainError> {
        // Poison first: it says why the worker is being closed.
        if self.poisoned {
            Err(DomainError::Poisoned)
        } else if self.closing {
            Err(DomainError::Closing)
        } else {
            Ok(())
        }
    }

    fn check_live(domain: &RetainedDomain) -> Result<(), DomainError> {
        match domain.phase() {
            DomainPhase::Live => Ok(()),
            phase => Err(DomainError::NotLive { key: domain.key.clone(), phase }),
        }
    }

    /// Linear: a program has a handful of domains, and comparing a short list of names beats hashing one.
    fn find(&self, program: ProgramIndex, name: &str) -> Result<Option<Slot>, TableError> {
        let mut slots = self.program_slots(program)?.iter().copied();
        Ok(slots.find(|slot| self.domain(*slot).is_some_and(|domain| domain.key.name().as_str() == name)))
    }

    fn step(&mut self, slot: Slot, event: Event) -> Result<(), TableError> {
        let domain = self.entry_mut(slot)?;
        domain.life.step(event).map_err(|edge| TableError::Broken {
            key: domain.key.clone(),
            from: edge.from,
            to: edge.to,
        })
    }

    fn entry(&self, slot: Slot) -> Result<&RetainedDomain, TableError> {
        self.domains.get(slot.0).ok_or(TableError::UnknownSlot { slot: slot.0, len: self.domains.len() })
    }

    fn entry_mut(&mut self, slot: Slot) -> Result<&mut RetainedDomain, TableError> {
        let len = self.domains.len();
        self.domains.get_mut(slot.0).ok_or(TableError::UnknownSlot { slot: slot.0, len })
    }

    fn program_slots(&self, program: ProgramIndex) -> Result<&[Slot], TableError> {
        let found = usize::try_from(program.get()).ok().and_then(|index| self.by_program.get(index));
        found.map(Vec::as_slice).ok_or(TableError::UnknownProgram { program, programs: self.by_program.len() })
    }

    fn slots_mut(&mut self, program: ProgramIndex) -> Result<&mut Vec<Slot>, TableError> {
        let programs = self.by_program.len();
        let found = usize::try_from(program.get()).ok().and_then(|index| self.by_program.get_mut(index));
        found.ok_or(TableError::UnknownProgram { program, programs })
    }

    fn debug_check(&self) {
        debug_assert_eq!(self.self_check(), Ok(()), "the table's own invariants hold");
    }
}

/// A chip on which two allocations overlap. Addresses are per chip, so only windows of one chip are compared.
fn shared_chip(a: &DomainAllocation, b: &DomainAllocation) -> Option<ChipId> {
    let overlap = |x: &MemberWindow, y: &MemberWindow| {
        // Neither is past the other's end; differences cannot overflow, sums of address and size could.
        x.chip == y.chip
            && x.base.checked_sub(y.base).is_none_or(|gap| gap < y.mapped_bytes)
            && y.base.checked_sub(x.base).is_none_or(|gap| gap < x.mapped_bytes)
    };
    a.members().iter().find(|x| b.members().iter().any(|y| overlap(x, y))).map(|member| member.chip)
}

#[cfg(test)]
mod tests {
    //! What the table's own check finds, on tables that were broken on purpose.

    use super::*;
    use pto_simpler_sys::NamedBuffer;

    fn reply(id: u32, base: u64) -> DomainAllocation {
        let mut allocation = DomainAllocation::new();
        allocation.begin(DomainId::new(id, 1), 0);
        let chip = ChipId(0);
        allocation.push_member(MemberWindow { chip, rank: 0, device_context: 0, base, mapped_bytes: 64 }, []);
        allocation
    }

    /// `p0:d0`, `p1:d1` and `p0:d2`, in this order.
    fn table() -> DomainTable {
        let (mut table, _) = DomainTable::new(2);
        let request = DomainRequest::packed([0], vec![NamedBuffer::bytes("signal", 64)]);
        for (id, (program, name)) in (0..).zip([(0, "d0"), (1, "d1"), (0, "d2")]) {
            table.insert(ProgramIndex::new(program), name, &request, reply(id, u64::from(id) * 64)).unwrap();
        }
        table.self_check().unwrap();
        table
    }

    #[track_caller]
    fn found(damage: impl FnOnce(&mut DomainTable)) -> String {
        let mut table = table();
        damage(&mut table);
        table.self_check().unwrap_err().to_string()
    }

    #[test]
    fn i1_the_check_finds_a_key_that_is_there_twice() {
        let text = found(|table| {
            table.domains[2].key = table.domains[0].key.clone();
            table.domains[2].backend_name = Arc::clone(&table.domains[0].backend_name);
        });
        assert_eq!(text, "broken invariant: p0:d0 was allocated a second time (I1)");
    }

    #[test]
    fn i2_the_check_finds_a_shared_id_and_shared_memory() {
        let text = found(|table| {
            table.domains[2].id = DomainId::new(0, 1);
            table.domains[2].allocation = Arc::new(reply(0, 128));
        });
        assert_eq!(text, "broken invariant: the backend gave domain0.1 to p0:d2, but p0:d0 has it (I2)");
        let overlap = |table: &mut DomainTable| table.domains[2].allocation = Arc::new(reply(2, 127));
        assert_eq!(found(overlap), "broken invariant: the windows of p1:d1 and p0:d2 overlap on chip0 (I2)");
        // Memory is shared by two live domains only.
        for index in [1, 2] {
            let mut table = table();
            overlap(&mut table);
            table.domains[index].life.step(Event::Disown).unwrap();
            table.self_check().unwrap();
        }
    }

    #[test]
    fn i6_the_check_finds_a_live_domain_in_a_poisoned_table() {
        let text = found(|table| table.poisoned = true);
        assert_eq!(text, "broken invariant: p0:d0 is live in a poisoned table (I6)");
    }

    #[test]
    fn the_check_finds_an_entry_that_does_not_match_itself() {
        let text = found(|table| table.domains[1].backend_name = "d1".into());
        assert_eq!(text, "broken invariant: p1:d1 is known to the backend as d1");
        let text = found(|table| table.domains[1].id = DomainId::new(9, 9));
        assert_eq!(text, "broken invariant: the allocation of p1:d1 is Some(domain1.1)");
    }

    #[test]
    fn the_check_finds_indexes_that_disagree() {
        let text = found(|table| table.by_program[0].push(Slot(0)));
        assert_eq!(text, "broken invariant: p0:d0 is listed 2 times under its program");
        let text = found(|table| table.by_program[1].clear());
        assert_eq!(text, "broken invariant: p1:d1 is listed 0 times under its program");
        let text = found(|table| table.by_program[1].push(Slot(7)));
        assert_eq!(text, "broken invariant: 4 slots are listed for 3 domains");
        let text = found(|table| table.by_program[0].reverse());
        assert_eq!(text, "broken invariant: a program's slots are out of first-use order");
        let text = found(|table| drop(table.by_program.pop()));
        assert_eq!(text, "broken invariant: p1 does not exist; the table was made for 1 programs");
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "the table's own invariants hold")]
    fn a_debug_build_checks_the_table_after_a_poison() {
        let mut table = table();
        table.domains[1].backend_name = "d1".into();
        table.poison();
    }
}
