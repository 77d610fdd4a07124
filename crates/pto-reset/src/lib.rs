//! What must be zeroed before a retained domain is reused: coverage, mappings, plans.
