//! The fault matrix: every backend call x every way in which it can fail x every operation of the dispatch layer that
//! makes it.
//!
//! The matrix is generated. Each operation runs once undisturbed, and the calls that the backend sees meanwhile are its
//! columns; the first and the last call of each kind are then hit by each effect, in the emulator itself and in a
//! wrapper around it. What must come of it follows from the rules of the design ([`expect`]); whatever comes of it, the
//! worker goes on as it should, closes, and leaves nothing behind.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

mod expect;
mod ground;
mod operations;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use expect::{After, AtClose, Cell, Expected, Shown};
use ground::{Act, Answer, Ground, Mode, NOW, Site, Watch};
use operations::{Kind, Operation, operations};
use pto_dispatch::{CloseFailure, Error};
use pto_mock::{CALLS, EventKind, Fault, FaultControl, FaultEffect};
use pto_simpler_sys::{Backend, Call};

/// Calls that no operation of the dispatch layer makes, and why.
const UNUSED: [(Call, &str); 2] = [
    (Call::CommittedDeviceMemory, "a question for tests and schedulers; dispatch never asks it"),
    (Call::Abandon, "the last resort of whoever owns the backend; dispatch leaks rather than abandons"),
];

/// Every effect, and a failure that is final for the worker.
const EFFECTS: [(FaultEffect, bool); 6] = [
    (FaultEffect::Before, false),
    (FaultEffect::Before, true),
    (FaultEffect::After, false),
    (FaultEffect::NoReply, false),
    (FaultEffect::Unwind, false),
    (FaultEffect::Hang, false),
];

/// Lets everything go on when a test fails in the middle of a hang.
struct LetGo<'a>(&'a FaultControl);

impl Drop for LetGo<'_> {
    fn drop(&mut self) {
        self.0.disarm();
        self.0.release_all();
    }
}

/// An error and all that it says of its causes.
fn text(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text.push_str(" <- ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}

fn texts(errors: &[Error]) -> String {
    errors.iter().map(text).collect::<Vec<_>>().join(" | ")
}

/// First cause and attached failures of what an operation answers.
fn causes(error: &Error) -> (String, String) {
    match error {
        Error::Failed(failure) => (text(&failure.cause), texts(&failure.secondary)),
        Error::Close(failure) => (text(&failure.primary), texts(&failure.others)),
        error => (text(error), String::new()),
    }
}

fn setup(op: &Operation, mode: Mode, site: Site) -> Ground {
    let mut ground = Ground::bare(mode, site);
    (op.ready)(&mut ground);
    if op.kind == Kind::Dispatch || op.act != Act::Plain {
        ground.set_act(op.act);
    }
    ground
}

/// The calls that the operation makes, with how many of each; found by doing it. What comes after is checked as in any
/// cell.
fn dry_run(op: &Operation, mode: Mode, site: Site) -> Vec<(Call, u64)> {
    let mut ground = setup(op, mode, site);
    let before = CALLS.map(|(call, _)| ground.faults.seen(call));
    let answer = (op.run)(&ground);
    let made = CALLS.iter().zip(before).map(|((call, _), before)| (*call, ground.faults.seen(*call) - before));
    let made = made.filter(|(_, count)| *count > 0).collect();
    let cell = Cell { op, mode, site, call: Call::Submit, occurrence: 0, effect: FaultEffect::Hang, fatal: false };
    let expected = cell.undisturbed();
    check_answer(&cell, &expected, &answer, "no fault at all");
    after(&cell, &mut ground, &expected, &answer, "no fault at all", false);
    made
}

fn check_answer(cell: &Cell<'_>, expected: &Expected, answer: &Answer, fault: &str) {
    let own = cell.op.own.text();
    match (expected.shown, answer) {
        (Shown::Fine, Answer::Fine) => {}
        (Shown::Panic, Answer::Panicked(text)) => assert!(text.contains(fault), "{text}"),
        (shown, Answer::Failed(error)) => {
            let (first, attached) = causes(error);
            match shown {
                Shown::Own => assert!(first.contains(own.unwrap()) && !attached.contains(fault), "{error:?}"),
                Shown::Fault => {
                    assert!(first.contains(fault), "the fault is not the first cause: {error:?}");
                    assert!(own.is_none_or(|own| !first.contains(own)), "{error:?}");
                    assert_eq!(attached, "", "{error:?}");
                    assert_eq!(error.family(), cell.family(&first), "family of {error:?}");
                }
                Shown::OwnThenFault => {
                    assert!(first.contains(own.unwrap()) && !first.contains(fault), "{error:?}");
                    assert!(attached.contains(fault), "the fault is not attached: {error:?}");
                }
                Shown::Fine | Shown::Panic => panic!("expected {shown:?}, not {error:?}"),
            }
        }
        (shown, answer) => panic!("expected {shown:?}, not {answer:?}"),
    }
}

/// What close must report, and that it reports it again.
fn check_close(cell: &Cell<'_>, close: AtClose, ground: &Ground, fault: &str) {
    let own = cell.op.own.text().unwrap_or("the operation has no failure of its own");
    let closed = ground.worker().close();
    match (close, &closed) {
        (AtClose::Nothing, Ok(())) => {}
        (AtClose::Nothing, Err(error)) => panic!("close has nothing to report: {error:?}"),
        (close, Err(error @ Error::Close(_))) => {
            let (first, attached) = causes(error);
            let (primary, other) = match close {
                AtClose::Own => (own, None),
                AtClose::OwnThenFault => (own, Some(fault)),
                _ => (fault, None),
            };
            assert!(first.contains(primary), "primary of {error:?}");
            assert!(other.is_none_or(|other| attached.contains(other)), "{error:?}");
        }
        (close, other) => panic!("close must report {close:?}, not {other:?}"),
    }
    let again = ground.worker().close();
    match (&closed, &again) {
        (Ok(()), Ok(())) => {}
        (Err(Error::Close(first)), Err(Error::Close(second))) => {
            assert!(std::sync::Arc::ptr_eq(first, second), "close is idempotent");
        }
        _ => panic!("first {closed:?}, then {again:?}"),
    }
}

/// What comes after the operation: the next dispatch, close, and that nothing is left.
fn after(cell: &Cell<'_>, ground: &mut Ground, expected: &Expected, answer: &Answer, fault: &str, closing: bool) {
    if let Some(earlier) = &ground.earlier {
        assert!(earlier.is_done() && earlier.wait().is_ok(), "an ended dispatch keeps its outcome (I10)");
    }
    match cell.op.kind {
        Kind::Prepare => match ground.spare.lock().take() {
            Some(worker) => ground.worker = Some(worker),
            None => {
                let closes = ground.emulator.journal().count(|e| *e == EventKind::CloseBegin);
                let forwarded = !(cell.call == Call::Close && cell.site == Site::Wrapper);
                assert!(closes == 1 || !forwarded, "a failed preparation closes once: {closes}");
            }
        },
        Kind::Close => {
            check_closed_again(cell, ground, answer, fault);
            ground.worker = None;
        }
        Kind::Drop | Kind::User | Kind::Dispatch | Kind::Silent => {}
    }
    if matches!(cell.op.kind, Kind::Dispatch | Kind::Silent)
        && matches!(answer, Answer::Fine)
        && matches!(cell.op.act, Act::Plain | Act::Grow | Act::Early | Act::DropBuffer)
        && ground.current.lock().is_some()
    {
        ground.check_contents();
    }
    ground.current.lock().take();
    if let Some(worker) = ground.worker.take() {
        if cell.op.kind == Kind::Prepare {
            ground.adopt(worker);
        } else {
            ground.worker = Some(worker);
        }
        if !closing {
            check_next(cell, ground, expected.after, fault);
        }
        check_close(cell, expected.close, ground, fault);
        ground.worker = None;
    }
    // The operation may have left the backend to us: a preparation or a drop whose close failed.
    if matches!(cell.op.kind, Kind::Prepare | Kind::Drop) {
        ground.emulator.close().unwrap();
    }
    ground.check_end();
}

fn check_next(cell: &Cell<'_>, ground: &mut Ground, after: After, fault: &str) {
    let primary = match cell.expected().shown {
        Shown::Own | Shown::OwnThenFault if after != After::BackendRefuses => cell.op.own.text().unwrap(),
        _ => fault,
    };
    match after {
        After::Usable => {
            for _ in 0..2 {
                ground.plain();
            }
        }
        After::Poisoned | After::Finished | After::BackendRefuses => {
            ground.set_act(Act::Plain);
            let before = ground.emulator.journal().copies().len();
            let Answer::Failed(error) = ground.dispatch() else { panic!("the worker must refuse: {after:?}") };
            assert!(error.must_reprepare() && !error.may_retry(), "{error:?}");
            assert!(text(&error).contains(primary), "the refusal names its cause: {}", text(&error));
            let refused = match after {
                After::Poisoned => matches!(error, Error::Poisoned(_)),
                After::Finished => matches!(error, Error::Finished(_)),
                _ => matches!(error, Error::Backend(_)),
            };
            assert!(refused, "{after:?}: {error:?}");
            assert_eq!(ground.emulator.journal().copies().len(), before, "nothing more is copied (rule 17)");
        }
    }
}

/// After a close: only a failed backend close is tried again.
fn check_closed_again(cell: &Cell<'_>, ground: &Ground, answer: &Answer, fault: &str) {
    let again = ground.worker().close();
    match answer {
        Answer::Fine => again.unwrap(),
        Answer::Failed(Error::Close(failure)) => {
            let CloseFailure { complete, .. } = &**failure;
            let backend_failed =
                cell.call == Call::Close && fault != "no fault at all" && cell.effect != FaultEffect::Hang;
            assert_eq!(*complete, !backend_failed, "{failure:?}");
            if *complete {
                let Err(Error::Close(again)) = again else { panic!("the same outcome again, not {again:?}") };
                assert!(std::sync::Arc::ptr_eq(failure, &again));
            } else {
                again.unwrap();
                ground.worker().close().unwrap();
            }
        }
        other => panic!("close answers {other:?}"),
    }
    let refused = ground.worker().submit(ground.worker().only().unwrap(), &ground.args).map(drop);
    assert!(matches!(refused, Err(Error::Closed)), "{refused:?}");
}

/// What other threads may do while the operation hangs.
fn while_hung(cell: &Cell<'_>, ground: &Ground, closing: bool) {
    assert_eq!(ground.faults.hung().len(), 1);
    assert_eq!(ground.faults.hung()[0].call, cell.call);
    if let Some(earlier) = &ground.earlier {
        assert!(earlier.is_done() && earlier.wait_timeout(NOW).is_ok());
    }
    let Some(worker) = &ground.worker else { return };
    let _held = worker.in_flight();
    worker.stats(worker.only().unwrap()).unwrap();
    let dispatching = matches!(cell.op.kind, Kind::Dispatch | Kind::Silent) && cell.op.name != "drop a buffer";
    if dispatching {
        if matches!(cell.call, Call::Task | Call::Run) {
            while ground.current.lock().is_none() {
                std::thread::yield_now();
            }
        }
        if let Some(current) = &*ground.current.lock() {
            assert!(!current.is_done());
            let waited = current.wait_timeout(NOW);
            assert!(matches!(waited, Err(Error::WaitTimeout { id }) if id == current.id()), "{waited:?}");
        }
    }
    if closing {
        let closed = worker.close_timeout(NOW);
        let Err(Error::CloseTimeout { in_flight }) = closed else { panic!("close must time out: {closed:?}") };
        assert_eq!(in_flight.is_empty(), !dispatching, "{in_flight:?}");
        let refused = worker.submit(worker.only().unwrap(), &ground.args).map(drop);
        assert!(matches!(refused, Err(Error::Closing | Error::Closed)), "{refused:?}");
    } else if dispatching && !cell.is_behind_submit() {
        let tried = worker.try_submit(worker.only().unwrap(), &ground.args).map(drop);
        // A build that has failed already has poisoned the worker before its staging is released.
        let poisoned = cell.call == Call::ReleaseBuffer && cell.undisturbed().after == After::Poisoned;
        assert!(
            if poisoned {
                matches!(tried, Err(Error::Poisoned(_)))
            } else {
                matches!(tried, Err(Error::WouldBlock { .. }))
            },
            "{tried:?}"
        );
    }
    let host = matches!(
        cell.call,
        Call::CreateBuffer | Call::WriteBuffer | Call::ReadBuffer | Call::FillBuffer | Call::ReleaseBuffer
    );
    if cell.op.kind == Kind::User && host {
        // A host buffer that takes its time holds up nobody else.
        let answer = ground.dispatch();
        assert!(matches!(answer, Answer::Fine), "{answer:?}");
        ground.check_contents();
        ground.current.lock().take();
    }
}

fn hang(cell: &Cell<'_>, ground: &Ground, closing: bool) -> Answer {
    std::thread::scope(|scope| {
        let _let_go = LetGo(&ground.faults);
        let operation = scope.spawn(|| (cell.op.run)(ground));
        ground.faults.wait_hung(1);
        while_hung(cell, ground, closing);
        assert!(!operation.is_finished() || cell.is_behind_submit(), "the operation must be held");
        assert_eq!(ground.faults.release_all(), 1);
        operation.join().unwrap_or_else(|payload| resume_unwind(payload))
    })
}

fn run_cell(cell: &Cell<'_>, closing: bool) {
    let mut ground = setup(cell.op, cell.mode, cell.site);
    let mut fault = Fault::new(cell.call, cell.effect).nth(cell.occurrence);
    fault.failure.fatal = cell.fatal;
    ground.faults.arm(fault);
    let (armed, fault) = (fault, fault.to_string());
    let expected = cell.expected();
    let answer =
        if cell.effect == FaultEffect::Hang { hang(cell, &ground, closing) } else { (cell.op.run)(&ground) };
    assert!(!ground.faults.pending().contains(&armed), "the fault was not hit");
    ground.faults.disarm();
    check_answer(cell, &expected, &answer, &fault);
    after(cell, &mut ground, &expected, &answer, &fault, closing);
}

/// How many cells ran, by operation and call.
type Table = BTreeMap<(&'static str, &'static str), usize>;

fn print(site: Site, table: &Table, skipped: &BTreeMap<&str, usize>) {
    println!("fault matrix, faults in the {site:?}: {} cells", table.values().sum::<usize>());
    let mut last = "";
    for ((op, call), cells) in table {
        if *op != last {
            println!("  {op}");
            last = op;
        }
        println!("    {call:<26}{cells:>4}");
    }
    for (reason, cells) in skipped {
        println!("  {cells} impossible: {reason}");
    }
}

fn matrix(site: Site) {
    let watch = Watch::start();
    let (mut table, mut skipped) = (Table::new(), BTreeMap::new());
    let mut failures = Vec::new();
    let run = |name: String, body: &dyn Fn()| {
        watch.cell(&name);
        catch_unwind(AssertUnwindSafe(body)).map_err(|_| watch.name())
    };
    for op in &operations() {
        for mode in op.modes {
            let mut calls = Vec::new();
            let found = std::cell::RefCell::new(&mut calls);
            let dry = run(format!("{:?}: {} ({mode:?}), no fault", site, op.name), &|| {
                **found.borrow_mut() = dry_run(op, *mode, site);
            });
            failures.extend(dry.err());
            for (call, count) in calls {
                let text = CALLS.iter().find(|(known, _)| *known == call).unwrap().1;
                let mut occurrences = vec![1, count];
                occurrences.dedup();
                for (occurrence, (effect, fatal)) in
                    occurrences.iter().flat_map(|occurrence| EFFECTS.map(|effect| (*occurrence, effect)))
                {
                    let cell = Cell { op, mode: *mode, site, call, occurrence, effect, fatal };
                    if let Some(reason) = cell.impossible() {
                        *skipped.entry(reason).or_default() += 1;
                        continue;
                    }
                    let hangs = effect == FaultEffect::Hang;
                    let closable = matches!(op.kind, Kind::Dispatch | Kind::Close);
                    let closings: &[bool] = match (hangs && closable, op.kind) {
                        (true, Kind::Close) => &[true],
                        (true, _) => &[false, true],
                        _ => &[false],
                    };
                    for closing in closings {
                        let mut fault = Fault::new(call, effect).nth(occurrence);
                        fault.failure.fatal = fatal;
                        let during = if *closing { ", closing" } else { "" };
                        let name = format!("{site:?}: {} ({mode:?}), {fault}{during}", op.name);
                        failures.extend(run(name, &|| run_cell(&cell, *closing)).err());
                        *table.entry((op.name, text)).or_default() += 1;
                    }
                }
            }
        }
    }
    print(site, &table, &skipped);
    assert!(failures.is_empty(), "{} cells fail:\n{}", failures.len(), failures.join("\n"));
    for (call, text) in CALLS {
        let hit = table.keys().any(|(_, hit)| *hit == text);
        let unused = UNUSED.iter().any(|(unused, _)| *unused == call);
        assert_ne!(hit, unused, "{text}: every call is in the matrix, or listed as unused with a reason");
    }
}

#[test]
fn every_fault_of_the_emulator_at_every_operation() {
    matrix(Site::Emulator);
}

#[test]
fn every_fault_of_a_wrapper_at_every_operation() {
    matrix(Site::Wrapper);
}
