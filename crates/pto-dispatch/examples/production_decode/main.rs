//! Production programs, dispatched persistently over emulated or real chips and verified.
//!
//! ```text
//! cargo run --release --example production_decode -- --help
//! cargo run --release -p pto-dispatch --features simpler --example production_decode -- --backend simpler
//! ```
//!
//! Reads the domain requests of real programs, builds a [`workload`] from the requests alone, prepares the programs
//! as one worker and dispatches them in three ways: domains per request; persistent with reset; persistent without
//! reset, with epochs. Every element of every result is compared with the same step on one chip.

mod driver;
mod options;
mod report;
mod runtime;
mod select;
mod shared_memory;
mod simpler;
#[cfg(test)]
mod tests;
mod workload;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use pto_mock::fixtures::{Fixture, FixtureError, ProgramFixture};
use pto_mock::{Mapping, Memory};

use driver::{DriverError, Mode, ProgramReport, Setup, measure, needs_ranges};
use options::{Arguments, BackendName};
use runtime::Runtime;
use shared_memory::SharedMemoryError;
use workload::plan::{PlanError, ProgramPlan};

/// The project's own requests, compiled in so that the example runs from any directory.
const PRODUCTION: &str = include_str!("../../../../tests/fixtures/production-domains.json");

/// Everything that ends the example early.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// An option of one backend with another.
    #[error("{option} is for --backend {backend}: leave it out, or name that backend")]
    Option { option: &'static str, backend: &'static str },
    /// Simpler cannot be used.
    #[error(transparent)]
    Simpler(#[from] simpler::SimplerError),
    /// The fixture cannot be used.
    #[error("{file}: {source}")]
    Fixture { file: String, source: FixtureError },
    /// A name that the fixture does not have.
    #[error(transparent)]
    Name(#[from] select::UnknownName),
    /// The requests do not fit.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// No room.
    #[error(transparent)]
    SharedMemory(#[from] SharedMemoryError),
    /// A measurement failed.
    #[error("{mode}: {source}")]
    Measurement { mode: Mode, source: DriverError },
    /// The report cannot be written.
    #[error("{}: {source}", path.display())]
    Report { path: PathBuf, source: std::io::Error },
}

impl Failure {
    /// 2 where the caller must change the command line or the file, else 1.
    fn exit_code(&self) -> u8 {
        match self {
            Self::Option { .. } | Self::Fixture { .. } | Self::Name(_) | Self::Plan(_) => 2,
            Self::Simpler(error) if error.is_usage() => 2,
            Self::Simpler(_) | Self::SharedMemory(_) | Self::Measurement { .. } | Self::Report { .. } => 1,
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(failure) => {
            eprintln!("error: {failure}");
            let mut source = std::error::Error::source(&failure).and_then(std::error::Error::source);
            while let Some(cause) = source {
                eprintln!("  caused by: {cause}");
                source = cause.source();
            }
            ExitCode::from(failure.exit_code())
        }
    }
}

/// Runs all modes; says whether the results are what they should be.
fn run(arguments: &Arguments) -> Result<bool, Failure> {
    check_options(arguments)?;
    let fixture = load(arguments)?;
    let selected = select::select(&fixture, &arguments.program)?;
    let chips = arguments.chips.unwrap_or_else(|| default_chips(&selected));
    let plans = selected
        .into_iter()
        .map(|program| ProgramPlan::new(program, chips).map(Arc::new))
        .collect::<Result<Vec<_>, PlanError>>()?;
    let runtime = Runtime::new(arguments)?;
    let setup = Setup {
        chips,
        depth: arguments.depth,
        iterations: if arguments.stale { arguments.iterations.max(2) } else { arguments.iterations },
        mapping: arguments.granularity.map_or(Mapping::Exact, Mapping::from),
        memory: Memory::default(),
    };
    let modes: &[Mode] = if arguments.stale { &[Mode::Stale] } else { &Mode::CORRECT };
    let required = shared_memory::required(&plans, modes, &setup);
    let free = shared_memory::check(required)?;
    introduce(&plans, &setup, &runtime, required, free);

    let mut reports = Vec::new();
    for &mode in modes {
        reports.extend(measure_with_progress(&plans, mode, &setup, &runtime)?);
    }
    let names: Vec<&str> = plans.iter().map(|plan| plan.name.as_str()).collect();
    print!("\n{}", report::tables(&names, &reports));
    if let Some(path) = &arguments.json {
        let text = format!("{:#}\n", report::to_json(&reports, &setup, &runtime));
        fs::write(path, text).map_err(|source| Failure::Report { path: path.clone(), source })?;
    }
    Ok(if arguments.stale { judge_stale(&reports, &runtime) } else { judge(&reports, &runtime) })
}

/// No option is without effect.
fn check_options(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.granularity.is_some() && arguments.backend != BackendName::Emulator {
        return Err(Failure::Option { option: "--granularity", backend: "emulator" });
    }
    if arguments.kernels.is_some() && arguments.backend != BackendName::Simpler {
        return Err(Failure::Option { option: "--kernels", backend: "simpler" });
    }
    Ok(())
}

fn load(arguments: &Arguments) -> Result<Fixture, Failure> {
    let (file, read) = match &arguments.fixtures {
        Some(path) => (path.display().to_string(), Fixture::read(path)),
        None => ("production requests".to_owned(), Fixture::parse(PRODUCTION.as_bytes())),
    };
    read.map_err(|source| Failure::Fixture { file, source })
}

/// The smallest world size: signals are sized for it, and more chips may not fit.
fn default_chips(selected: &[&ProgramFixture]) -> u32 {
    selected.iter().map(|p| p.world_size).min().unwrap_or(1)
}

fn introduce(plans: &[Arc<ProgramPlan>], setup: &Setup, runtime: &Runtime, required: u64, free: u64) {
    for plan in plans {
        let window: u64 = plan.domains.iter().map(|d| d.request.window_bytes).sum();
        println!(
            "{}: {} domain(s), {} exchange(s), {} a chip",
            plan.name,
            plan.domains.len(),
            plan.exchanges.len(),
            report::bytes(window)
        );
    }
    println!(
        "one worker of {} program(s) on {} chip(s) of {}, {} request(s) of each, depth {}; needs {} of shared memory, \
         {} free",
        plans.len(),
        setup.chips,
        runtime,
        setup.iterations,
        setup.depth,
        report::bytes(required),
        report::bytes(free)
    );
    if needs_ranges(plans) && matches!(runtime, Runtime::Emulator) {
        println!(
            "note: some window has bytes that no buffer covers; the emulator copies byte ranges, to reset them"
        );
    }
    for note in plans.iter().flat_map(|plan| &plan.notes) {
        println!("note: {note}");
    }
}

fn measure_with_progress(
    plans: &[Arc<ProgramPlan>],
    mode: Mode,
    setup: &Setup,
    runtime: &Runtime,
) -> Result<Vec<ProgramReport>, Failure> {
    let requests = u64::from(setup.iterations).saturating_mul(plans.len() as u64);
    let bar = ProgressBar::new(requests).with_message(mode.to_string());
    if let Ok(style) = ProgressStyle::with_template("{msg:20} [{bar:40}] {pos}/{len} {elapsed}") {
        bar.set_style(style.progress_chars("=> "));
    }
    let measured = measure(plans, mode, setup, &|| runtime.backend(plans, setup), &mut || bar.inc(1));
    // Where nobody watches, the bar draws nothing; say at least that the mode is over.
    if bar.is_hidden() {
        eprintln!("{:20} [{}] {}/{requests}", mode.to_string(), "=".repeat(40), bar.position());
    }
    bar.finish();
    measured.map_err(|source| Failure::Measurement { mode, source })
}

/// Whether everything was right.
fn judge(reports: &[ProgramReport], runtime: &Runtime) -> bool {
    println!("{}", report::conclusion(reports, runtime));
    let mut right = true;
    for report in reports {
        if let Some(first) = report.first_mismatch() {
            right = false;
            eprintln!("error: wrong result in mode `{}`: {first}", report.mode);
        }
    }
    right
}

/// Whether stale state was wrong wherever it could be: in every request of a program but its first.
fn judge_stale(reports: &[ProgramReport], runtime: &Runtime) -> bool {
    let mut broke = true;
    for report in reports {
        let (first, later) = report.verdicts.split_at(report.verdicts.len().min(1));
        let wrong = later.iter().filter(|v| v.mismatches > 0).count();
        let fresh_right = first.iter().all(|v| v.mismatches == 0);
        println!(
            "{}: the first request, on fresh windows, was {}; {wrong} of {} later requests were wrong",
            report.program,
            if fresh_right { "right" } else { "wrong" },
            later.len()
        );
        if let Some(example) = report.first_mismatch() {
            println!("  for example {example}");
        }
        broke &= fresh_right && wrong == later.len() && wrong > 0;
    }
    if broke {
        println!("on {runtime}, stale state broke every program, as it must: reset windows, or count epochs");
    } else {
        eprintln!("error: stale state did not break every later request");
    }
    broke
}
