//! The list of rules names homes and tests that exist, and each rule has both.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests report by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The text of every Rust file below `directory`.
fn sources(directory: &Path, all: &mut String) {
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            sources(&path, all);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            all.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}

/// What stands between backticks.
fn quoted(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

#[test]
fn each_rule_has_a_home_and_a_test() {
    let text = fs::read_to_string(root().join("docs/rules.md")).unwrap();
    let mut code = String::new();
    sources(&root().join("crates"), &mut code);
    sources(&root().join("tests"), &mut code);
    let defines = |name: &str| code.contains(&format!("fn {name}(")) || code.contains(&format!("!({name},"));

    let (mut rules, mut invariants) = (Vec::new(), Vec::new());
    for line in text.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let (number, tests) = match *cells {
            [number, _, home, tests] if number.parse::<u32>().is_ok() => {
                for file in quoted(home) {
                    assert!(root().join("crates").join(file).is_file(), "rule {number}: {file} does not exist");
                }
                assert!(!quoted(home).is_empty(), "rule {number} has no home");
                rules.push(number.parse::<u32>().unwrap());
                (number, tests)
            }
            [number, _, tests] if number.starts_with('I') => {
                invariants.push(number[1..].parse::<u32>().unwrap());
                (number, tests)
            }
            _ => continue,
        };
        let tests = quoted(tests);
        assert!(!tests.is_empty(), "{number} has no test");
        for name in tests.iter().filter(|name| name.contains('_')) {
            assert!(defines(name), "{number}: there is no test {name}");
        }
    }
    assert_eq!(rules, (1..=21).collect::<Vec<_>>());
    assert_eq!(invariants, (1..=14).collect::<Vec<_>>());
    for name in text.lines().filter(|line| line.starts_with("with `") || line.contains(": `s27")).flat_map(quoted) {
        assert!(defines(name), "there is no test {name}");
    }
}
