//! The command line.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use pto_mock::Mapping;

/// Dispatches production programs over emulated or real chips in three ways, checks every result, and compares the cost.
///
/// Exit codes: 0 all right; 1 a wrong result, or the run failed; 2 wrong usage, or the fixture file cannot be used.
#[derive(Debug, Parser)]
#[command(name = "production_decode")]
pub(crate) struct Arguments {
    /// A program (`model/program`), or a model: its prefill_fwd and decode_fwd where it has both, else all of its
    /// programs. May be given several times; all programs become one worker. Default: the model of the file that
    /// has prefill_fwd and decode_fwd, else every program of the file.
    #[arg(long, value_name = "NAME")]
    pub(crate) program: Vec<String>,

    /// Chips; every domain spans all of them, at its own size. Default: the world size in the file.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) chips: Option<u32>,

    /// Requests of each program in each mode.
    #[arg(long, value_name = "K", default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) iterations: u32,

    /// Where it runs. `simpler` and `standin` need a build with `--features simpler`.
    #[arg(long, value_name = "B", value_enum, default_value_t = BackendName::Emulator)]
    pub(crate) backend: BackendName,

    /// Requests that are kept in flight, and runs that the emulator overlaps.
    #[arg(long, value_name = "D", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    pub(crate) depth: u32,

    /// How the emulator maps windows: exactly (the default), or rounded up to 4 KiB or 2 MiB.
    #[arg(long, value_name = "G", value_enum)]
    pub(crate) granularity: Option<Granularity>,

    /// Directory of kernels that `tests/kernels/build.py` has compiled. Default: they are compiled now, by the Python of
    /// the active virtual environment. For `--backend simpler`.
    #[arg(long, value_name = "DIR")]
    pub(crate) kernels: Option<PathBuf>,

    /// Domain requests in the fixture form. Default: the production requests of this project.
    #[arg(long, value_name = "FILE")]
    pub(crate) fixtures: Option<PathBuf>,

    /// Writes the measurements to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// Shows that stale state is wrong: keeps domains without reset and without epochs, and succeeds only if every
    /// request after the first was wrong.
    #[arg(long)]
    pub(crate) stale: bool,
}

/// The spellings of `--backend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendName {
    /// The embedded emulator.
    Emulator,
    /// The installed Simpler; the platform is that of `PTO_PLATFORM` (default a2a3sim).
    Simpler,
    /// This project's Python stand-in for Simpler, which is slow.
    Standin,
}

/// The spellings of `--granularity`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Granularity {
    /// Exactly what was asked for.
    Exact,
    /// Multiples of 4 KiB.
    #[value(name = "4k")]
    Pages4K,
    /// Multiples of 2 MiB.
    #[value(name = "2m")]
    Huge2M,
}

impl From<Granularity> for Mapping {
    fn from(granularity: Granularity) -> Self {
        match granularity {
            Granularity::Exact => Self::Exact,
            Granularity::Pages4K => Self::Pages4K,
            Granularity::Huge2M => Self::Huge2M,
        }
    }
}
