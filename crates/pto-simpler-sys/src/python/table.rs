//! A table whose slots are named by index and generation.

/// Values under `(index, generation)` keys: a key of a removed value never names a newer one.
#[derive(Debug)]
pub(crate) struct Table<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Table<T> {
    /// Stores a value and returns its key.
    pub(crate) fn insert(&mut self, value: T) -> (u32, u32) {
        if let Some(index) = self.free.pop()
            && let Some(slot) = self.slots.get_mut(index as usize)
        {
            slot.value = Some(value);
            return (index, slot.generation);
        }
        let index = self.slots.len() as u32;
        self.slots.push(Slot { generation: 1, value: Some(value) });
        (index, 1)
    }

    pub(crate) fn get(&self, index: u32, generation: u32) -> Option<&T> {
        self.slots.get(index as usize).filter(|s| s.generation == generation)?.value.as_ref()
    }

    pub(crate) fn get_mut(&mut self, index: u32, generation: u32) -> Option<&mut T> {
        self.slots.get_mut(index as usize).filter(|s| s.generation == generation)?.value.as_mut()
    }

    pub(crate) fn remove(&mut self, index: u32, generation: u32) -> Option<T> {
        let slot = self.slots.get_mut(index as usize).filter(|s| s.generation == generation)?;
        let value = slot.value.take()?;
        // A slot whose generations are used up is retired rather than reused.
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
            self.free.push(index);
        }
        Some(value)
    }

    /// Takes everything out; all keys given out so far are stale afterwards.
    pub(crate) fn drain(&mut self) -> Vec<T> {
        let keys: Vec<(u32, u32)> =
            (0u32..).zip(&self.slots).filter(|(_, s)| s.value.is_some()).map(|(i, s)| (i, s.generation)).collect();
        keys.into_iter().filter_map(|(index, generation)| self.remove(index, generation)).collect()
    }

    /// Whether a value was once stored under this key and has been removed since.
    pub(crate) fn was(&self, key: impl Key) -> bool {
        self.slots.get(key.index() as usize).is_some_and(|s| {
            key.generation() > 0
                && (key.generation() < s.generation || (s.generation == u32::MAX && s.value.is_none()))
        })
    }

    /// The keys of all values.
    pub(crate) fn keys<K: Key>(&self) -> impl Iterator<Item = K> {
        (0u32..).zip(&self.slots).filter(|(_, s)| s.value.is_some()).map(|(i, s)| K::make(i, s.generation))
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| slot.value.as_ref())
    }
}

/// Connects a generational id of the HAL to a [`Table`].
pub(crate) trait Key: Copy {
    fn index(self) -> u32;
    fn generation(self) -> u32;
    fn make(index: u32, generation: u32) -> Self;
}

macro_rules! keys {
    ($($id:ty),*) => {$(
        impl Key for $id {
            fn index(self) -> u32 { <$id>::index(self) }
            fn generation(self) -> u32 { <$id>::generation(self) }
            fn make(index: u32, generation: u32) -> Self { <$id>::new(index, generation) }
        }
    )*};
}
keys!(crate::DomainId, crate::HostBufferId, crate::DeviceBufferId, crate::ScratchId, crate::CallableId);

impl<T> Table<T> {
    pub(crate) fn add<K: Key>(&mut self, value: T) -> K {
        let (index, generation) = self.insert(value);
        K::make(index, generation)
    }

    pub(crate) fn at<K: Key>(&self, key: K) -> Option<&T> {
        self.get(key.index(), key.generation())
    }

    pub(crate) fn at_mut<K: Key>(&mut self, key: K) -> Option<&mut T> {
        self.get_mut(key.index(), key.generation())
    }

    pub(crate) fn take<K: Key>(&mut self, key: K) -> Option<T> {
        self.remove(key.index(), key.generation())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostBufferId;

    #[test]
    fn a_stale_key_names_nothing_although_its_slot_is_used_again() {
        let mut table = Table::default();
        let old: HostBufferId = table.add('a');
        assert_eq!(table.take(old), Some('a'));
        let new: HostBufferId = table.add('b');
        assert_eq!(old.index(), new.index());
        assert_eq!((table.at(old), table.at(new), table.values().count()), (None, Some(&'b'), 1));
        assert!(table.was(old) && !table.was(new) && !table.was(HostBufferId::new(7, 1)));
        assert_eq!((table.take(old), table.drain(), table.at(new)), (None, vec!['b'], None));
    }
}
