//! Validity of requests and the difference between two of them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests too")]

use proptest::prelude::*;
use pto_domain::{Difference, RequestError, check_name, check_request, difference};
use pto_simpler_sys::{ChipId, DomainRequest, Family, NamedBuffer};

fn request(workers: &[u32], window_bytes: u64, buffers: &[(&str, u64)]) -> DomainRequest {
    DomainRequest {
        workers: workers.iter().copied().map(ChipId).collect(),
        window_bytes,
        buffers: buffers.iter().map(|(name, nbytes)| NamedBuffer::bytes(*name, *nbytes)).collect(),
    }
}

#[track_caller]
fn refused(request: &DomainRequest, expected: RequestError, message: &str) {
    let error = check_request(request, 4, 3).unwrap_err();
    assert_eq!(error, expected);
    assert_eq!(error.to_string(), message);
    assert_eq!((error.family(), error.may_retry(), error.must_reprepare()), (Family::Misuse, false, false));
}

#[test]
fn s20_buffers_over_the_window_are_refused_with_both_sizes() {
    refused(
        &request(&[0, 1], 64, &[("a", 40), ("b", 40)]),
        RequestError::Oversized { named: 80, window: 64 },
        "named buffers sum to 80 bytes, but window_bytes is 64; ask for at least 80",
    );
}

#[test]
fn s20_a_window_of_no_bytes_is_refused() {
    refused(&request(&[0], 0, &[]), RequestError::ZeroWindow, "window_bytes is 0; ask for at least 1 byte");
    refused(&request(&[0], 0, &[("a", 4)]), RequestError::ZeroWindow, "window_bytes is 0; ask for at least 1 byte");
}

#[test]
fn s20_a_repeated_buffer_name_is_refused_with_both_positions() {
    refused(
        &request(&[0], 64, &[("a", 4), ("b", 4), ("a", 8)]),
        RequestError::DuplicateBuffer { name: "a".into(), first: 0, second: 2 },
        "buffers 0 and 2 are both called \"a\"; names are unique within a domain",
    );
}

#[test]
fn s20_a_buffer_of_no_bytes_is_refused_by_name() {
    refused(
        &request(&[0], 64, &[("a", 4), ("b", 0)]),
        RequestError::EmptyBuffer { name: "b".into() },
        "buffer \"b\" has nbytes 0; ask for at least 1 byte or leave the buffer out",
    );
}

#[test]
fn s20_a_sum_that_overflows_is_refused_and_never_wraps() {
    refused(
        &request(&[0], 64, &[("a", u64::MAX), ("b", 65)]),
        RequestError::Overflow { name: "b".into(), before: u64::MAX, nbytes: 65 },
        "65 bytes of buffer \"b\" after 18446744073709551615 bytes of earlier buffers exceed 18446744073709551615 \
         bytes; shrink them",
    );
    check_request(&request(&[0], u64::MAX, &[("a", u64::MAX - 1), ("b", 1)]), 4, 3).unwrap();
}

#[test]
fn members_are_at_least_one_each_known_each_once_and_no_more_than_the_limit() {
    refused(&request(&[], 64, &[]), RequestError::NoWorkers, "workers is empty; name at least one chip worker");
    refused(
        &request(&[0, 4], 64, &[]),
        RequestError::WorkerOutOfRange { chip: ChipId(4), chips: 4 },
        "worker chip4 is out of range; this worker drives 4 chips, numbered from chip0",
    );
    refused(
        &request(&[2, 0, 2], 64, &[]),
        RequestError::DuplicateWorker { chip: ChipId(2), first: 0, second: 2 },
        "chip2 is a worker twice, as rank 0 and as rank 2; name each chip worker once",
    );
    refused(
        &request(&[0, 1, 2, 3], 64, &[]),
        RequestError::TooManyRanks { ranks: 4, max: 3 },
        "4 ranks exceed the backend's limit of 3; name at most 3 workers",
    );
}

#[test]
fn what_the_rules_do_not_forbid_is_allowed() {
    check_request(&request(&[3, 1, 0], 64, &[("a", 4)]), 4, 3).unwrap();
    check_request(&request(&[0], 1, &[]), 4, 3).unwrap();
    check_request(&request(&[0], 80, &[("a", 40), ("b", 40)]), 4, 3).unwrap();
    let odd = DomainRequest {
        workers: vec![ChipId(0)],
        window_bytes: 3,
        buffers: vec![NamedBuffer { name: "".into(), dtype: "any".into(), count: 0, nbytes: 3 }],
    };
    check_request(&odd, 1, 1).unwrap();
}

#[test]
fn a_domain_needs_a_name() {
    assert_eq!(check_name(""), Err(RequestError::EmptyName));
    assert_eq!(RequestError::EmptyName.to_string(), "the name of a domain is empty; name it");
    assert_eq!(check_name(" "), Ok(()));
}

fn two_buffers() -> DomainRequest {
    request(&[0, 1], 64, &[("x", 16), ("y", 32)])
}

#[track_caller]
fn differs(change: impl FnOnce(&mut DomainRequest), expected: Difference, message: &str) {
    let first = two_buffers();
    let mut now = first.clone();
    change(&mut now);
    let found = difference(&first, &now).unwrap();
    assert_eq!(found, expected);
    assert_eq!(found.to_string(), message);
}

#[test]
fn s15_each_changed_field_is_named_with_both_values() {
    let workers = |ids: &[u32]| ids.iter().copied().map(ChipId).collect();
    differs(
        |r| r.window_bytes = 128,
        Difference::WindowBytes { first: 64, now: 128 },
        "window_bytes was 64, is now 128",
    );
    differs(
        |r| r.workers.truncate(1),
        Difference::Workers { first: workers(&[0, 1]), now: workers(&[0]) },
        "workers were [chip0, chip1], are now [chip0]",
    );
    differs(
        |r| r.workers.swap(0, 1),
        Difference::Workers { first: workers(&[0, 1]), now: workers(&[1, 0]) },
        "workers were [chip0, chip1], are now [chip1, chip0]",
    );
    differs(
        |r| r.buffers.truncate(1),
        Difference::NumberOfBuffers { first: 2, now: 1 },
        "number of buffers was 2, is now 1",
    );
    differs(
        |r| r.buffers[1].name = "z".into(),
        Difference::BufferName { index: 1, first: "y".into(), now: "z".into() },
        "name of buffer 1 was \"y\", is now \"z\"",
    );
    differs(
        |r| r.buffers[0].dtype = "fp32".into(),
        Difference::BufferDtype { index: 0, first: "opaque".into(), now: "fp32".into() },
        "dtype of buffer 0 was \"opaque\", is now \"fp32\"",
    );
    differs(
        |r| r.buffers[0].count = 4,
        Difference::BufferCount { index: 0, first: 16, now: 4 },
        "count of buffer 0 was 16, is now 4",
    );
    differs(
        |r| r.buffers[1].nbytes = 31,
        Difference::BufferBytes { index: 1, first: 32, now: 31 },
        "nbytes of buffer 1 was 32, is now 31",
    );
    differs(
        |r| r.buffers.swap(0, 1),
        Difference::BufferName { index: 0, first: "x".into(), now: "y".into() },
        "name of buffer 0 was \"x\", is now \"y\"",
    );
}

fn any_request() -> impl Strategy<Value = DomainRequest> {
    let size = || prop_oneof![8 => 0u64..6, 1 => Just(u64::MAX), 1 => Just(u64::MAX - 3)];
    let buffer = ("[ab]?", "[xy]", 0u64..3, size()).prop_map(|(name, dtype, count, nbytes)| NamedBuffer {
        name: name.into(),
        dtype: dtype.into(),
        count,
        nbytes,
    });
    let workers = proptest::collection::vec((0u32..4).prop_map(ChipId), 0..4);
    let buffers = proptest::collection::vec(buffer, 0..4);
    (workers, size(), buffers).prop_map(|(workers, window_bytes, buffers)| DomainRequest {
        workers,
        window_bytes,
        buffers,
    })
}

/// The rules in wide arithmetic and sets, one by one, without their order.
fn valid(request: &DomainRequest, chips: u32, max_ranks: u32) -> bool {
    use std::collections::BTreeSet;
    let members: BTreeSet<_> = request.workers.iter().collect();
    let names: BTreeSet<_> = request.buffers.iter().map(|buffer| &buffer.name).collect();
    let named: u128 = request.buffers.iter().map(|buffer| u128::from(buffer.nbytes)).sum();
    !members.is_empty()
        && members.len() == request.workers.len()
        && members.iter().all(|chip| chip.0 < chips)
        && members.len() <= max_ranks as usize
        && request.window_bytes > 0
        && names.len() == request.buffers.len()
        && request.buffers.iter().all(|buffer| buffer.nbytes > 0)
        && named <= u128::from(request.window_bytes)
}

proptest! {
    #[test]
    fn a_request_passes_exactly_if_every_rule_holds(request in any_request(), chips in 0u32..5, max in 0u32..4) {
        prop_assert_eq!(check_request(&request, chips, max).is_ok(), valid(&request, chips, max));
    }

    #[test]
    fn i7_there_is_a_difference_exactly_if_the_requests_are_unequal(a in any_request(), b in any_request()) {
        prop_assert_eq!(difference(&a, &b).is_none(), a == b);
        prop_assert!(difference(&a, &a.clone()).is_none());
    }
}
