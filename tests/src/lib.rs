//! Cross-crate suites.
