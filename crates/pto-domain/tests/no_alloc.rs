//! The warm path of a dispatch allocates nothing (cost model).
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests too")]

mod support;

use std::hint::black_box;

use allocation_counter::measure;
use pto_domain::{DomainTable, ProgramIndex, check_name, check_request, difference};
use pto_simpler_sys::{ChipId, DomainRequest, NamedBuffer};
use support::reply;

const P1: ProgramIndex = ProgramIndex::new(1);

fn request() -> DomainRequest {
    let buffers = (0..20).map(|i| NamedBuffer::bytes(format!("buffer_{i}"), 64 + i)).collect();
    DomainRequest::packed(0..8, buffers)
}

#[test]
fn the_counter_counts() {
    assert!(measure(|| drop(black_box(request().clone()))).count_total > 0);
}

#[test]
fn checking_and_comparing_requests_allocates_nothing() {
    let (first, now) = (request(), request());
    let counted = measure(|| {
        check_name("comm_d0").unwrap();
        check_request(&now, 8, 64).unwrap();
        assert!(difference(&first, &now).is_none());
    });
    assert_eq!(counted.count_total, 0);
}

#[test]
fn looking_up_leasing_and_committing_a_warm_domain_allocates_nothing() {
    let (mut table, authority) = DomainTable::new(2);
    let request = request();
    for (name, id) in ["d0", "d1", "d2"].into_iter().zip(0..) {
        table.insert(P1, name, &request, reply(id, &request)).unwrap();
    }
    let counted = measure(|| {
        let slot = table.lookup(P1, "d2", &request).unwrap().unwrap();
        let lease = table.lease(slot, &authority).unwrap();
        let again = lease.clone();
        let buffer = again.buffer(ChipId(7), "buffer_19").unwrap();
        black_box((buffer.place(&authority), lease.device_context(ChipId(3)).unwrap()));
        black_box(table.retained(P1).map(|slot| table.domain(slot).unwrap().backend_name().len()).sum::<usize>());
        drop((lease, again));
        table.commit_lease(slot).unwrap();
    });
    assert_eq!(counted.count_total, 0);
}
