//! The rules of the domain table, one by one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests too")]

mod support;

use pto_domain::{
    DomainError, DomainPhase, DomainTable, Lease, LeaseAuthority, ProgramIndex, ReleaseOutcome, Slot, TableError,
};
use pto_simpler_sys::{ChipId, DomainAllocation, DomainId, DomainRequest, Family, NamedBuffer};
use support::{reply, reply_at, signal};

const P0: ProgramIndex = ProgramIndex::new(0);
const P1: ProgramIndex = ProgramIndex::new(1);

/// A table of two programs, the first of which retains `names`, with ids and epochs counted from 0.
fn table(names: &[&str]) -> (DomainTable, LeaseAuthority, Vec<Slot>) {
    let (mut table, authority) = DomainTable::new(2);
    let request = signal(&[0, 1]);
    let slots = names
        .iter()
        .zip(0..)
        .map(|(name, id)| table.insert(P0, name, &request, reply(id, &request)).unwrap())
        .collect();
    (table, authority, slots)
}

fn names(table: &DomainTable, slots: impl IntoIterator<Item = Slot>) -> Vec<String> {
    slots.into_iter().map(|slot| table.domain(slot).unwrap().backend_name().to_owned()).collect()
}

fn phases(table: &DomainTable) -> Vec<DomainPhase> {
    table.slots().map(|slot| table.domain(slot).unwrap().phase()).collect()
}

#[test]
fn s14_a_hundred_dispatches_lease_one_allocation_and_count_its_epochs() {
    let (mut table, authority, _) = table(&[]);
    let request = signal(&[0, 1]);
    for dispatch in 1..=100u64 {
        let slot = match table.lookup(P0, "comm_d0", &request).unwrap() {
            Some(slot) => slot,
            None => table.insert(P0, "comm_d0", &request, reply(0, &request)).unwrap(),
        };
        let lease = table.lease(slot, &authority).unwrap();
        // Asking again in the same dispatch gives the same lease (rule 9); dropping it gives nothing back.
        let again = table.lease(slot, &authority).unwrap();
        for lease in [&lease, &again] {
            assert_eq!((lease.epoch(), lease.is_first_use()), (dispatch, dispatch == 1));
            assert_eq!(lease.domain_id(&authority), DomainId::new(0, 1));
        }
        drop((lease, again));
        table.commit_lease(slot).unwrap();
        assert_eq!(table.domain(slot).unwrap().epoch(), dispatch);
    }
    assert_eq!((table.len(), phases(&table)), (1, vec![DomainPhase::Live]));
}

#[test]
fn rule_16_a_dispatch_that_is_never_published_leaves_no_trace_in_the_epoch() {
    let (mut table, authority, slots) = table(&["comm_d0"]);
    table.commit_lease(slots[0]).unwrap();
    for _ in 0..3 {
        assert_eq!(table.lease(slots[0], &authority).unwrap().epoch(), 2);
    }
    table.commit_lease(slots[0]).unwrap();
    assert_eq!(table.lease(slots[0], &authority).unwrap().epoch(), 3);
}

#[test]
fn s15_a_changed_request_is_refused_and_the_domain_stays_as_it_was() {
    let (mut table, authority, slots) = table(&[]);
    assert!(slots.is_empty());
    let request = DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("x", 16), NamedBuffer::bytes("y", 48)]);
    table.insert(P1, "comm_d0", &request, reply(0, &request)).unwrap();
    type Change = fn(&mut DomainRequest);
    let changes: [(&str, Change); 8] = [
        ("window_bytes was 64, is now 128", |r| r.window_bytes = 128),
        ("workers were [chip0, chip1], are now [chip0]", |r| r.workers.truncate(1)),
        ("workers were [chip0, chip1], are now [chip1, chip0]", |r| r.workers.reverse()),
        ("name of buffer 0 was \"x\", is now \"z\"", |r| r.buffers[0].name = "z".into()),
        ("dtype of buffer 0 was \"opaque\", is now \"fp32\"", |r| r.buffers[0].dtype = "fp32".into()),
        ("count of buffer 0 was 16, is now 4", |r| r.buffers[0].count = 4),
        ("nbytes of buffer 1 was 48, is now 32", |r| r.buffers[1].nbytes = 32),
        ("name of buffer 0 was \"x\", is now \"y\"", |r| r.buffers.reverse()),
    ];
    for (difference, change) in changes {
        let mut changed = request.clone();
        change(&mut changed);
        let error = table.lookup(P1, "comm_d0", &changed).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "the request for p1:comm_d0 has changed: {difference}; ask as the first time, or under another name"
            )
        );
        assert_eq!((error.family(), error.may_retry(), error.must_reprepare()), (Family::Misuse, false, false));
    }
    let slot = table.lookup(P1, "comm_d0", &request).unwrap().unwrap();
    assert_eq!(table.lease(slot, &authority).unwrap().request(), &request);
    assert_eq!((table.len(), phases(&table)), (1, vec![DomainPhase::Live]));
}

#[test]
fn s19_equal_names_of_two_programs_are_two_domains() {
    let (mut table, authority) = DomainTable::new(2);
    let (prefill, mut decode) = (signal(&[0, 1]), signal(&[0, 1]));
    decode.window_bytes = 128;
    let a = table.insert(P0, "comm_d0", &prefill, reply(0, &prefill)).unwrap();
    assert_eq!(table.lookup(P1, "comm_d0", &decode), Ok(None));
    let b = table.insert(P1, "comm_d0", &decode, reply(1, &decode)).unwrap();
    assert_eq!(names(&table, [a, b]), ["p0:comm_d0", "p1:comm_d0"]);
    assert_eq!(table.lookup(P0, "comm_d0", &prefill), Ok(Some(a)));
    assert_eq!(table.lookup(P1, "comm_d0", &decode), Ok(Some(b)));
    let id = |slot| table.lease(slot, &authority).unwrap().domain_id(&authority);
    assert_ne!(id(a), id(b));
    assert_eq!(table.retained(P0).collect::<Vec<_>>(), [a]);
    assert_eq!(table.retained(P1).collect::<Vec<_>>(), [b]);
}

#[test]
fn rule_12_a_program_retains_its_domains_in_first_use_order() {
    let (mut table, ..) = table(&["d1", "d0"]);
    let request = signal(&[1]);
    table.insert(P1, "x", &request, reply(7, &request)).unwrap();
    table.insert(P0, "d2", &request, reply(8, &request)).unwrap();
    assert_eq!(names(&table, table.retained(P0)), ["p0:d1", "p0:d0", "p0:d2"]);
    assert_eq!(names(&table, table.slots()), ["p0:d1", "p0:d0", "p1:x", "p0:d2"]);
    assert_eq!((table.len(), table.is_empty(), DomainTable::new(0).0.is_empty()), (4, false, true));
}

#[test]
fn s06_domains_are_released_in_reverse_first_use_order_and_one_failure_strands_no_other() {
    let (mut table, _, slots) = table(&["d0", "d1", "d2"]);
    table.stop_leasing();
    let plan = table.release_plan();
    assert_eq!(names(&table, plan.iter().copied()), ["p0:d2", "p0:d1", "p0:d0"]);
    for slot in plan {
        let id = table.begin_release(slot).unwrap();
        assert_eq!(table.domain(slot).unwrap().phase(), DomainPhase::Releasing);
        assert_eq!(table.domain(slot).unwrap().release_outcome(), None);
        let outcome = if id == DomainId::new(1, 1) { ReleaseOutcome::Failed } else { ReleaseOutcome::Freed };
        table.finish_release(slot, outcome).unwrap();
        assert_eq!(table.domain(slot).unwrap().release_outcome(), Some(outcome));
    }
    assert_eq!(phases(&table), [DomainPhase::Freed, DomainPhase::Unreleased, DomainPhase::Freed]);
    assert_eq!(table.release_plan(), []);
    // I4: no domain is released twice, whatever became of the first time.
    for slot in slots {
        let error = table.begin_release(slot).unwrap_err();
        assert!(matches!(error, TableError::Broken { to: DomainPhase::Releasing, .. }), "{error}");
    }
}

#[test]
fn s07_asked_to_release_is_not_freed() {
    let (mut table, _, slots) = table(&["comm_d0"]);
    table.begin_release(slots[0]).unwrap();
    table.finish_release(slots[0], ReleaseOutcome::NotFreed).unwrap();
    assert_eq!(phases(&table), [DomainPhase::Unreleased]);
    assert_eq!(table.domain(slots[0]).unwrap().release_outcome(), Some(ReleaseOutcome::NotFreed));
}

#[test]
fn s50_s54_after_poison_nothing_is_leased_and_nothing_is_ours_to_release() {
    let (mut table, authority, slots) = table(&["d0", "d1"]);
    let request = signal(&[0, 1]);
    table.poison();
    table.poison();
    assert!(table.is_poisoned());
    assert_eq!(phases(&table), [DomainPhase::BackendOwned; 2]);
    assert_eq!(table.lookup(P0, "d0", &request), Err(DomainError::Poisoned));
    assert_eq!(table.lookup(P1, "new", &request), Err(DomainError::Poisoned));
    assert_eq!(table.insert(P1, "new", &request, reply(9, &request)), Err(DomainError::Poisoned));
    let error = table.lease(slots[0], &authority).unwrap_err();
    assert_eq!(error, DomainError::Poisoned);
    assert_eq!((error.family(), error.may_retry(), error.must_reprepare()), (Family::Backend, false, true));
    assert_eq!(table.release_plan(), []);
    assert_eq!(table.retained(P0).count(), 0);
    assert_eq!(
        table.begin_release(slots[0]).unwrap_err().to_string(),
        "broken invariant: p0:d0 cannot go from owned by the backend to being released"
    );
    assert_eq!(table.len(), 2);
}

#[test]
fn a_dispatch_published_while_an_older_one_fails_still_counts() {
    let (mut table, authority, slots) = table(&["d0"]);
    assert_eq!(table.lease(slots[0], &authority).unwrap().epoch(), 1);
    table.poison();
    table.commit_lease(slots[0]).unwrap();
    let domain = table.domain(slots[0]).unwrap();
    assert_eq!((domain.epoch(), domain.phase()), (1, DomainPhase::BackendOwned));
}

#[test]
fn i6_no_lease_after_close_began_but_what_was_published_still_counts() {
    let (mut table, authority, slots) = table(&["d0"]);
    let request = signal(&[0, 1]);
    assert!(!table.is_closing() && !table.is_poisoned());
    table.stop_leasing();
    assert!(table.is_closing());
    let error = table.lease(slots[0], &authority).unwrap_err();
    assert_eq!(error, DomainError::Closing);
    assert_eq!((error.family(), error.may_retry(), error.must_reprepare()), (Family::Misuse, false, true));
    assert_eq!(table.lookup(P0, "d0", &request), Err(DomainError::Closing));
    assert_eq!(table.insert(P0, "d1", &request, reply(5, &request)), Err(DomainError::Closing));
    table.commit_lease(slots[0]).unwrap();
    assert_eq!(names(&table, table.release_plan()), ["p0:d0"]);
    // Poison says why, so it comes first.
    table.poison();
    assert_eq!(table.lookup(P0, "d0", &request), Err(DomainError::Poisoned));
    assert_eq!(table.release_plan(), []);
}

#[test]
fn a_failure_during_close_leaves_a_release_under_way_to_end_as_it_ends() {
    let (mut table, _, slots) = table(&["d0", "d1"]);
    table.begin_release(slots[1]).unwrap();
    table.poison();
    assert_eq!(phases(&table), [DomainPhase::BackendOwned, DomainPhase::Releasing]);
    table.finish_release(slots[1], ReleaseOutcome::Freed).unwrap();
    assert_eq!(phases(&table), [DomainPhase::BackendOwned, DomainPhase::Freed]);
}

#[test]
fn a_single_domain_can_be_left_to_the_backend_and_its_key_stays_taken() {
    let (mut table, authority, slots) = table(&["d0", "d1"]);
    let request = signal(&[0, 1]);
    table.backend_owned(slots[0]).unwrap();
    table.backend_owned(slots[0]).unwrap();
    assert!(!table.is_poisoned());
    assert_eq!(phases(&table), [DomainPhase::BackendOwned, DomainPhase::Live]);
    let error = table.lookup(P0, "d0", &request).unwrap_err();
    assert_eq!(error.to_string(), "p0:d0 is owned by the backend and can no longer be leased; close the worker");
    assert_eq!((error.family(), error.may_retry(), error.must_reprepare()), (Family::Backend, false, true));
    assert_eq!(table.lease(slots[0], &authority).map(drop), Err(error));
    assert!(table.insert(P0, "d0", &request, reply(9, &request)).is_err());
    assert_eq!(names(&table, table.retained(P0)), ["p0:d1"]);
    assert_eq!(names(&table, table.release_plan()), ["p0:d1"]);
    // Its memory may be another's by right, once the backend has freed it.
    table.insert(P0, "d2", &request, reply_at(9, &request, 0x1000_0000, 64)).unwrap();
}

#[track_caller]
fn broken(error: &TableError, message: &str) {
    assert_eq!(error.to_string(), message);
    assert_eq!((error.family(), error.may_retry(), error.must_reprepare()), (Family::Broken, false, true));
    let wrapped = DomainError::from(error.clone());
    assert_eq!(wrapped.to_string(), message);
    assert_eq!((wrapped.family(), wrapped.may_retry(), wrapped.must_reprepare()), (Family::Broken, false, true));
}

/// The reason why an insertion was refused; the table must be as it was.
fn refused_insert(
    table: &mut DomainTable,
    name: &str,
    request: &DomainRequest,
    reply: DomainAllocation,
) -> TableError {
    let before = format!("{table:?}");
    let Err(DomainError::Table(error)) = table.insert(P0, name, request, reply) else {
        panic!("{name} was taken over");
    };
    assert_eq!(format!("{table:?}"), before);
    error
}

#[test]
fn i1_a_key_is_taken_over_once() {
    let (mut table, ..) = table(&["d0"]);
    let request = signal(&[0, 1]);
    let error = refused_insert(&mut table, "d0", &request, reply(1, &request));
    broken(&error, "broken invariant: p0:d0 was allocated a second time (I1)");
}

#[test]
fn i2_no_two_keys_share_an_id() {
    let (mut table, ..) = table(&["d0"]);
    let request = signal(&[0, 1]);
    let error = refused_insert(&mut table, "d1", &request, reply_at(0, &request, 0x9000_0000, 64));
    broken(&error, "broken invariant: the backend gave domain0.1 to p0:d1, but p0:d0 has it (I2)");
}

#[test]
fn i2_no_two_keys_share_memory_on_a_chip() {
    const BASE: u64 = 0x1000_0000;
    let (mut table, ..) = table(&["d0"]);
    let request = signal(&[1]);
    let overlaps = [(BASE, 64), (BASE + 63, 64), (BASE - 63, 64), (BASE - 64, 192), (BASE + 8, 8), (0, u64::MAX)];
    for (base, mapped) in overlaps {
        let error = refused_insert(&mut table, "d1", &request, reply_at(1, &request, base, mapped));
        broken(&error, "broken invariant: the windows of p0:d0 and p0:d1 overlap on chip1 (I2)");
    }
    // Side by side, at the end of the address space, and at equal addresses of another chip: no memory is shared.
    let fine = [(1, BASE + 64, 64), (1, BASE - 64, 64), (1, u64::MAX - 8, 8), (2, BASE, 64), (1, BASE, 0)];
    for ((chip, base, mapped), id) in fine.into_iter().zip(1..) {
        let request = DomainRequest { workers: vec![ChipId(chip)], window_bytes: mapped, buffers: vec![] };
        table.insert(P0, &format!("d{id}"), &request, reply_at(id, &request, base, mapped)).unwrap();
    }
}

#[test]
fn a_reply_without_an_id_is_refused() {
    let (mut table, ..) = table(&[]);
    let error = refused_insert(&mut table, "d0", &signal(&[0]), DomainAllocation::new());
    broken(&error, "broken invariant: the allocation of p0:d0 carries no domain id");
}

#[test]
fn an_unknown_program_has_no_domains_and_gets_none() {
    let (mut table, ..) = table(&["d0"]);
    let (p2, request) = (ProgramIndex::new(2), signal(&[0, 1]));
    let message = "broken invariant: p2 does not exist; the table was made for 2 programs";
    for result in
        [table.lookup(p2, "d0", &request).map(drop), table.insert(p2, "d0", &request, reply(5, &request)).map(drop)]
    {
        let Err(DomainError::Table(error)) = result else { panic!("{result:?}") };
        broken(&error, message);
    }
    assert_eq!(table.retained(p2).count(), 0);
    assert_eq!(table.len(), 1);
}

#[test]
fn an_illegal_edge_names_both_states_and_changes_nothing() {
    let (mut table, _, slots) = table(&["d0"]);
    let error = table.finish_release(slots[0], ReleaseOutcome::Freed).unwrap_err();
    broken(&error, "broken invariant: p0:d0 cannot go from live to freed");
    assert_eq!(phases(&table), [DomainPhase::Live]);
    table.begin_release(slots[0]).unwrap();
    broken(
        &table.backend_owned(slots[0]).unwrap_err(),
        "broken invariant: p0:d0 cannot go from being released to owned by the backend",
    );
    broken(
        &table.commit_lease(slots[0]).unwrap_err(),
        "broken invariant: p0:d0 cannot go from being released to live",
    );
    assert_eq!(table.domain(slots[0]).unwrap().epoch(), 0);
    table.finish_release(slots[0], ReleaseOutcome::Failed).unwrap();
    let error = table.finish_release(slots[0], ReleaseOutcome::Freed).unwrap_err();
    broken(&error, "broken invariant: p0:d0 cannot go from not released to freed");
}

#[test]
fn a_slot_of_another_table_is_refused_by_number() {
    let (other, ..) = table(&["d0", "d1"]);
    let foreign = other.slots().next_back().unwrap();
    let (mut table, authority, _) = table(&["d0"]);
    let message = "broken invariant: slot 1 does not exist; the table holds 1 domains";
    assert!(table.domain(foreign).is_none());
    broken(&table.commit_lease(foreign).unwrap_err(), message);
    broken(&table.begin_release(foreign).unwrap_err(), message);
    let Err(DomainError::Table(error)) = table.lease(foreign, &authority).map(drop) else { panic!("leased") };
    broken(&error, message);
}

#[test]
fn a_retained_domain_shows_what_it_was_made_of() {
    let (table, _, slots) = table(&["comm_d0"]);
    let domain = table.domain(slots[0]).unwrap();
    let request = signal(&[0, 1]);
    assert_eq!(domain.key().to_string(), domain.backend_name());
    assert_eq!((&**domain.request(), &**domain.allocation()), (&request, &reply(0, &request)));
    assert_eq!((domain.id(), domain.epoch(), domain.phase()), (DomainId::new(0, 1), 0, DomainPhase::Live));
}

#[test]
fn tables_and_leases_may_move_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<DomainTable>();
    shared::<LeaseAuthority>();
    shared::<Lease<'_>>();
    shared::<DomainError>();
}
