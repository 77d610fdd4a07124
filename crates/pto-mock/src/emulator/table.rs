//! Slot tables with generations, and sets of run numbers.

use std::collections::BTreeMap;

use pto_simpler_sys::{CallableId, DeviceBufferId, DomainId, HostBufferId, ScratchId};

/// An id made of a slot and a generation.
pub(crate) trait Key: Copy {
    fn make(index: u32, generation: u32) -> Self;
    fn parts(self) -> (u32, u32);
}

macro_rules! key {
    ($($id:ty),*) => {$(
        impl Key for $id {
            fn make(index: u32, generation: u32) -> Self {
                Self::new(index, generation)
            }
            fn parts(self) -> (u32, u32) {
                (self.index(), self.generation())
            }
        }
    )*};
}

key!(CallableId, DeviceBufferId, DomainId, HostBufferId, ScratchId);

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// Values by generational id.
#[derive(Debug)]
pub(crate) struct Table<K, T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    key: std::marker::PhantomData<K>,
}

impl<K, T> Default for Table<K, T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), key: std::marker::PhantomData }
    }
}

impl<K: Key, T> Table<K, T> {
    /// Adds a value. `None` where the table is full, which takes four thousand million live values.
    pub(crate) fn insert(&mut self, value: T) -> Option<K> {
        if let Some(index) = self.free.pop() {
            let slot = self.slots.get_mut(index as usize)?;
            slot.generation += 1;
            slot.value = Some(value);
            return Some(K::make(index, slot.generation));
        }
        let index = u32::try_from(self.slots.len()).ok()?;
        self.slots.push(Slot { generation: 0, value: Some(value) });
        Some(K::make(index, 0))
    }

    pub(crate) fn get(&self, id: K) -> Option<&T> {
        let (index, generation) = id.parts();
        let slot = self.slots.get(index as usize)?;
        if slot.generation == generation { slot.value.as_ref() } else { None }
    }

    pub(crate) fn get_mut(&mut self, id: K) -> Option<&mut T> {
        let (index, generation) = id.parts();
        let slot = self.slots.get_mut(index as usize)?;
        if slot.generation == generation { slot.value.as_mut() } else { None }
    }

    /// Takes a value out; its id names nothing from then on. A slot whose generations are used up is retired.
    pub(crate) fn remove(&mut self, id: K) -> Option<T> {
        let (index, generation) = id.parts();
        let slot = self.slots.get_mut(index as usize)?;
        if slot.generation != generation {
            return None;
        }
        let value = slot.value.take()?;
        if slot.generation < u32::MAX {
            self.free.push(index);
        }
        Some(value)
    }

    /// Whether this id was ever given out.
    pub(crate) fn ever(&self, id: K) -> bool {
        let (index, generation) = id.parts();
        self.slots.get(index as usize).is_some_and(|slot| generation <= slot.generation)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (K, &T)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let value = slot.value.as_ref()?;
            Some((K::make(u32::try_from(index).ok()?, slot.generation), value))
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.iter().filter(|slot| slot.value.is_some()).count()
    }
}

/// A set of numbers that usually come in runs: stored as disjoint, non-adjacent ranges.
#[derive(Debug, Default)]
pub(crate) struct NumberSet(BTreeMap<u64, u64>);

impl NumberSet {
    pub(crate) fn contains(&self, n: u64) -> bool {
        self.0.range(..=n).next_back().is_some_and(|(_, last)| n <= *last)
    }

    pub(crate) fn insert(&mut self, n: u64) {
        if self.contains(n) {
            return;
        }
        let (mut first, mut last) = (n, n);
        if let Some((start, end)) = self.0.range(..n).next_back()
            && *end + 1 == n
        {
            first = *start;
        }
        if let Some(next) = n.checked_add(1)
            && let Some(end) = self.0.remove(&next)
        {
            last = end;
        }
        self.0.insert(first, last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_stale_id_names_nothing() {
        let mut table: Table<DomainId, &str> = Table::default();
        let first = table.insert("first").unwrap();
        assert_eq!(table.remove(first), Some("first"));
        assert_eq!(table.remove(first), None);
        let second = table.insert("second").unwrap();
        assert_eq!((second.index(), second.generation()), (first.index(), first.generation() + 1));
        assert_eq!((table.get(first), table.get(second)), (None, Some(&"second")));
        assert!(table.ever(first) && table.ever(second));
        assert!(!table.ever(DomainId::new(0, 2)) && !table.ever(DomainId::new(1, 0)));
    }

    #[test]
    fn a_slot_whose_generations_are_used_up_is_retired() {
        let mut table: Table<DomainId, &str> = Table::default();
        let first = table.insert("first").unwrap();
        table.slots[0].generation = u32::MAX;
        assert_eq!(table.remove(DomainId::new(first.index(), u32::MAX)), Some("first"));
        let second = table.insert("second").unwrap();
        assert_eq!((second.index(), table.len()), (1, 1));
    }

    #[test]
    fn a_number_set_is_a_set() {
        let (mut set, mut model) = (NumberSet::default(), BTreeSet::new());
        for n in [5, 3, 4, 9, 8, 0, u64::MAX, u64::MAX - 1, 5, 1, 2] {
            set.insert(n);
            model.insert(n);
            for probe in (0..12).chain(u64::MAX - 3..=u64::MAX) {
                assert_eq!(set.contains(probe), model.contains(&probe), "{probe} after {n}");
            }
        }
        assert_eq!(set.0.len(), 3, "adjacent ranges merge: 0-5, 8-9 and the two last numbers");
    }
}
