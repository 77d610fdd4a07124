use std::fs;
use std::time::Duration;

use clap::Parser;
use clap::error::ErrorKind;

use super::*;
use crate::workload::model::{add_words, map_words};
use crate::workload::plan::chunk;

fn parse(arguments: &[&str]) -> Result<Arguments, clap::Error> {
    Arguments::try_parse_from(["production_decode"].iter().chain(arguments))
}

fn code(arguments: &[&str]) -> Result<bool, u8> {
    run(&parse(arguments).unwrap()).map_err(|failure| failure.exit_code())
}

/// Two ranks, one signal, one payload of an odd size, no kind on the payload.
const SMALL: &str = r#"{"programs": [{"program": "p", "source": "r:models/tiny/step.py", "world_size": 2, "domains": [
    {"name": "d", "workers": [0, 1], "window_bytes": 129, "buffers": [
        {"name": "s", "dtype": "int32", "count": 8, "nbytes": 32, "kind": "signal"},
        {"name": "x", "dtype": "opaque", "count": 97, "nbytes": 97}]}]}]}"#;

struct TemporaryFile(PathBuf);

impl TemporaryFile {
    fn new(name: &str, text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("production-decode-{}-{name}", std::process::id()));
        fs::write(&path, text).unwrap();
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn chunks_partition_a_buffer_on_word_boundaries() {
    for nbytes in [0, 1, 3, 4, 5, 17, 1024, 1_048_593, u64::MAX - 2] {
        for ranks in [1, 2, 3, 5, 64] {
            let mut end = 0;
            for index in 0..ranks {
                let range = chunk(nbytes, ranks, index);
                assert_eq!(range.start, end, "{nbytes} bytes, chunk {index} of {ranks}");
                assert!(range.start.is_multiple_of(4) || range.start == nbytes);
                end = range.end;
            }
            assert_eq!(end, nbytes);
        }
    }
}

#[test]
fn shortened_words_keep_the_low_bytes_of_their_sum() {
    let mut bytes = [0xFF, 0, 0, 0, 0xFF, 0xFF];
    map_words(&mut bytes, |_, word| word.wrapping_add(1));
    assert_eq!(bytes, [0, 1, 0, 0, 0, 0]);
    add_words(&mut bytes, &[1, 1, 1, 1, 0xFF, 1]);
    assert_eq!(bytes, [1, 2, 1, 1, 0xFF, 1]);
}

#[test]
fn the_default_is_one_model_with_prefill_and_decode() {
    let fixture = Fixture::parse(PRODUCTION.as_bytes()).unwrap();
    let names = |names: &[&str]| {
        let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
        select::select(&fixture, &names).map(|p| p.iter().map(|p| p.name.clone()).collect::<Vec<_>>())
    };
    let pair = ["deepseek_v4_pro/prefill_fwd", "deepseek_v4_pro/decode_fwd"];
    assert_eq!(names(&[]).unwrap(), pair);
    assert_eq!(names(&["deepseek_v4_pro"]).unwrap(), pair);
    assert_eq!(names(&["advanced", "advanced/allreduce"]).unwrap(), ["advanced/allreduce"]);
    assert!(names(&["nobody"]).unwrap_err().to_string().contains("advanced/allreduce"));
    let small = Fixture::parse(SMALL.as_bytes()).unwrap();
    assert_eq!(select::select(&small, &[]).unwrap().len(), 1, "every program where no model has the pair");
}

#[test]
fn the_default_fits_into_64_mib_of_shared_memory() {
    let fixture = Fixture::parse(PRODUCTION.as_bytes()).unwrap();
    let plans: Vec<_> = select::select(&fixture, &[])
        .unwrap()
        .into_iter()
        .map(|p| Arc::new(ProgramPlan::new(p, 2).unwrap()))
        .collect();
    let arguments = parse(&[]).unwrap();
    let setup = Setup {
        chips: 2,
        depth: arguments.depth,
        iterations: arguments.iterations,
        mapping: Mapping::Exact,
        memory: Memory::default(),
    };
    let required = shared_memory::required(&plans, &Mode::CORRECT, &setup);
    assert!(required <= 64 << 20, "{required} bytes");
    assert!(required > 4 * 10_609_184, "the windows alone: {required} bytes");
}

#[test]
fn too_little_shared_memory_is_said_before_anything_is_made() {
    let error = shared_memory::check(u64::MAX).unwrap_err().to_string();
    assert!(error.contains("needs") || error.contains("need "), "{error}");
    assert!(error.contains("free"), "{error}");
}

#[test]
fn wrong_usage_and_unusable_fixtures_exit_with_2() {
    assert_eq!(parse(&["--chips", "0"]).unwrap_err().exit_code(), 2);
    assert_eq!(parse(&["--iterations", "0"]).unwrap_err().exit_code(), 2);
    assert_eq!(parse(&["--depth", "3"]).unwrap_err().exit_code(), 2);
    assert_eq!(parse(&["--granularity", "8k"]).unwrap_err().exit_code(), 2);
    assert_eq!(parse(&["--frobnicate"]).unwrap_err().exit_code(), 2);
    assert_eq!(parse(&["--backend", "abacus"]).unwrap_err().exit_code(), 2);
    assert_eq!(parse(&["--backend", "emulator"]).unwrap().backend, BackendName::Emulator);
    assert_eq!(code(&["--backend", "simpler", "--granularity", "4k"]), Err(2));
    assert_eq!(code(&["--backend", "emulator", "--kernels", "somewhere"]), Err(2));
    #[cfg(not(feature = "simpler"))]
    {
        let refused = run(&parse(&["--backend", "simpler"]).unwrap()).unwrap_err();
        assert_eq!(refused.exit_code(), 2);
        assert!(refused.to_string().contains("--features simpler"), "{refused}");
    }
    assert_eq!(parse(&["--help"]).unwrap_err().kind(), ErrorKind::DisplayHelp);
    assert_eq!(code(&["--program", "nobody/nothing"]), Err(2));
    assert_eq!(code(&["--fixtures", "no such file"]), Err(2));
    assert_eq!(code(&["--chips", "9"]), Err(2), "signals of 32 bytes have no cells for 9 chips");
    let malformed = TemporaryFile::new("malformed.json", "{\"programs\": [");
    assert_eq!(code(&["--fixtures", malformed.path()]), Err(2));
}

#[test]
fn any_file_in_the_form_runs_and_is_reported() {
    let fixture = TemporaryFile::new("small.json", SMALL);
    let json = TemporaryFile::new("report.json", "");
    let arguments = ["--fixtures", fixture.path(), "--iterations", "3", "--json", json.path()];
    assert_eq!(code(&arguments), Ok(true));
    let report: serde_json::Value = serde_json::from_slice(&fs::read(&json.0).unwrap()).unwrap();
    let row = |mode: &str| {
        let rows = report["results"].as_array().unwrap();
        rows.iter().find(|r| r["mode"] == mode).unwrap().clone()
    };
    assert_eq!(report["results"].as_array().unwrap().len(), 3);
    for mode in Mode::CORRECT {
        assert_eq!(row(mode.name())["mismatches"], 0);
        // 25 words, the last of them shortened, three times.
        assert_eq!(row(mode.name())["elements"], 75);
    }
    assert_eq!((&row("per-request")["allocations"], &row("reset")["allocations"]), (&3.into(), &1.into()));
    // Two reuses, two chips, two buffers.
    assert_eq!(row("reset")["zeroed_bytes"], 2 * 2 * 129);
    assert_eq!((&row("epochs")["zeroed_bytes"], &row("epochs")["reuses"]), (&0.into(), &2.into()));
    assert_eq!(code(&["--fixtures", fixture.path(), "--iterations", "2", "--stale"]), Ok(true));
}

#[test]
fn percentiles_are_nearest_ranks() {
    let samples: Vec<Duration> = (1..=10).rev().map(Duration::from_secs).collect();
    assert_eq!(report::percentile(&samples, 50), Duration::from_secs(5));
    assert_eq!(report::percentile(&samples, 99), Duration::from_secs(10));
    assert_eq!(report::percentile(&[], 99), Duration::ZERO);
    assert_eq!((report::bytes(1023), report::bytes(1536)), ("1023 B".to_owned(), "1.5 KiB".to_owned()));
}
