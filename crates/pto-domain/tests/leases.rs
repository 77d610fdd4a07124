//! What a lease shows, and what it does not.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests too")]

mod support;

use std::sync::Arc;

use pto_domain::{DomainKey, DomainName, DomainTable, Lease, LeaseAuthority, LeaseError, LeaseParts, ProgramIndex};
use pto_simpler_sys::{ChipId, DomainAllocation, DomainId, DomainRequest, Family, NamedBuffer, TensorPlace};
use support::{chips, reply, reply_at};

fn two_buffers(workers: &[u32]) -> DomainRequest {
    DomainRequest::packed(
        workers.iter().copied(),
        vec![NamedBuffer::bytes("data", 48), NamedBuffer::bytes("signal", 16)],
    )
}

fn parts(request: DomainRequest, allocation: DomainAllocation) -> LeaseParts {
    LeaseParts {
        domain: DomainId::new(7, 1),
        key: DomainKey::new(ProgramIndex::new(1), DomainName::new("comm_d0")),
        epoch: 3,
        first_use: false,
        request: Arc::new(request),
        allocation: Arc::new(allocation),
    }
}

fn authority() -> LeaseAuthority {
    DomainTable::new(0).1
}

#[test]
fn a_lease_shows_the_request_and_where_the_backend_put_it() {
    let authority = authority();
    let request = two_buffers(&[1, 0]);
    let lease = Lease::new(&authority, parts(request.clone(), reply(7, &request)));
    assert_eq!((lease.epoch(), lease.is_first_use(), lease.ranks()), (3, false, 2));
    assert_eq!((lease.name(), lease.key().to_string()), ("comm_d0", "p1:comm_d0".to_owned()));
    assert_eq!(lease.request(), &request);
    assert_eq!(lease.window_bytes(), 64);
    assert_eq!((lease.chip(0), lease.chip(1), lease.chip(2)), (Some(ChipId(1)), Some(ChipId(0)), None));
    assert_eq!((lease.rank_of(ChipId(0)), lease.rank_of(ChipId(2))), (Some(1), None));
    assert_eq!(lease.device_context(ChipId(1)), Ok(0xC001));
    assert_eq!(lease.domain_id(&authority), DomainId::new(7, 1));

    let signal = lease.buffer(ChipId(0), "signal").unwrap();
    assert_eq!((signal.chip(), signal.index(), signal.nbytes()), (ChipId(0), 1, 16));
    assert_eq!(signal.address(), 0x1070_0000 + 48);
    let place = TensorPlace::DomainBuffer { domain: DomainId::new(7, 1), chip: ChipId(0), buffer: 1 };
    assert_eq!(signal.place(&authority), place);
    assert_eq!(lease.buffer_at(ChipId(0), 1).unwrap().place(&authority), place);
    assert_eq!(lease.buffer(ChipId(0), "data").unwrap().index(), 0);
}

#[test]
fn s25_a_lease_never_exposes_padding() {
    let request = two_buffers(&[0, 1]);
    let lease = Lease::new(&authority(), parts(request.clone(), reply_at(7, &request, 0x1000, 2 << 20)));
    assert_eq!(lease.window_bytes(), 64);
    for chip in chips(&[0, 1]) {
        let buffers = (0..2).map(|index| lease.buffer_at(chip, index).unwrap());
        assert!(buffers.into_iter().all(|b| b.address() >= 0x1000 && b.address() + b.nbytes() <= 0x1000 + 64));
        assert!(lease.buffer_at(chip, 2).is_err());
    }
}

#[test]
fn a_wrong_question_says_what_there_is() {
    let request = two_buffers(&[1, 0]);
    let lease = Lease::new(&authority(), parts(request.clone(), reply(7, &request)));
    let stranger = lease.device_context(ChipId(5)).unwrap_err();
    assert_eq!(stranger.to_string(), "chip5 is no member of p1:comm_d0; its members are [chip1, chip0]");
    assert_eq!(lease.buffer(ChipId(5), "data").unwrap_err(), stranger);
    let unnamed = lease.buffer(ChipId(0), "sig").unwrap_err();
    assert_eq!(unnamed.to_string(), "p1:comm_d0 has no buffer \"sig\"; its buffers are [\"data\", \"signal\"]");
    let beyond = lease.buffer_at(ChipId(0), 2).unwrap_err();
    assert_eq!(beyond.to_string(), "p1:comm_d0 has no buffer 2; it has 2 buffers, numbered from 0");
    for error in [stranger, unnamed, beyond] {
        assert_eq!((error.family(), error.may_retry(), error.must_reprepare()), (Family::Misuse, false, false));
    }
}

#[test]
fn a_reply_that_does_not_describe_the_request_is_a_broken_invariant() {
    let request = two_buffers(&[0, 1]);
    let broken = |allocation: DomainAllocation, chip: u32, rank: usize| {
        let lease = Lease::new(&authority(), parts(request.clone(), allocation));
        let error = lease.buffer(ChipId(chip), "signal").unwrap_err();
        assert!(matches!(error, LeaseError::BadReply { chip: c, rank: r, .. } if c.0 == chip && r == rank));
        assert_eq!((error.family(), error.may_retry(), error.must_reprepare()), (Family::Broken, false, true));
        error.to_string()
    };
    // Members in another order, a missing member, a missing buffer, a buffer of another size.
    assert_eq!(
        broken(reply(7, &two_buffers(&[1, 0])), 1, 1),
        "broken invariant: the allocation of p1:comm_d0 does not describe chip1 as rank 1"
    );
    broken(reply(7, &two_buffers(&[0])), 1, 1);
    let one = DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("data", 48)]);
    broken(reply(7, &one), 0, 0);
    let mut other = request.clone();
    other.buffers[1].nbytes = 17;
    broken(reply(7, &other), 0, 0);
}

#[test]
fn rule_11_no_print_of_a_lease_shows_the_physical_id() {
    let request = two_buffers(&[0, 1]);
    let lease = Lease::new(&authority(), parts(request.clone(), reply(7, &request)));
    let id = DomainId::new(7, 1).to_string();
    let texts = [format!("{lease:?}"), format!("{:?}", lease.buffer(ChipId(0), "data").unwrap())];
    for text in texts {
        assert!(!text.contains(&id), "{text}");
    }
    assert!(format!("{lease:?}").contains("p1:comm_d0"));
    assert!(format!("{:?}", lease.buffer_at(ChipId(1), 0)).contains("chip1"));
}
