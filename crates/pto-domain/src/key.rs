//! Names of retained domains: which program, and what that program calls it.

use std::fmt;
use std::sync::Arc;

/// The position of a program in the list that a worker was prepared from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProgramIndex(u32);

impl ProgramIndex {
    /// The program at this position.
    #[must_use]
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// The position.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for ProgramIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "p{}", self.0)
    }
}

/// What a program calls one of its domains. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainName(Arc<str>);

impl DomainName {
    /// A name as given. [`check_name`](crate::check_name) says whether a domain may be called so.
    #[must_use]
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self(name.into())
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DomainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The key of a retained domain (rule 8): equal names of two programs are two keys.
///
/// Its `Display` form, `p0:comm_d0`, is the name by which the backend knows the retained domain. The form is
/// unambiguous: a program's prefix holds no colon, so everything after the first one is the name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainKey {
    program: ProgramIndex,
    name: DomainName,
}

impl DomainKey {
    /// The key of `program`'s domain `name`.
    #[must_use]
    pub fn new(program: ProgramIndex, name: DomainName) -> Self {
        Self { program, name }
    }

    /// The program.
    #[must_use]
    pub fn program(&self) -> ProgramIndex {
        self.program
    }

    /// What the program calls it.
    #[must_use]
    pub fn name(&self) -> &DomainName {
        &self.name
    }
}

impl fmt::Display for DomainKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.program, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_8_a_key_prints_as_the_name_that_the_backend_knows() {
        let key = DomainKey::new(ProgramIndex::new(0), DomainName::new("comm_d0"));
        assert_eq!(key.to_string(), "p0:comm_d0");
        assert_eq!(key.program().get(), 0);
        assert_eq!(key.name().as_str(), "comm_d0");
    }

    #[test]
    fn rule_8_no_two_keys_print_alike_even_with_colons_in_names() {
        let text = |p, n: &str| DomainKey::new(ProgramIndex::new(p), DomainName::new(n)).to_string();
        assert_ne!(text(0, "p1:d"), text(1, "d"));
        assert_ne!(text(1, "1:d"), text(11, "d"));
        assert_ne!(text(0, "d"), text(1, "d"));
    }
}
