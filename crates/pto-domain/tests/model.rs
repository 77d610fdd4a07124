//! The table against a slow model, over random histories.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests too")]

mod support;

use std::collections::BTreeMap;

use proptest::prelude::*;
use pto_domain::{DomainError, DomainPhase, DomainTable, LeaseAuthority, ProgramIndex, ReleaseOutcome, Slot};
use pto_simpler_sys::DomainRequest;
use support::{reply, signal};

const PROGRAMS: u32 = 2;
const NAMES: [&str; 3] = ["d0", "d1", "d2"];

#[derive(Clone, Debug)]
enum Step {
    /// A dispatch: asks for domains by name, some under a changed request; is published, or is not.
    Dispatch {
        program: u32,
        asks: Vec<(usize, bool)>,
        published: bool,
    },
    Poison,
    LeaveToBackend(usize),
    StopLeasing,
    /// Releases everything there is to release, as the given outcomes say.
    Release(Vec<u8>),
}

fn step() -> impl Strategy<Value = Step> {
    let asks = proptest::collection::vec((0..NAMES.len(), proptest::bool::weighted(0.15)), 0..4);
    prop_oneof![
        20 => (0..PROGRAMS, asks, proptest::bool::weighted(0.8))
            .prop_map(|(program, asks, published)| Step::Dispatch { program, asks, published }),
        1 => Just(Step::Poison),
        1 => (0usize..6).prop_map(Step::LeaveToBackend),
        1 => Just(Step::StopLeasing),
        1 => proptest::collection::vec(0u8..3, 6).prop_map(Step::Release),
    ]
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Fate {
    Retained,
    Backend,
    Freed,
    Stuck,
}

/// What must be true, kept by key in maps and lists rather than by slot.
#[derive(Default)]
struct Model {
    order: Vec<(u32, usize)>,
    epochs: BTreeMap<(u32, usize), u64>,
    fates: BTreeMap<(u32, usize), Fate>,
    poisoned: bool,
    closing: bool,
}

struct Run {
    table: DomainTable,
    authority: LeaseAuthority,
    slots: BTreeMap<(u32, usize), Slot>,
    model: Model,
}

impl Run {
    fn dispatch(&mut self, program: u32, asks: &[(usize, bool)], published: bool) {
        let request = signal(&[0, 1]);
        let changed = DomainRequest { window_bytes: 128, ..request.clone() };
        let index = ProgramIndex::new(program);
        let mut leased: Vec<(u32, usize)> = Vec::new();
        for (name, change) in asks {
            let key = (program, *name);
            let asked = if *change { &changed } else { &request };
            let found = self.table.lookup(index, NAMES[*name], asked);
            if self.model.poisoned {
                assert_eq!(found, Err(DomainError::Poisoned));
                continue;
            }
            if self.model.closing {
                assert_eq!(found, Err(DomainError::Closing));
                continue;
            }
            let slot = match self.model.fates.get(&key) {
                None => {
                    assert_eq!(found, Ok(None));
                    let id = u32::try_from(self.model.order.len()).unwrap();
                    let slot = self.table.insert(index, NAMES[*name], &request, reply(id, &request)).unwrap();
                    self.model.order.push(key);
                    self.model.fates.insert(key, Fate::Retained);
                    self.model.epochs.insert(key, 0);
                    self.slots.insert(key, slot);
                    slot
                }
                Some(Fate::Retained) if *change => {
                    assert!(matches!(found, Err(DomainError::SpecChanged { .. })));
                    continue;
                }
                Some(Fate::Retained) => found.unwrap().unwrap(),
                Some(_) => {
                    assert!(matches!(found, Err(DomainError::NotLive { .. })));
                    continue;
                }
            };
            assert_eq!(slot, self.slots[&key]);
            let lease = self.table.lease(slot, &self.authority).unwrap();
            let committed = self.model.epochs[&key];
            assert_eq!((lease.epoch(), lease.is_first_use()), (committed + 1, committed == 0));
            assert_eq!(lease.request(), &request, "I7");
            assert_eq!(lease.domain_id(&self.authority), self.table.domain(slot).unwrap().id());
            if !leased.contains(&key) {
                leased.push(key);
            }
        }
        if published {
            for key in leased {
                self.table.commit_lease(self.slots[&key]).unwrap();
                *self.model.epochs.get_mut(&key).unwrap() += 1;
            }
        }
    }

    fn take(&mut self, step: &Step) {
        match step {
            Step::Dispatch { program, asks, published } => self.dispatch(*program, asks, *published),
            Step::Poison => {
                self.table.poison();
                self.model.poisoned = true;
                for fate in self.model.fates.values_mut().filter(|fate| **fate == Fate::Retained) {
                    *fate = Fate::Backend;
                }
            }
            Step::LeaveToBackend(nth) => {
                let Some(key) = self.model.order.get(*nth) else { return };
                let legal = matches!(self.model.fates[key], Fate::Retained | Fate::Backend);
                assert_eq!(self.table.backend_owned(self.slots[key]).is_ok(), legal);
                if legal {
                    self.model.fates.insert(*key, Fate::Backend);
                }
            }
            Step::StopLeasing => {
                self.table.stop_leasing();
                self.model.closing = true;
            }
            Step::Release(outcomes) => {
                for (slot, outcome) in self.table.release_plan().into_iter().zip(outcomes) {
                    let id = self.table.begin_release(slot).unwrap();
                    assert_eq!(id, self.table.domain(slot).unwrap().id());
                    let (outcome, fate) = match outcome {
                        0 => (ReleaseOutcome::Freed, Fate::Freed),
                        1 => (ReleaseOutcome::NotFreed, Fate::Stuck),
                        _ => (ReleaseOutcome::Failed, Fate::Stuck),
                    };
                    self.table.finish_release(slot, outcome).unwrap();
                    let key = *self.slots.iter().find(|(_, s)| **s == slot).unwrap().0;
                    self.model.fates.insert(key, fate);
                }
            }
        }
    }

    fn check(&self) {
        self.table.self_check().unwrap();
        let model = &self.model;
        assert_eq!((self.table.is_poisoned(), self.table.is_closing()), (model.poisoned, model.closing));
        assert_eq!(self.table.len(), model.order.len(), "I3: allocations = distinct keys used");
        let of = |keys: &mut dyn Iterator<Item = &(u32, usize)>| -> Vec<Slot> {
            keys.filter(|key| model.fates[key] == Fate::Retained).map(|key| self.slots[key]).collect()
        };
        assert_eq!(self.table.release_plan(), of(&mut model.order.iter().rev()), "rule 20");
        for program in 0..PROGRAMS {
            let retained: Vec<Slot> = self.table.retained(ProgramIndex::new(program)).collect();
            assert_eq!(retained, of(&mut model.order.iter().filter(|key| key.0 == program)), "rule 12");
        }
        for key in &model.order {
            let domain = self.table.domain(self.slots[key]).unwrap();
            assert_eq!(domain.epoch(), model.epochs[key], "rule 16");
            assert_eq!(domain.backend_name(), format!("p{}:{}", key.0, NAMES[key.1]), "rule 8");
            let phase = match model.fates[key] {
                Fate::Retained => DomainPhase::Live,
                Fate::Backend => DomainPhase::BackendOwned,
                Fate::Freed => DomainPhase::Freed,
                Fate::Stuck => DomainPhase::Unreleased,
            };
            assert_eq!(domain.phase(), phase);
            let lease = self.table.lease(self.slots[key], &self.authority);
            let leasable = phase == DomainPhase::Live && !model.poisoned && !model.closing;
            assert_eq!(lease.is_ok(), leasable, "I6");
        }
    }
}

proptest! {
    #[test]
    fn any_history_keeps_the_table_equal_to_its_model(steps in proptest::collection::vec(step(), 0..40)) {
        let (table, authority) = DomainTable::new(PROGRAMS);
        let mut run = Run { table, authority, slots: BTreeMap::new(), model: Model::default() };
        for step in &steps {
            run.take(step);
            run.check();
        }
    }
}
