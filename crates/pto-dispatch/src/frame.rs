//! Admission: two dispatch frames, one build at a time, first come, first served (design rule 5).
//!
//! 1. A submitter takes a ticket. Tickets are served in order; only the first in line may be granted a frame.
//! 2. A frame is granted when no graph is being built and a frame is free. The grant is the build lock.
//! 3. A built dispatch is *published*; its frame is freed when the dispatch is terminal ([`Admission::retire`]).
//!    A rejected one gives its frame back at once ([`Admission::cancel`]).
//! 4. A *refusal* (closing, closed, poisoned, finished) turns every waiter away, whatever its place in line, and
//!    everybody who comes later.

use std::collections::VecDeque;
use std::time::Instant;

use pto_simpler_sys::FRAMES;

use crate::sync::{Condvar, Mutex, Rank};

/// What a submitter is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    /// Which of the frames.
    pub(crate) frame: usize,
    /// The dispatch's number, counted from 1, never reused.
    pub(crate) id: u64,
    /// Dispatches that were published and not terminal when the frame was granted.
    pub(crate) in_flight: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Frame {
    Free,
    Building(u64),
    Published(u64),
}

#[derive(Debug)]
struct Gate<R> {
    line: VecDeque<u64>,
    next_ticket: u64,
    next_id: u64,
    building: bool,
    frames: [Frame; FRAMES],
    refusal: Option<R>,
}

impl<R> Gate<R> {
    fn free_frame(&self) -> Option<usize> {
        if self.building { None } else { self.frames.iter().position(|f| *f == Frame::Free) }
    }

    fn published(&self) -> usize {
        self.frames.iter().filter(|f| matches!(f, Frame::Published(_))).count()
    }

    fn grant(&mut self, frame: usize) -> Grant {
        let id = self.next_id;
        self.next_id += 1;
        let in_flight = self.published();
        self.building = true;
        self.frames[frame] = Frame::Building(id);
        Grant { frame, id, in_flight }
    }
}

/// The frames and the line in front of them. `R` is the reason given to those who are turned away.
#[derive(Debug)]
pub(crate) struct Admission<R> {
    gate: Mutex<Gate<R>>,
    changed: Condvar,
}

impl<R: Clone> Admission<R> {
    pub(crate) fn new() -> Self {
        Self {
            gate: Mutex::new(
                Rank::Gate,
                Gate {
                    line: VecDeque::new(),
                    next_ticket: 0,
                    next_id: 1,
                    building: false,
                    frames: [Frame::Free; FRAMES],
                    refusal: None,
                },
            ),
            changed: Condvar::new(),
        }
    }

    /// Waits in line for a frame and the build lock.
    pub(crate) fn acquire(&self) -> Result<Grant, R> {
        let mut gate = self.gate.lock();
        if let Some(reason) = &gate.refusal {
            return Err(reason.clone());
        }
        let ticket = gate.next_ticket;
        gate.next_ticket += 1;
        gate.line.push_back(ticket);
        loop {
            if let Some(reason) = gate.refusal.clone() {
                gate.line.retain(|t| *t != ticket);
                drop(gate);
                self.changed.notify_all();
                return Err(reason);
            }
            if gate.line.front() == Some(&ticket)
                && let Some(frame) = gate.free_frame()
            {
                gate.line.pop_front();
                return Ok(gate.grant(frame));
            }
            gate = self.changed.wait_until(gate, None).0;
        }
    }

    /// A frame and the build lock if both can be had at once, nobody is in line, and at most `most_in_flight`
    /// dispatches are published; else `None`, with no effect at all.
    pub(crate) fn try_acquire(&self, most_in_flight: usize) -> Result<Option<Grant>, R> {
        let mut gate = self.gate.lock();
        if let Some(reason) = &gate.refusal {
            return Err(reason.clone());
        }
        if !gate.line.is_empty() || gate.published() > most_in_flight {
            return Ok(None);
        }
        Ok(gate.free_frame().map(|frame| gate.grant(frame)))
    }

    /// The graph in `frame` is built and its run accepted: the build lock is free, the frame stays taken.
    pub(crate) fn publish(&self, frame: usize) {
        let mut gate = self.gate.lock();
        if let Frame::Building(id) = gate.frames[frame] {
            gate.frames[frame] = Frame::Published(id);
            gate.building = false;
        }
        drop(gate);
        self.changed.notify_all();
    }

    /// The dispatch in `frame` was rejected: the build lock and the frame are free.
    pub(crate) fn cancel(&self, frame: usize) {
        let mut gate = self.gate.lock();
        if let Frame::Building(_) = gate.frames[frame] {
            gate.frames[frame] = Frame::Free;
            gate.building = false;
        }
        drop(gate);
        self.changed.notify_all();
    }

    /// The dispatch in `frame` is terminal: the frame is free.
    pub(crate) fn retire(&self, frame: usize) {
        let mut gate = self.gate.lock();
        if let Frame::Published(_) = gate.frames[frame] {
            gate.frames[frame] = Frame::Free;
        }
        drop(gate);
        self.changed.notify_all();
    }

    /// Turns everybody away from now on. `replace` decides whether an earlier reason gives way.
    pub(crate) fn refuse(&self, reason: R, replace: impl FnOnce(&R) -> bool) {
        let mut gate = self.gate.lock();
        if gate.refusal.as_ref().is_none_or(replace) {
            gate.refusal = Some(reason);
        }
        drop(gate);
        self.changed.notify_all();
    }

    /// Waits until no dispatch older than `id` is published.
    pub(crate) fn wait_older(&self, id: u64) {
        let mut gate = self.gate.lock();
        while gate.frames.iter().any(|f| matches!(f, Frame::Published(older) if *older < id)) {
            gate = self.changed.wait_until(gate, None).0;
        }
    }

    /// The current reason for turning submitters away.
    pub(crate) fn refusal(&self) -> Option<R> {
        self.gate.lock().refusal.clone()
    }

    /// Dispatches being built or published, oldest first.
    pub(crate) fn in_use(&self) -> Vec<u64> {
        let mut ids: Vec<u64> = self
            .gate
            .lock()
            .frames
            .iter()
            .filter_map(|f| match f {
                Frame::Free => None,
                Frame::Building(id) | Frame::Published(id) => Some(*id),
            })
            .collect();
        ids.sort_unstable();
        ids
    }

    /// Waits until every frame is free and nobody is in line; false where `deadline` came first.
    pub(crate) fn wait_idle(&self, deadline: Option<Instant>) -> bool {
        let mut gate = self.gate.lock();
        loop {
            if gate.line.is_empty() && gate.frames.iter().all(|f| *f == Frame::Free) {
                return true;
            }
            let (next, in_time) = self.changed.wait_until(gate, deadline);
            gate = next;
            if !in_time {
                return gate.line.is_empty() && gate.frames.iter().all(|f| *f == Frame::Free);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn frames_are_granted_in_order_and_bounded_by_two() {
        let admission: Admission<&str> = Admission::new();
        let first = admission.acquire().unwrap();
        assert_eq!(first, Grant { frame: 0, id: 1, in_flight: 0 });
        assert_eq!(admission.try_acquire(2), Ok(None), "one build at a time");
        admission.publish(first.frame);
        let second = admission.acquire().unwrap();
        assert_eq!(second, Grant { frame: 1, id: 2, in_flight: 1 });
        admission.publish(second.frame);
        assert_eq!(admission.try_acquire(2), Ok(None), "two frames");
        admission.retire(first.frame);
        assert_eq!(admission.try_acquire(0), Ok(None), "one is still in flight");
        assert_eq!(admission.try_acquire(1), Ok(Some(Grant { frame: 0, id: 3, in_flight: 1 })));
        assert_eq!(admission.in_use(), [2, 3]);
    }

    #[test]
    fn whoever_is_in_line_comes_before_a_try_and_before_idle() {
        let admission: Admission<&str> = Admission::new();
        // Somebody who has taken a ticket and has not been served yet.
        admission.gate.lock().line.push_back(7);
        assert_eq!(admission.try_acquire(FRAMES), Ok(None), "a try does not jump the line");
        assert!(!admission.wait_idle(Some(Instant::now())), "close waits for those in line to leave it");
        admission.gate.lock().line.clear();
        assert!(admission.wait_idle(Some(Instant::now())));
        assert!(matches!(admission.try_acquire(FRAMES), Ok(Some(_))));
    }

    #[test]
    fn a_refusal_is_met_at_the_door_and_in_line() {
        let admission: Admission<&str> = Admission::new();
        admission.refuse("poisoned", |_| false);
        assert_eq!((admission.acquire(), admission.try_acquire(FRAMES)), (Err("poisoned"), Err("poisoned")));
        assert!(admission.wait_idle(Some(Instant::now())), "who was turned away is not in line");
    }

    #[test]
    fn a_cancelled_build_gives_its_frame_back() {
        let admission: Admission<&str> = Admission::new();
        let grant = admission.acquire().unwrap();
        admission.cancel(grant.frame);
        assert!(admission.wait_idle(None));
        assert_eq!(admission.acquire().unwrap().frame, grant.frame);
    }

    #[test]
    fn a_refusal_turns_waiters_away_and_gives_way_only_when_told() {
        let admission: Admission<&str> = Admission::new();
        for _ in 0..FRAMES {
            let grant = admission.acquire().unwrap();
            admission.publish(grant.frame);
        }
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| admission.acquire());
            admission.refuse("closing", |_| false);
            assert_eq!(waiter.join().unwrap(), Err("closing"));
        });
        admission.refuse("poisoned", |_| false);
        assert_eq!(admission.refusal(), Some("closing"));
        admission.refuse("closed", |old| *old == "closing");
        assert_eq!(admission.try_acquire(2), Err("closed"));
        assert!(!admission.wait_idle(Some(Instant::now())));
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::thread;

    use super::*;
    use crate::sync::{Arc, AtomicUsize, Ordering};

    fn worker(admission: &Admission<&'static str>, in_use: &AtomicUsize, building: &AtomicUsize) -> bool {
        let Ok(grant) = admission.acquire() else { return false };
        assert_eq!(building.fetch_add(1, Ordering::SeqCst), 0, "one build at a time");
        assert!(in_use.fetch_add(1, Ordering::SeqCst) < FRAMES, "at most two published dispatches (I9)");
        building.fetch_sub(1, Ordering::SeqCst);
        admission.publish(grant.frame);
        in_use.fetch_sub(1, Ordering::SeqCst);
        admission.retire(grant.frame);
        true
    }

    #[test]
    fn three_submitters_share_two_frames_and_all_get_through() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let admission = Arc::new(Admission::new());
            let in_use = Arc::new(AtomicUsize::new(0));
            let building = Arc::new(AtomicUsize::new(0));
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let (admission, in_use, building) =
                        (Arc::clone(&admission), Arc::clone(&in_use), Arc::clone(&building));
                    thread::spawn(move || worker(&admission, &in_use, &building))
                })
                .collect();
            assert!(worker(&admission, &in_use, &building));
            for thread in threads {
                assert!(thread.join().unwrap());
            }
            assert!(admission.wait_idle(None));
        });
    }

    #[test]
    fn a_waiter_wakes_with_the_refusal_or_gets_the_frame_that_became_free() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let admission = Arc::new(Admission::new());
            let mut held = Vec::new();
            for _ in 0..FRAMES {
                let grant = admission.acquire().unwrap();
                admission.publish(grant.frame);
                held.push(grant.frame);
            }
            let waiter = {
                let admission = Arc::clone(&admission);
                thread::spawn(move || match admission.acquire() {
                    Ok(grant) => {
                        admission.publish(grant.frame);
                        admission.retire(grant.frame);
                        true
                    }
                    Err(reason) => {
                        assert_eq!(reason, "closing");
                        false
                    }
                })
            };
            let finisher = {
                let admission = Arc::clone(&admission);
                thread::spawn(move || held.into_iter().for_each(|frame| admission.retire(frame)))
            };
            admission.refuse("closing", |_| true);
            // Close waits for everybody, whoever was faster (I12).
            assert!(admission.wait_idle(None));
            waiter.join().unwrap();
            finisher.join().unwrap();
            assert_eq!(admission.acquire(), Err("closing"));
        });
    }

    #[test]
    fn a_poison_that_comes_with_a_free_frame_is_seen_before_the_frame() {
        loom::model(|| {
            let admission = Arc::new(Admission::new());
            for _ in 0..FRAMES {
                let grant = admission.acquire().unwrap();
                admission.publish(grant.frame);
            }
            let waiter = {
                let admission = Arc::clone(&admission);
                thread::spawn(move || admission.acquire())
            };
            // The order of finish: poison, then the frame.
            admission.refuse("poisoned", |_| false);
            admission.retire(0);
            assert_eq!(waiter.join().unwrap(), Err("poisoned"));
        });
    }
}
