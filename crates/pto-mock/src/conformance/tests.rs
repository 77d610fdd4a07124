use super::*;

/// A rule that is written but not listed would never run.
#[test]
fn every_rule_function_is_listed_once() {
    let sources = [
        ("lifecycle", include_str!("rules/lifecycle.rs")),
        ("runs", include_str!("rules/runs.rs")),
        ("domains", include_str!("rules/domains.rs")),
        ("retention", include_str!("rules/retention.rs")),
        ("copies", include_str!("rules/copies.rs")),
        ("order", include_str!("rules/order.rs")),
        ("tasks", include_str!("rules/tasks.rs")),
        ("entries", include_str!("rules/entries.rs")),
        ("host", include_str!("rules/host.rs")),
        ("resident", include_str!("rules/resident.rs")),
        ("end", include_str!("rules/end.rs")),
    ];
    let written: Vec<_> = sources
        .iter()
        .flat_map(|(_, source)| source.lines())
        .filter_map(|line| line.strip_prefix("pub fn ")?.split('(').next())
        .collect();
    let listed: Vec<_> = RULES.iter().map(|rule| rule.name).collect();
    assert_eq!(listed, written);
    let mut unique = listed.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), listed.len());
}

#[test]
fn a_test_path_leaves_out_the_crate() {
    assert_eq!(TestPath::new("suite", "rule").as_str(), "rule");
    assert_eq!(TestPath::new("suite::emulator::depth_1", "rule").as_str(), "emulator::depth_1::rule");
    assert!(!TestPath::new("suite", "rule").is_child());
}
