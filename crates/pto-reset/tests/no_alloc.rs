//! The warm path of a reset allocates nothing (cost model).
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests too")]

mod support;

use std::hint::black_box;

use allocation_counter::measure;
use pto_reset::{CoveredWindow, Method, ResetPlan, check_mapping, coverage};
use support::{host, id, mapped, reply, request};

#[test]
fn the_counter_counts() {
    assert!(measure(|| drop(black_box(vec![0u8; 64]))).count_total > 0);
}

#[test]
fn checking_coverage_and_mapping_allocates_nothing() {
    let request = request(&[0, 1, 2, 3], 160, &[64, 32, 64]);
    let allocation = reply(id(0), &request, 4096);
    let counted = measure(|| {
        coverage(&request).unwrap();
        check_mapping(&request, &allocation).unwrap();
        let covered = CoveredWindow::check(&request, Method::WholeBuffer).unwrap();
        black_box(covered.map(id(0), &allocation).unwrap());
    });
    assert_eq!(counted.count_total, 0);
}

#[test]
fn writing_copies_into_storage_that_is_there_allocates_nothing() {
    let ranges = Method::ByteRange { chunk_bytes: 10 };
    for method in [Method::WholeBuffer, ranges, Method::DeviceFill, Method::BufferFill] {
        let windows = [
            mapped(0, &request(&[0, 1], 160, &[64, 32, 64]), method).unwrap(),
            mapped(1, &request(&[1, 2], 96, &[32, 64]), method).unwrap(),
        ];
        let plan = ResetPlan::new(method, &windows).unwrap();
        let sources: Vec<_> = (0..u32::try_from(plan.sources()).unwrap()).map(host).collect();
        let mut out = Vec::with_capacity(plan.copies());
        let counted = measure(|| plan.write_copies(&sources, &mut out).unwrap());
        assert_eq!((counted.count_total, out.len()), (0, plan.copies()), "{method:?}");
    }
}
