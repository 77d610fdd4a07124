//! The workload of the `production_decode` example, on every production program and on shapes that no program has:
//! right in the three modes, and wrong for certain on stale state.
//!
//! Memory comes from the heap here, so that the suite needs no more shared memory than a small container has; the
//! example itself runs on shared memory.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

#[path = "../../crates/pto-dispatch/examples/production_decode/driver.rs"]
#[allow(dead_code, reason = "the example's report uses more of it")]
mod driver;
#[path = "../../crates/pto-dispatch/examples/production_decode/workload/mod.rs"]
mod workload;

use std::sync::Arc;

use driver::{Mode, ProgramReport, Setup, emulator, measure};
use proptest::prelude::*;
use pto_mock::fixtures::{Fixture, FixtureError, ProgramFixture};
use pto_mock::{Mapping, Memory};
use workload::plan::{PlanError, ProgramPlan};

const PRODUCTION: &str = include_str!("../fixtures/production-domains.json");

fn production() -> Fixture {
    Fixture::parse(PRODUCTION.as_bytes()).unwrap()
}

fn plans(programs: &[&ProgramFixture], chips: u32) -> Vec<Arc<ProgramPlan>> {
    programs.iter().map(|p| Arc::new(ProgramPlan::new(p, chips).unwrap())).collect()
}

fn setup(chips: u32) -> Setup {
    Setup { chips, depth: 1, iterations: 2, mapping: Mapping::Exact, memory: Memory::Heap }
}

fn run(plans: &[Arc<ProgramPlan>], mode: Mode, setup: &Setup) -> Vec<ProgramReport> {
    measure(plans, mode, setup, &|| emulator(plans, setup), &mut || {})
        .unwrap_or_else(|error| panic!("{mode}: {error}"))
}

/// Runs the three modes, and checks results and counts.
fn right_in_three_modes(plans: &[Arc<ProgramPlan>], setup: &Setup) {
    for mode in Mode::CORRECT {
        for (report, plan) in run(plans, mode, setup).iter().zip(plans) {
            assert_eq!(report.first_mismatch(), None, "{mode}");
            let words: u64 = plan.exchanges.iter().map(|e| e.nbytes.div_ceil(4)).sum();
            assert_eq!(report.elements(), words * u64::from(setup.iterations), "every element was compared");
            let dispatches = plan.runs() * u64::from(setup.iterations);
            assert_eq!(report.stats.dispatches, dispatches);
            let domains = plan.domains.len() as u64;
            if mode == Mode::PerRequest {
                assert!(report.stats.allocations >= domains * u64::from(setup.iterations));
                assert_eq!(report.stats.reuses, 0);
            } else {
                assert_eq!(report.stats.allocations, domains, "I3: one allocation per key");
                assert!(plan.runs() > 1 || report.stats.reuses == domains * u64::from(setup.iterations - 1));
            }
            let window: u64 = plan.domains.iter().map(|d| d.request.window_bytes).sum();
            let zeroed = if mode == Mode::Reset { window * u64::from(setup.chips) * (dispatches - 1) } else { 0 };
            assert_eq!(report.stats.zeroed_bytes, zeroed, "{mode}");
        }
    }
}

/// On fresh windows right, afterwards wrong.
fn wrong_on_stale_state(plans: &[Arc<ProgramPlan>], setup: &Setup) {
    for report in run(plans, Mode::Stale, setup) {
        let wrong: Vec<bool> = report.verdicts.iter().map(|v| v.mismatches > 0).collect();
        assert!(!wrong[0] && wrong[1..].iter().all(|w| *w), "{}: wrong requests {wrong:?}", report.program);
    }
}

#[test]
fn production_programs_are_right_in_three_modes_and_wrong_on_stale_state() {
    for program in &production().programs {
        let plans = plans(&[program], program.world_size);
        right_in_three_modes(&plans, &setup(program.world_size));
        wrong_on_stale_state(&plans, &setup(program.world_size));
    }
}

#[test]
fn prefill_and_decode_share_one_worker_with_two_runs_in_flight() {
    let fixture = production();
    let pair = ["deepseek_v4_pro/prefill_fwd", "deepseek_v4_pro/decode_fwd"].map(|n| fixture.program(n).unwrap());
    let setup = Setup { depth: 2, iterations: 3, mapping: Mapping::Huge2M, ..setup(2) };
    right_in_three_modes(&plans(&pair, 2), &setup);
}

#[test]
fn more_chips_keep_the_sizes_and_the_results() {
    let fixture = production();
    let program = fixture.program("deepseek_v4_flash_mtp/moe").unwrap();
    for chips in [1, 3, 8] {
        let plans = plans(&[program], chips);
        assert_eq!(plans[0].domains[0].request.window_bytes, program.domains[0].window_bytes);
        right_in_three_modes(&plans, &setup(chips));
        wrong_on_stale_state(&plans, &setup(chips));
    }
    let refused = ProgramPlan::new(program, 9).unwrap_err();
    let PlanError::Request { source: FixtureError::SignalTooSmall { nbytes, needed_bytes, .. }, .. } = refused
    else {
        panic!("{refused}");
    };
    assert_eq!((nbytes, needed_bytes), (32, 36));
}

#[test]
fn data_buffers_take_signals_in_turn_and_count_their_additions() {
    let fixture = production();
    let plan = ProgramPlan::new(fixture.program("deepseek_v4_pro/decode_fwd").unwrap(), 2).unwrap();
    let offset = |buffer: usize| plan.domains[0].request.buffers[..buffer].iter().map(|b| b.nbytes).sum::<u64>();
    let signals = [4, 5, 7, 10, 11].map(offset);
    assert_eq!(plan.exchanges.len(), 7);
    for (i, exchange) in plan.exchanges.iter().enumerate() {
        let guard = exchange.guard.unwrap();
        assert_eq!(guard.cells, signals[i % 5]);
        assert_eq!(exchange.offset, offset(exchange.buffer));
        assert_eq!(guard.before, (i / 5) as u64 * 2);
        // Exchanges 0 and 5 share a signal, and so do 1 and 6; each adds once per hop.
        assert_eq!(guard.per_dispatch, if i % 5 < 2 { 4 } else { 2 });
    }
    assert_eq!(plan.runs(), 1);
}

/// One domain as JSON: buffers as (bytes, kind), and bytes of the window beyond them.
fn domain_json(index: usize, buffers: &[(u64, Option<&'static str>)], slack: u64) -> String {
    let window: u64 = buffers.iter().map(|(nbytes, _)| nbytes).sum::<u64>() + slack;
    let list: Vec<String> = buffers
        .iter()
        .enumerate()
        .map(|(i, (nbytes, kind))| {
            let kind = kind.map_or_else(String::new, |kind| format!(r#", "kind": "{kind}""#));
            format!(r#"{{"name": "b{i}", "dtype": "opaque", "count": {nbytes}, "nbytes": {nbytes}{kind}}}"#)
        })
        .collect();
    format!(r#"{{"name": "d{index}", "workers": [0], "window_bytes": {window}, "buffers": [{}]}}"#, list.join(", "))
}

/// A fixture file of one or two programs that nobody wrote, with signals large enough for `chips`.
fn unseen_file(chips: u32) -> impl Strategy<Value = String> {
    let cells = 4 * u64::from(chips);
    let buffer = prop_oneof![
        3 => (1..400u64, prop_oneof![Just(None), Just(Some("data"))]),
        // Aligned to 32 bytes as generators do, and just large enough at any offset.
        2 => prop_oneof![Just(cells.next_multiple_of(32)), Just(cells)].prop_map(|n| (n, Some("signal"))),
    ];
    let domain = (proptest::collection::vec(buffer, 1..6), prop_oneof![4 => Just(0u64), 1 => 1..70u64]);
    let program = proptest::collection::vec(domain, 1..4);
    proptest::collection::vec(program, 1..3).prop_map(|programs| {
        let list: Vec<String> = programs
            .iter()
            .enumerate()
            .map(|(p, domains)| {
                let domains: Vec<String> = domains
                    .iter()
                    .enumerate()
                    .map(|(d, (buffers, slack))| domain_json(d, buffers, *slack))
                    .collect();
                format!(
                    r#"{{"program": "p", "source": "r:models/unseen/p{p}.py", "world_size": 1, "domains": [{}]}}"#,
                    domains.join(", ")
                )
            })
            .collect();
        format!(r#"{{"programs": [{}]}}"#, list.join(", "))
    })
}

/// Bytes of payload below which a stale result could be right by accident.
const ENOUGH_BYTES: u64 = 32;

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn unseen_programs_are_right_in_three_modes_and_wrong_on_stale_state(
        (chips, text) in (1..5u32).prop_flat_map(|chips| (Just(chips), unseen_file(chips))),
        depth in 1..3u32,
    ) {
        let fixture = Fixture::parse(text.as_bytes()).unwrap();
        let programs: Vec<&ProgramFixture> = fixture.programs.iter().collect();
        let all = plans(&programs, chips);
        let setup = Setup { depth, iterations: 3, ..setup(chips) };
        for mode in Mode::CORRECT {
            for report in run(&all, mode, &setup) {
                prop_assert_eq!(report.first_mismatch(), None, "{} {}", mode, text);
            }
        }
        let large: Vec<_> = all
            .iter()
            .filter(|plan| plan.exchanges.iter().map(|e| e.nbytes).sum::<u64>() >= ENOUGH_BYTES)
            .cloned()
            .collect();
        if !large.is_empty() {
            wrong_on_stale_state(&large, &setup);
        }
    }
}
