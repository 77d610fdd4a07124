//! The conformance suite on the emulator, under every option and wrapper that changes how it works.
//!
//! The portable part (`PTO_BACKEND`) is in `conformance.rs`; this file is about the emulator whatever that says.

use std::sync::Arc;

use pto_mock::conformance::{
    BackendFactory, BackendSpec, CreateError, Deviation, RULES, Rule, TestPath, Verdict, check, check_deviations,
    judge,
};
use pto_mock::{FaultSchedule, FaultyBackend, JournalBackend, Mapping};
use pto_simpler_sys::{Backend, CopyGranularity, Limits, Retention};
use pto_tests::backend::EmulatorFactory;

/// Dirty memory everywhere: what must be zero is zero because somebody zeroed it.
mod dirty {
    use super::EmulatorFactory;
    pto_mock::conformance_tests!(
        EmulatorFactory::new("dirty emulator").with(|e| e.dirty_host_buffers(true).dirty_windows(true))
    );
}

/// One run at a time.
mod depth_1 {
    use super::EmulatorFactory;
    pto_mock::conformance_tests!(EmulatorFactory::new("emulator of depth 1").with(|e| e.depth(1)));
}

/// Windows that are larger than requested.
mod huge_pages {
    use super::{EmulatorFactory, Mapping};
    pto_mock::conformance_tests!(
        EmulatorFactory::new("emulator with huge pages").with(|e| e.mapping(Mapping::Huge2M).dirty_windows(true))
    );
}

/// Range copies and device fill.
mod ranges {
    use super::{CopyGranularity, EmulatorFactory, Mapping};
    pto_mock::conformance_tests!(
        EmulatorFactory::new("range-copying emulator").with(|e| {
            e.copy_granularity(CopyGranularity::ByteRange).device_fill(true).mapping(Mapping::Pages4K)
        })
    );
}

/// As Simpler: a failed chip task is final.
mod final_failures {
    use super::EmulatorFactory;
    pto_mock::conformance_tests!(
        EmulatorFactory::new("emulator with final failures").with(|e| e.failed_task_is_final(true))
    );
}

/// Memory on the heap, as under Miri.
mod heap {
    use super::EmulatorFactory;
    pto_mock::conformance_tests!(
        EmulatorFactory::new("emulator on the heap").with(|e| e.memory(pto_mock::Memory::Heap))
    );
}

/// Limits that are easily reached.
mod small_limits {
    use super::{EmulatorFactory, Limits};
    pto_mock::conformance_tests!(EmulatorFactory::new("emulator with small limits").with(|e| {
        let mut limits = Limits::default();
        limits.ranks = 3;
        limits.callables = 16;
        limits.scope_depth = 3;
        e.limits(limits)
    }));
}

/// Chips whose device memory comes to an end.
mod small_devices {
    use super::EmulatorFactory;
    pto_mock::conformance_tests!(EmulatorFactory::new("emulator with small devices").with_device_memory(8 << 20));
}

/// Domains cannot be retained.
mod no_retention {
    use super::{EmulatorFactory, Retention};
    pto_mock::conformance_tests!(
        EmulatorFactory::new("emulator without retention")
            .with(|e| e.retention(Retention::Unsupported { missing: "the hook `keep`".into() }))
    );
}

/// Without sub-workers the rules that hold runs are skipped, and nothing else changes.
mod no_sub_workers {
    use super::EmulatorFactory;
    pto_mock::conformance_tests!(EmulatorFactory::new("emulator without sub-workers").with(|e| e.sub_workers(0)));
}

/// Each test in a process of its own, as for backends that have chip processes.
mod own_processes {
    use super::EmulatorFactory;
    pto_mock::conformance_tests!(EmulatorFactory::new("emulator in own processes").in_own_processes());
}

/// A directory of its own: what is left in it is found after every rule.
mod own_directory {
    use super::EmulatorFactory;
    pto_mock::conformance_tests!(EmulatorFactory::new("emulator in a directory").in_own_directory().unwrap());
}

/// Behind a wrapper that injects no faults.
mod behind_faults {
    use super::{Arc, EmulatorFactory, FaultSchedule, FaultyBackend};
    pto_mock::conformance_tests!(
        EmulatorFactory::new("emulator behind no faults")
            .behind(|emulator| Arc::new(FaultyBackend::new(emulator, FaultSchedule::none())))
    );
}

/// Behind a wrapper that keeps a journal.
mod behind_a_journal {
    use super::{Arc, EmulatorFactory, JournalBackend};
    pto_mock::conformance_tests!(
        EmulatorFactory::new("emulator behind a journal")
            .behind(|emulator| Arc::new(JournalBackend::new(emulator)))
    );
}

/// Wrappers stack.
mod behind_both {
    use super::{Arc, EmulatorFactory, FaultSchedule, FaultyBackend, JournalBackend};
    pto_mock::conformance_tests!(EmulatorFactory::new("emulator behind both").behind(|emulator| {
        Arc::new(JournalBackend::new(Arc::new(FaultyBackend::new(emulator, FaultSchedule::none()))))
    }));
}

fn verdict(rule: &str, factory: &EmulatorFactory) -> Verdict {
    let rule: &Rule = RULES.iter().find(|r| r.name == rule).expect("a rule of the list");
    judge(rule, factory)
}

/// The negative control: control that overtakes the previous run is caught by each rule about it, and by no other
/// way than by being broken.
#[test]
fn s27_control_that_comes_early_is_caught() {
    for rule in [
        "a_copy_waits_for_the_previous_runs_fence",
        "a_copy_out_waits_for_the_previous_runs_fence",
        "a_batch_waits_for_the_previous_runs_fence",
        "an_allocation_waits_for_the_previous_runs_fence",
    ] {
        let early = EmulatorFactory::new("early emulator").with(|e| e.early_control(true));
        let patient = early.deviating("none", "waits for minutes, if need be");
        assert!(matches!(verdict(rule, &patient), Verdict::Broken(_)), "{rule} did not notice");
    }
}

/// Limits under which a callable of the library, with the arguments that it declares, is too large: each limit by
/// itself.
#[test]
fn a_callable_over_each_limit_is_refused() {
    type Shrink = fn(&mut Limits);
    let shrinks: [Shrink; 2] = [|l| l.tensors = 1, |l| l.scalars = 2];
    for shrink in shrinks {
        let small = EmulatorFactory::new("emulator with very small limits").with(move |e| {
            let mut limits = Limits::default();
            shrink(&mut limits);
            e.limits(limits)
        });
        assert_eq!(verdict("arguments_over_a_limit_are_refused", &small), Verdict::Kept);
    }
}

/// A deviation that is listed must be there: a kept rule is reported as unexpected.
#[test]
fn a_listed_deviation_must_still_fail() {
    let rule = "an_empty_run_is_accepted_and_ends";
    let listed = EmulatorFactory::new("emulator").deviating(rule, "for the test");
    assert_eq!(verdict(rule, &listed), Verdict::Unexpected("for the test".into()));
    let rule = "a_copy_waits_for_the_previous_runs_fence";
    let early = EmulatorFactory::new("early").with(|e| e.early_control(true)).deviating(rule, "control is early");
    assert!(matches!(verdict(rule, &early), Verdict::DeviatesAsKnown(why) if why.contains("control is early")));
}

/// A backend that takes its process down, in a process of its own: reported as broken, or as the deviation that is
/// listed.
#[derive(Debug)]
struct Dying {
    listed: bool,
}

impl BackendFactory for Dying {
    fn name(&self) -> String {
        "dying".into()
    }

    fn create(&self, _: &BackendSpec) -> Result<Arc<dyn Backend>, CreateError> {
        std::process::abort()
    }

    fn known_deviations(&self) -> Vec<Deviation> {
        let deviation = Deviation { rule: DEADLY, reason: "dies" };
        if self.listed { vec![deviation] } else { Vec::new() }
    }

    fn process_backed(&self) -> bool {
        true
    }
}

const DEADLY: &str = "an_empty_run_is_accepted_and_ends";

#[test]
fn a_backend_that_dies_breaks_its_rule_and_not_the_suite() {
    let path = TestPath::new(module_path!(), "a_backend_that_dies_breaks_its_rule_and_not_the_suite");
    let checked = std::panic::catch_unwind(|| check(DEADLY, &Dying { listed: false }, path));
    let message = *checked.unwrap_err().downcast::<String>().unwrap();
    assert!(message.contains("its own process died") && message.contains(DEADLY), "{message}");
}

#[test]
fn a_backend_that_dies_as_listed_deviates_as_known() {
    let path = TestPath::new(module_path!(), "a_backend_that_dies_as_listed_deviates_as_known");
    check(DEADLY, &Dying { listed: true }, path);
}

#[test]
#[should_panic(expected = "names no rule")]
fn a_deviation_that_names_no_rule_is_refused() {
    check_deviations(&EmulatorFactory::new("emulator").deviating("no_such_rule", "for the test"));
}
