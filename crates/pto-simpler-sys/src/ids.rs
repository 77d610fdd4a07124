//! Plain generational ids: what a backend hands out instead of references.
//!
//! An id is two 32-bit numbers, an *index* (a slot of some table of the backend) and a *generation* (how often
//! that slot has been used). A stale id therefore names nothing, instead of naming a newer object by accident.
//! Ids are `Copy`, ordered, hashable and printable, so that wrappers can forward them, journals can record them
//! and tests can compare them.

use std::fmt;

macro_rules! generational_id {
    ($(#[$doc:meta])* $name:ident, $short:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name {
            index: u32,
            generation: u32,
        }

        impl $name {
            /// Builds an id from a table slot and the number of times that slot has been used. For backends.
            #[must_use]
            pub const fn new(index: u32, generation: u32) -> Self {
                Self { index, generation }
            }

            /// The slot of the backend's table.
            #[must_use]
            pub const fn index(self) -> u32 {
                self.index
            }

            /// How often the slot had been used when this id was made.
            #[must_use]
            pub const fn generation(self) -> u32 {
                self.generation
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($short, "{}.{}"), self.index, self.generation)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self, f)
            }
        }
    };
}

generational_id! {
    /// One physical domain: the set of windows made by one allocation. Two allocations never share an id, even
    /// under the same name.
    DomainId, "domain"
}
generational_id! {
    /// A host buffer: shared memory that chip workers can read and copies can start from.
    HostBufferId, "host"
}
generational_id! {
    /// Device memory of one chip worker that outlives runs.
    DeviceBufferId, "device"
}
generational_id! {
    /// Runtime-managed host memory that lives as long as the run whose graph asked for it.
    ScratchId, "scratch"
}
generational_id! {
    /// A registered callable: a chip callable, a sub-worker function or a host entry.
    CallableId, "callable"
}

/// One backend submission, named by a number that the *caller* chose and never reuses on the same backend.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunId(pub u64);

impl fmt::Debug for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "run{}", self.0)
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A chip worker: one device process, named by its index into the worker's `device_ids` (not by the device id).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChipId(pub u32);

impl fmt::Debug for ChipId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chip{}", self.0)
    }
}

impl fmt::Display for ChipId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_print_slot_and_generation_and_differ_by_either() {
        assert_eq!(format!("{}", DomainId::new(3, 2)), "domain3.2");
        assert_ne!(DomainId::new(3, 2), DomainId::new(3, 1));
        assert_ne!(HostBufferId::new(0, 1), HostBufferId::new(1, 1));
        assert_eq!(format!("{:?} {:?}", RunId(7), ChipId(1)), "run7 chip1");
    }
}
