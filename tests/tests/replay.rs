//! The committed inputs of the fuzz targets, on a stable toolchain.

use std::fs;
use std::path::Path;

use pto_tests::fuzz::TARGETS;

/// Every input that a fuzzer found worth keeping still keeps the claims of its target.
#[test]
fn committed_inputs_keep_their_targets_claims() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    for (name, target) in TARGETS {
        let mut files: Vec<_> = fs::read_dir(corpus.join(name)).unwrap().map(|f| f.unwrap().path()).collect();
        files.sort();
        assert!(files.len() >= 20, "{name} has {} inputs", files.len());
        for file in files {
            let bytes = fs::read(&file).unwrap();
            // Shown where the target panics.
            println!("{name}: {}", file.file_name().unwrap().to_string_lossy());
            target(&bytes);
        }
    }
}

/// Each target of the list is one that `fuzz/` builds.
#[test]
fn every_target_has_its_file() {
    let targets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/fuzz_targets");
    let mut files: Vec<_> = fs::read_dir(targets).unwrap().map(|f| f.unwrap().path()).collect();
    files.sort();
    let mut names: Vec<_> = TARGETS.map(|(name, _)| name).into();
    names.sort_unstable();
    let stems: Vec<_> = files.iter().map(|file| file.file_stem().unwrap().to_str().unwrap()).collect();
    assert_eq!(stems, names);
}
