//! Plans against a slow per-byte model, over random requests, mappings and methods.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests too")]

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, subsequence};
use pto_reset::{CoveredWindow, Method, ResetPlan, check_mapping, coverage};
use pto_simpler_sys::DomainRequest;
use support::{DIRT, Memory, execute, host, id, reply, request};

/// Named bytes from 0 to a few hundred, some slack, any members in any order, sometimes padding.
fn domain() -> impl Strategy<Value = (Arc<DomainRequest>, u64)> {
    let workers = subsequence(vec![0u32, 1, 2, 3], 1..=4).prop_shuffle();
    let sizes = vec(prop_oneof![Just(8u64), 1..40u64], 0..6);
    let slack = prop_oneof![2 => Just(0u64), 1 => 1..50u64];
    let padding = prop_oneof![Just(0u64), 1..100u64];
    (workers, sizes, slack, padding).prop_map(|(workers, sizes, slack, padding)| {
        let window = sizes.iter().sum::<u64>() + slack;
        (request(&workers, window.max(1), &sizes), padding)
    })
}

fn method() -> impl Strategy<Value = Method> {
    prop_oneof![
        Just(Method::WholeBuffer),
        (1..70u64).prop_map(|chunk_bytes| Method::ByteRange { chunk_bytes }),
        Just(Method::DeviceFill),
        Just(Method::BufferFill),
    ]
}

/// The named bytes of a window, marked one by one.
fn named(request: &DomainRequest) -> Vec<bool> {
    let mut bytes = vec![false; usize::try_from(request.window_bytes).unwrap()];
    let mut next = 0;
    for buffer in &request.buffers {
        for _ in 0..buffer.nbytes {
            bytes[next] = true;
            next += 1;
        }
    }
    bytes
}

proptest! {
    #[test]
    fn i8_a_plan_zeroes_each_requested_byte_once_and_no_other_or_is_refused(
        domains in vec(domain(), 0..4),
        method in method(),
    ) {
        let mut windows = Vec::new();
        for ((request, padding), index) in domains.iter().zip(0..) {
            let named = named(request);
            let unnamed = named.iter().filter(|named| !**named).count() as u64;
            let found = coverage(request).unwrap();
            prop_assert_eq!((found.named_bytes, found.slack_bytes), (request.window_bytes - unnamed, unnamed));
            let covered = CoveredWindow::check(request, method);
            let whole = matches!(method, Method::WholeBuffer | Method::BufferFill);
            prop_assert_eq!(covered.is_err(), whole && unnamed > 0, "rule 13");
            let Ok(covered) = covered else { return Ok(()) };
            windows.push(covered.map(id(index), &reply(id(index), request, request.window_bytes + padding)).unwrap());
        }
        let plan = ResetPlan::new(method, &windows).unwrap();

        let sizes: Vec<u64> = domains.iter().flat_map(|(r, _)| r.buffers.iter().map(|b| b.nbytes)).collect();
        let mut seen = BTreeSet::new();
        let mut distinct: Vec<u64> = sizes.into_iter().filter(|size| seen.insert(*size)).collect();
        if method != Method::WholeBuffer {
            distinct.clear();
        }
        prop_assert_eq!(plan.staging_sizes(), &distinct[..], "I11, rule 15");
        prop_assert_eq!(plan.staging_bytes(), distinct.iter().sum::<u64>());

        let staging = match method {
            Method::ByteRange { chunk_bytes } => vec![chunk_bytes],
            _ => distinct,
        };
        let sources: Vec<_> = (0..u32::try_from(staging.len()).unwrap()).map(host).collect();
        let mut copies = Vec::new();
        plan.write_copies(&sources, &mut copies).unwrap();
        prop_assert_eq!(copies.len(), plan.copies());
        prop_assert_eq!(copies.iter().map(|copy| copy.nbytes).sum::<u64>(), plan.bytes());

        let mut memory: Vec<Memory> = domains
            .iter()
            .zip(0..)
            .map(|((r, padding), i)| Memory::new(id(i), r, usize::try_from(r.window_bytes + padding).unwrap()))
            .collect();
        execute(method, &copies, &staging, &mut memory);
        for (memory, (request, _)) in memory.iter().zip(&domains) {
            let end = usize::try_from(request.window_bytes).unwrap();
            for window in &memory.windows {
                prop_assert!(window[..end].iter().all(|byte| *byte == (0, 1)), "every requested byte, once");
                prop_assert!(window[end..].iter().all(|byte| *byte == (DIRT, 0)), "padding never");
            }
        }

        // The same list again, into storage that is already there.
        let first = copies.clone();
        plan.write_copies(&sources, &mut copies).unwrap();
        prop_assert_eq!(copies, first);
    }

    #[test]
    fn rule_14_a_mapping_is_refused_exactly_if_some_member_is_short(
        (request, padding) in domain(),
        short in proptest::option::of((any::<Index>(), 1..20u64)),
    ) {
        let mut allocation = reply(id(0), &request, request.window_bytes + padding);
        if let Some((rank, bytes)) = &short {
            let rank = rank.index(request.workers.len());
            let member = &mut allocation.members_mut()[rank];
            member.mapped_bytes = member.mapped_bytes.saturating_sub(*bytes);
        }
        let mapped = allocation.members().iter().map(|member| member.mapped_bytes).min().unwrap();
        prop_assert_eq!(check_mapping(&request, &allocation).is_err(), mapped < request.window_bytes);
    }
}
