//! Scenarios of reset that need no backend, by id.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests too")]

mod support;

use std::sync::Arc;

use pto_reset::{
    CHUNK_BYTES, CoveredWindow, Method, ResetError, ResetPlan, buffer_offset, check_mapping, coverage,
};
use pto_simpler_sys::{ChipId, CopySource, CopyTo, DevicePlace, DomainRequest, Family, NamedBuffer};
use support::{DIRT, Memory, execute, host, id, mapped, reply, request};

const RANGES: Method = Method::ByteRange { chunk_bytes: CHUNK_BYTES };
const METHODS: [Method; 4] = [Method::WholeBuffer, RANGES, Method::DeviceFill, Method::BufferFill];

#[track_caller]
fn misuse(error: &ResetError, message: &str) {
    assert_eq!(error.to_string(), message);
    assert_eq!((error.family(), error.may_retry(), error.must_reprepare()), (Family::Misuse, false, false));
}

#[track_caller]
fn backend_failure(error: &ResetError, message: &str) {
    assert_eq!(error.to_string(), message);
    assert_eq!((error.family(), error.may_retry(), error.must_reprepare()), (Family::Backend, false, true));
}

#[track_caller]
fn broken(error: &ResetError, message: &str) {
    assert_eq!(error.to_string(), message);
    assert_eq!((error.family(), error.may_retry(), error.must_reprepare()), (Family::Broken, false, true));
}

fn copies(plan: &ResetPlan) -> Vec<CopyTo> {
    let sources: Vec<_> = (0..u32::try_from(plan.sources()).unwrap()).map(host).collect();
    let mut copies = Vec::new();
    plan.write_copies(&sources, &mut copies).unwrap();
    copies
}

#[test]
fn s20_a_request_without_a_meaning_has_no_coverage_and_no_plan() {
    let cases = [
        (
            request(&[0], 64, &[40, 40]),
            "named buffers sum to 80 bytes, but window_bytes is 64; ask for at least 80",
        ),
        (request(&[0], 0, &[]), "window_bytes is 0; ask for at least 1 byte"),
        (request(&[0], 64, &[4, 0]), "buffer \"b1\" has nbytes 0; ask for at least 1 byte or leave the buffer out"),
        (
            request(&[0], u64::MAX, &[u64::MAX - 1, 2]),
            "2 bytes of buffer \"b1\" after 18446744073709551614 bytes of earlier buffers exceed \
             18446744073709551615 bytes; shrink them",
        ),
    ];
    let mut twice = DomainRequest::clone(&request(&[0], 64, &[4, 4, 4]));
    twice.buffers[2].name = "b0".into();
    let duplicate = (Arc::new(twice), "buffers 0 and 2 are both called \"b0\"; names are unique within a domain");
    for (request, message) in cases.into_iter().chain([duplicate]) {
        let error = coverage(&request).unwrap_err();
        misuse(&error, message);
        for method in METHODS {
            assert_eq!(CoveredWindow::check(&request, method).unwrap_err(), error);
        }
    }
    let chunkless = CoveredWindow::check(&request(&[0], 64, &[64]), Method::ByteRange { chunk_bytes: 0 });
    misuse(&chunkless.unwrap_err(), "chunk_bytes is 0; use at least 1 byte (1048576 is the default)");
}

#[test]
fn s22_one_staging_buffer_for_each_distinct_size_and_copies_in_declaration_order_per_rank() {
    let f2 = request(&[0, 1], 1_048_593, &[1_048_576, 17]);
    let plan = ResetPlan::new(Method::WholeBuffer, &[mapped(0, &f2, Method::WholeBuffer).unwrap()]).unwrap();
    assert_eq!((plan.staging_sizes(), plan.staging_bytes()), (&[1_048_576, 17][..], 1_048_593));
    assert_eq!((plan.copies(), plan.bytes(), plan.sources()), (4, 2 * 1_048_593, 2));
    let place = |chip, buffer| DevicePlace::DomainBuffer { domain: id(0), chip: ChipId(chip), buffer };
    let copy = |chip, buffer, source, nbytes| CopyTo {
        dst: place(chip, buffer),
        src: CopySource::Host(host(source)),
        nbytes,
    };
    let expected = [copy(0, 0, 0, 1_048_576), copy(0, 1, 1, 17), copy(1, 0, 0, 1_048_576), copy(1, 1, 1, 17)];
    assert_eq!(copies(&plan), expected);

    let (d0, d1) = (request(&[0, 1, 2], 128, &[64, 64]), request(&[0, 1, 2], 4160, &[64, 4096]));
    let windows = [mapped(0, &d0, Method::WholeBuffer).unwrap(), mapped(1, &d1, Method::WholeBuffer).unwrap()];
    let plan = ResetPlan::new(Method::WholeBuffer, &windows).unwrap();
    assert_eq!((plan.staging_sizes(), plan.staging_bytes()), (&[64, 4096][..], 4160));
    assert_eq!((plan.copies(), plan.bytes()), (12, 3 * 128 + 3 * 4160));
    let order: Vec<_> = copies(&plan)
        .iter()
        .map(|copy| match copy.dst {
            DevicePlace::DomainBuffer { domain, chip, buffer } => (domain.index(), chip.0, buffer, copy.nbytes),
            other => panic!("{other:?}"),
        })
        .collect();
    let of =
        |domain, sizes: [u64; 2]| (0..3).flat_map(move |c| [(domain, c, 0, sizes[0]), (domain, c, 1, sizes[1])]);
    assert_eq!(order, of(0, [64, 64]).chain(of(1, [64, 4096])).collect::<Vec<_>>());
}

#[test]
fn s24_slack_is_refused_under_whole_buffers_and_cleared_by_ranges() {
    let slack = request(&[0, 1], 64, &[4]);
    let found = coverage(&slack).unwrap();
    assert_eq!((found.window_bytes, found.named_bytes, found.slack_bytes), (64, 4, 60));
    for method in [Method::WholeBuffer, Method::BufferFill] {
        let error = CoveredWindow::check(&slack, method).unwrap_err();
        assert_eq!(error, ResetError::Slack { named: 4, window: 64 });
        misuse(
            &error,
            "the window has slack that copies of whole buffers cannot zero: named 4 of 64 bytes; pad the buffers to \
             64 bytes, ask for a window of 4, or prepare with reset off",
        );
    }
    for method in [RANGES, Method::DeviceFill] {
        let plan = ResetPlan::new(method, &[mapped(0, &slack, method).unwrap()]).unwrap();
        let mut memory = [Memory::new(id(0), &slack, 64)];
        execute(method, &copies(&plan), &[CHUNK_BYTES], &mut memory);
        assert_eq!(memory[0].windows, vec![vec![(0, 1); 64]; 2]);
    }
    // A window without any named buffer is all slack.
    let error = CoveredWindow::check(&request(&[0], 64, &[]), Method::WholeBuffer).unwrap_err();
    assert!(error.to_string().contains("named 0 of 64 bytes"));
}

#[test]
fn s25_a_larger_mapping_is_accepted_and_its_padding_is_never_written() {
    let f1 = request(&[0, 1], 64, &[64]);
    let huge = 2 << 20;
    check_mapping(&f1, &reply(id(0), &f1, huge)).unwrap();
    for method in METHODS {
        let covered = CoveredWindow::check(&f1, method).unwrap();
        let window = covered.map(id(0), &reply(id(0), &f1, huge)).unwrap();
        let plan = ResetPlan::new(method, &[window]).unwrap();
        let copies = copies(&plan);
        assert_eq!(copies.iter().map(|copy| copy.nbytes).collect::<Vec<_>>(), [64, 64]);
        let mut memory = [Memory::new(id(0), &f1, 4096)];
        let source = if method == Method::WholeBuffer { 64 } else { CHUNK_BYTES };
        execute(method, &copies, &[source], &mut memory);
        for window in &memory[0].windows {
            assert!(window[..64].iter().all(|byte| *byte == (0, 1)));
            assert!(window[64..].iter().all(|byte| *byte == (DIRT, 0)));
        }
    }
}

#[test]
fn s25_a_shorter_mapping_on_one_rank_gives_no_window_to_plan_with() {
    let f1 = request(&[0, 3], 64, &[64]);
    let mut short = reply(id(0), &f1, 64);
    short.members_mut()[1].mapped_bytes = 48;
    let error = check_mapping(&f1, &short).unwrap_err();
    backend_failure(&error, "chip3 (rank 1) mapped 48 bytes of a window of 64 requested bytes; close the worker");
    for method in METHODS {
        let covered = CoveredWindow::check(&f1, method).unwrap();
        assert_eq!(covered.map(id(0), &short).unwrap_err(), error);
    }
    short.members_mut()[1].mapped_bytes = 64;
    check_mapping(&f1, &short).unwrap();
}

#[test]
fn s25_one_short_domain_of_two_leaves_no_plan_for_either() {
    let f1 = request(&[0, 1], 64, &[64]);
    let windows: Result<Vec<_>, _> = [(0, 64), (1, 63)]
        .into_iter()
        .map(|(domain, bytes)| {
            let covered = CoveredWindow::check(&f1, Method::WholeBuffer)?;
            covered.map(id(domain), &reply(id(domain), &f1, bytes))
        })
        .collect();
    assert!(matches!(windows, Err(ResetError::ShortMapping { mapped: 63, requested: 64, rank: 0, .. })));
}

#[test]
fn s32_padded_sizes_leave_no_slack_and_unpadded_ones_do() {
    let padded = |sizes: &[u64]| {
        let buffers = sizes.iter().enumerate();
        let buffers = buffers.map(|(i, size)| NamedBuffer::padded(format!("b{i}"), *size, 64).unwrap());
        Arc::new(DomainRequest::packed([0], buffers.collect()))
    };
    let sizes = |r: &DomainRequest| r.buffers.iter().map(|b| b.nbytes).collect::<Vec<_>>();
    let offsets =
        |r: &DomainRequest| (0..r.buffers.len()).map(|i| buffer_offset(r, i).unwrap()).collect::<Vec<_>>();

    let two = padded(&[16_388, 112]);
    assert_eq!((sizes(&two), offsets(&two)), (vec![16_448, 128], vec![0, 16_448]));
    assert_eq!((two.window_bytes, coverage(&two).unwrap().slack_bytes), (16_576, 0));
    CoveredWindow::check(&two, Method::WholeBuffer).unwrap();

    let unpadded = request(&[0], 16_560, &[16_388, 112]);
    assert_eq!(coverage(&unpadded).unwrap().slack_bytes, 60);
    let error = CoveredWindow::check(&unpadded, Method::WholeBuffer).unwrap_err();
    assert!(error.to_string().contains("named 16500 of 16560 bytes"));
    let plan = ResetPlan::new(RANGES, &[mapped(0, &unpadded, RANGES).unwrap()]).unwrap();
    let mut memory = [Memory::new(id(0), &unpadded, 16_560)];
    execute(RANGES, &copies(&plan), &[CHUNK_BYTES], &mut memory);
    assert!(memory[0].windows[0].iter().all(|byte| *byte == (0, 1)));

    let five = padded(&[4096, 4096, 16, 16, 16]);
    assert_eq!(offsets(&five), [0, 4096, 8192, 8256, 8320]);
    assert_eq!(buffer_offset(&five, 5), None);
    let huge = request(&[0], u64::MAX, &[u64::MAX, 1, 1]);
    assert_eq!((buffer_offset(&huge, 1), buffer_offset(&huge, 2)), (Some(u64::MAX), None));
}

#[test]
fn s32_resetting_one_buffer_leaves_its_neighbours_unchanged() {
    let five = request(&[0], 8384, &[4096, 4096, 64, 64, 64]);
    let plan = ResetPlan::new(Method::WholeBuffer, &[mapped(0, &five, Method::WholeBuffer).unwrap()]).unwrap();
    let copies = copies(&plan);
    for (index, copy) in copies.iter().enumerate() {
        let mut memory = [Memory::new(id(0), &five, 8384)];
        execute(Method::WholeBuffer, &[*copy], plan.staging_sizes(), &mut memory);
        let start = usize::try_from(buffer_offset(&five, index).unwrap()).unwrap();
        let end = start + usize::try_from(five.buffers[index].nbytes).unwrap();
        for (offset, byte) in memory[0].windows[0].iter().enumerate() {
            let expected = if (start..end).contains(&offset) { (0, 1) } else { (DIRT, 0) };
            assert_eq!(*byte, expected, "byte {offset} after resetting buffer {index}");
        }
    }
    assert_eq!(copies.len(), 5);
}

#[test]
fn rule_15_ranges_come_in_chunks_from_one_source() {
    let odd = request(&[2, 0], 25, &[7]);
    let method = Method::ByteRange { chunk_bytes: 10 };
    let plan = ResetPlan::new(method, &[mapped(4, &odd, method).unwrap()]).unwrap();
    assert_eq!((plan.staging_sizes(), plan.staging_bytes(), plan.sources()), (&[][..], 0, 1));
    assert_eq!((plan.copies(), plan.bytes(), plan.method()), (6, 50, method));
    let copy = |chip, offset, nbytes| CopyTo {
        dst: DevicePlace::Window { domain: id(4), chip: ChipId(chip), offset },
        src: CopySource::Host(host(9)),
        nbytes,
    };
    let mut out = vec![copy(7, 7, 7)];
    plan.write_copies(&[host(9)], &mut out).unwrap();
    let per_rank = |chip| [copy(chip, 0, 10), copy(chip, 10, 10), copy(chip, 20, 5)];
    assert_eq!(out, [per_rank(2), per_rank(0)].concat());
}

#[test]
fn filling_needs_no_host_memory() {
    let two = request(&[0, 1], 24, &[16, 8]);
    let fill = |dst, nbytes| CopyTo { dst, src: CopySource::Fill(0), nbytes };
    let plan = ResetPlan::new(Method::DeviceFill, &[mapped(0, &two, Method::DeviceFill).unwrap()]).unwrap();
    assert_eq!((plan.sources(), plan.staging_bytes(), plan.copies(), plan.bytes()), (0, 0, 2, 48));
    let window = |chip| DevicePlace::Window { domain: id(0), chip: ChipId(chip), offset: 0 };
    assert_eq!(copies(&plan), [fill(window(0), 24), fill(window(1), 24)]);

    let plan = ResetPlan::new(Method::BufferFill, &[mapped(0, &two, Method::BufferFill).unwrap()]).unwrap();
    assert_eq!((plan.sources(), plan.staging_bytes(), plan.copies(), plan.bytes()), (0, 0, 4, 48));
    let buffer = |chip, buffer| DevicePlace::DomainBuffer { domain: id(0), chip: ChipId(chip), buffer };
    let expected = [fill(buffer(0, 0), 16), fill(buffer(0, 1), 8), fill(buffer(1, 0), 16), fill(buffer(1, 1), 8)];
    assert_eq!(copies(&plan), expected);
}

#[test]
fn the_method_follows_from_the_capabilities() {
    use pto_simpler_sys::{Capabilities, CopyGranularity};
    let of = |fill, granularity| {
        let mut capabilities = Capabilities::new("a2a3sim", "host_build_graph", vec![0]);
        capabilities.device_fill = fill;
        capabilities.copy_granularity = granularity;
        Method::of(&capabilities)
    };
    let whole = of(false, CopyGranularity::WholeBuffer);
    let ranges = of(false, CopyGranularity::ByteRange);
    assert_eq!((whole, ranges), (Method::WholeBuffer, Method::ByteRange { chunk_bytes: 1_048_576 }));
    assert_eq!(of(true, CopyGranularity::ByteRange), Method::DeviceFill);
    assert_eq!(of(true, CopyGranularity::WholeBuffer), Method::BufferFill);
    assert_eq!(METHODS.map(Method::reaches_slack), [false, true, true, false]);
    assert_eq!(METHODS.map(Method::chunk_bytes), [None, Some(CHUNK_BYTES), None, None]);
}

#[test]
fn a_reply_that_does_not_answer_the_request_is_refused_at_the_lowest_wrong_rank() {
    let asked = request(&[1, 0], 64, &[48, 16]);
    let refused = |reply| check_mapping(&asked, &reply).unwrap_err();
    let healthy = || reply(id(0), &asked, 64);
    check_mapping(&asked, &healthy()).unwrap();

    let error = refused(reply(id(0), &request(&[1], 64, &[48, 16]), 64));
    backend_failure(&error, "the allocation describes 1 members, but 2 workers were requested; close the worker");
    let error = refused(reply(id(0), &request(&[0, 1], 64, &[48, 16]), 64));
    backend_failure(
        &error,
        "the allocation's member 0 is chip0 as rank 0, but chip1 was requested as rank 0; close the worker",
    );
    let mut ranks = healthy();
    ranks.members_mut()[1].rank = 0;
    backend_failure(
        &refused(ranks),
        "the allocation's member 1 is chip0 as rank 0, but chip0 was requested as rank 1; close the worker",
    );
    let error = refused(reply(id(0), &request(&[1, 0], 64, &[48]), 64));
    backend_failure(&error, "the allocation describes 1 buffers on chip1 (rank 0), not 2; close the worker");
    let error = refused(reply(id(0), &request(&[1, 0], 64, &[48, 15]), 64));
    backend_failure(
        &error,
        "buffer \"b1\" has 15 bytes on chip1 (rank 0), but 16 bytes were requested; close the worker",
    );
}

#[test]
fn a_window_takes_only_the_reply_about_its_own_domain() {
    let f1 = request(&[0], 64, &[64]);
    let covered = CoveredWindow::check(&f1, Method::WholeBuffer).unwrap();
    assert_eq!((covered.request(), covered.method()), (&f1, Method::WholeBuffer));
    assert_eq!(covered.coverage().named_bytes, 64);
    let error = covered.clone().map(id(0), &reply(id(1), &f1, 64)).unwrap_err();
    broken(&error, "broken invariant: the allocation describes Some(domain1.1), not domain0.1");
    let window = covered.map(id(0), &reply(id(0), &f1, 64)).unwrap();
    assert_eq!((window.domain(), window.covered().request()), (id(0), &f1));
}

#[test]
fn a_window_checked_for_one_method_is_no_window_for_another() {
    // Under ranges slack is fine; a whole-buffer plan of such a window would leave it dirty.
    let slack = mapped(0, &request(&[0], 64, &[4]), RANGES).unwrap();
    let error = ResetPlan::new(Method::WholeBuffer, &[slack]).unwrap_err();
    broken(
        &error,
        "broken invariant: domain0.1 was checked for ByteRange { chunk_bytes: 1048576 }, but the plan is for \
         WholeBuffer",
    );
}

#[test]
fn a_plan_holds_a_domain_once_and_counts_without_wrapping() {
    let f1 = request(&[0], 64, &[64]);
    let window = mapped(0, &f1, Method::WholeBuffer).unwrap();
    let error = ResetPlan::new(Method::WholeBuffer, &[window.clone(), window]).unwrap_err();
    broken(&error, "broken invariant: domain0.1 is in the plan twice");

    let overflow = "the reset adds up to more than 18446744073709551615 bytes or copies; ask for smaller windows";
    let refused = |method, windows: &[(&[u32], u64)]| {
        let windows: Vec<_> = (0..)
            .zip(windows)
            .map(|(i, (workers, bytes))| mapped(i, &request(workers, *bytes, &[*bytes]), method).unwrap())
            .collect();
        misuse(&ResetPlan::new(method, &windows).unwrap_err(), overflow);
    };
    const HALF: u64 = 1 << 63;
    refused(Method::DeviceFill, &[(&[0, 1], HALF)]);
    refused(Method::DeviceFill, &[(&[0], HALF), (&[0], HALF)]);
    refused(Method::WholeBuffer, &[(&[0], u64::MAX), (&[0], 1)]);
    refused(Method::ByteRange { chunk_bytes: 1 }, &[(&[0, 1], HALF)]);
    refused(Method::ByteRange { chunk_bytes: 1 }, &[(&[0], HALF), (&[0], HALF)]);
    ResetPlan::new(Method::DeviceFill, &[mapped(0, &request(&[0, 1], HALF - 1, &[]), Method::DeviceFill).unwrap()])
        .unwrap();
}

#[test]
fn a_list_that_no_memory_holds_is_an_error() {
    let endless = request(&[0], u64::MAX / 2, &[]);
    let method = Method::ByteRange { chunk_bytes: 1 };
    let plan = ResetPlan::new(method, &[mapped(0, &endless, method).unwrap()]).unwrap();
    let mut out = Vec::new();
    let error = plan.write_copies(&[host(0)], &mut out).unwrap_err();
    misuse(&error, "no memory for a list of 9223372036854775807 copies; ask for smaller windows or larger chunks");
    assert!(out.is_empty());
}

#[test]
fn sources_come_in_the_number_that_the_plan_needs() {
    let two = request(&[0], 24, &[16, 8]);
    for (method, needed) in METHODS.into_iter().zip([2, 1, 0, 0]) {
        let plan = ResetPlan::new(method, &[mapped(0, &two, method).unwrap()]).unwrap();
        assert_eq!((plan.sources(), plan.is_empty()), (needed, false));
        for given in (0..4).filter(|given| *given != needed) {
            let sources: Vec<_> = (0..u32::try_from(given).unwrap()).map(host).collect();
            let stale = CopyTo {
                dst: DevicePlace::Window { domain: id(0), chip: ChipId(0), offset: 0 },
                src: CopySource::Fill(1),
                nbytes: 1,
            };
            let mut out = vec![stale];
            let error = plan.write_copies(&sources, &mut out).unwrap_err();
            broken(
                &error,
                &format!("broken invariant: {given} zero-filled sources were given, the plan needs {needed}"),
            );
            assert!(out.is_empty(), "an old list must not be mistaken for this one");
        }
    }
}

#[test]
fn a_plan_for_nothing_does_nothing() {
    for method in METHODS {
        let plan = ResetPlan::new(method, &[]).unwrap();
        assert!(plan.is_empty());
        assert_eq!((plan.bytes(), plan.staging_bytes(), copies(&plan)), (0, 0, vec![]));
    }
}
