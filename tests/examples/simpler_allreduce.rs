//! A real all-reduce over two simulated chips: persistent execution against domains per request.
//!
//! ```text
//! cargo run --release -p pto-tests --features simpler --example simpler_allreduce -- --backend simpler
//! ```
//!
//! Options: `--backend emulator|simpler|standin` (default `simpler`), `--iterations N` (default 100), `--words N`
//! (default 1024), `--host-time` (also tell which share of `submit` is the runtime's own; not on the emulator, which
//! is no layer below ours but all there is). The environment variables of `pto_tests::simpler` apply; with a Simpler that lacks the public
//! retention call, set `PTO_RETENTION=legacy`. Every rank's result is checked element by element in every dispatch;
//! any mismatch makes the exit code non-zero.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pto_dispatch::{
    Args, Build, HostBuffer, Options, Parameter, PreparedWorker, Program, ProgramResult, ProgramSpec, ProgramStats,
};
use pto_mock::Emulator;
use pto_simpler_sys::python::SimplerBackend;
use pto_simpler_sys::{Access, Backend, CallableSpec, DataType, DomainRequest, NamedBuffer, Retention, Signature};
use pto_tests::simpler::{self, Runtime};
use pyo3::prelude::*;

const CHIPS: u32 = 2;
const ARRIVALS_BYTES: u64 = 64;
const NAME: &str = "allreduce_from";

fn signature() -> Signature {
    Signature::new([Access::Input, Access::Output], 4)
}

/// Sums one vector per chip through a window: a payload, and a cell that counts the ranks that have published.
struct AllReduce {
    spec: ProgramSpec,
    request: DomainRequest,
    words: u32,
}

impl AllReduce {
    fn new(words: u32) -> Self {
        let bytes = u64::from(words) * 4;
        let mut spec = ProgramSpec::new(NAME).callable(CallableSpec::chip(NAME, signature()));
        for side in ["in", "out"] {
            for chip in 0..CHIPS {
                spec = spec.parameter(Parameter::host(format!("{side}{chip}"), bytes));
            }
        }
        let buffers = vec![NamedBuffer::bytes("payload", bytes), NamedBuffer::bytes("arrivals", ARRIVALS_BYTES)];
        Self { spec, request: DomainRequest::packed(0..CHIPS, buffers), words }
    }
}

impl Program for AllReduce {
    fn spec(&self) -> &ProgramSpec {
        &self.spec
    }

    fn build<'b>(&self, build: &Build<'b>, args: &Args) -> ProgramResult {
        let lease = build.lease("ring", &self.request)?;
        // A kept window goes on counting from what earlier dispatches have left; a zeroed or new one starts again.
        let kept = build.is_persistent() && !build.is_resetting();
        let before = if kept { (lease.epoch() - 1) * u64::from(CHIPS) } else { 0 };
        for (rank, chip) in self.request.workers.iter().enumerate() {
            let host = |index: usize, access| {
                let buffer = args.host_at(index)?;
                build.tensor(buffer, &[self.words], DataType::Int32, access)
            };
            build
                .task(0)?
                .tensor(host(rank, Access::Input)?)
                .tensor(host(CHIPS as usize + rank, Access::OutputExisting)?)
                .scalar(0)
                .scalar(self.request.buffers[0].nbytes)
                .scalar(lease.device_context(*chip)?)
                .scalar(before)
                .submit(*chip)?;
        }
        Ok(())
    }
}

/// The same kernel for the emulator.
fn emulator() -> Result<Arc<dyn Backend>, Box<dyn Error>> {
    let builder = Emulator::builder().chips(CHIPS).kernel(NAME, signature(), |kernel| {
        let (input, output) = (kernel.tensor(0)?, kernel.tensor(1)?);
        let (payload, arrivals) = (kernel.scalar(0)?, kernel.scalar(1)?);
        let domain = kernel.domain(kernel.scalar(2)?)?;
        let mine = domain.window(domain.rank())?;
        mine.store(payload, &input.to_vec()?)?;
        for rank in 0..domain.size() {
            domain.window(rank)?.cell(arrivals)?.fetch_add(1)?;
        }
        let all = kernel.scalar(3)? as i32 + domain.size() as i32;
        mine.cell(arrivals)?.wait(|arrived| arrived >= all)?;
        let mut sums = vec![0i32; (output.len() / 4) as usize];
        let mut part = vec![0; output.len() as usize];
        for rank in 0..domain.size() {
            domain.window(rank)?.load(payload, &mut part)?;
            for (sum, word) in sums.iter_mut().zip(words(&part)) {
                *sum = sum.wrapping_add(word);
            }
        }
        output.store(0, &bytes(&sums))
    });
    Ok(builder.build()?)
}

fn words(bytes: &[u8]) -> impl Iterator<Item = i32> + '_ {
    bytes.chunks_exact(4).map(|w| i32::from_le_bytes([w[0], w[1], w[2], w[3]]))
}

fn bytes(words: &[i32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn make(backend: &str) -> Result<Arc<dyn Backend>, Box<dyn Error>> {
    let runtime = match backend {
        "emulator" => return emulator(),
        "simpler" => Runtime::Simpler,
        "standin" => Runtime::StandIn,
        other => return Err(format!("unknown backend {other:?}; permitted: emulator, simpler, standin").into()),
    };
    let backend = SimplerBackend::new(simpler::options(runtime, CHIPS, 0))?;
    if let Retention::Unsupported { missing } = &backend.capabilities().retention {
        return Err(format!("this runtime has no {missing}; set PTO_RETENTION=legacy").into());
    }
    Ok(Arc::new(backend))
}

/// Wraps the runtime's calls on the path of a dispatch with a clock, before a backend resolves them.
fn time_runtime(runtime: Runtime) -> Result<(), Box<dyn Error>> {
    // Starts the interpreter and runs the prelude.
    drop(SimplerBackend::new(simpler::options(runtime, CHIPS, 0))?);
    Python::attach(|py| py.import("pto_preludes")?.call_method0("time_runtime").map(drop))?;
    Ok(())
}

/// The host time that has been spent inside the runtime since the last call.
fn spent_in_runtime() -> Result<Duration, Box<dyn Error>> {
    let seconds: f64 = Python::attach(|py| py.import("pto_preludes")?.call_method0("take")?.extract())?;
    Ok(Duration::from_secs_f64(seconds.max(0.0)))
}

struct Row {
    mode: &'static str,
    stats: ProgramStats,
    submit: Vec<Duration>,
    total: Vec<Duration>,
    /// Of each submit, what was not spent in the runtime.
    ours: Vec<Duration>,
    mismatches: u64,
}

fn measure(
    backend: &str,
    host_time: bool,
    mode: &'static str,
    options: &Options,
    size: u32,
    iterations: u32,
) -> Result<Row, Box<dyn Error>> {
    let program: Arc<dyn Program> = Arc::new(AllReduce::new(size));
    let worker = PreparedWorker::prepare(&[program], options, make(backend)?)?;
    let id = worker.only()?;
    let nbytes = u64::from(size) * 4;
    let buffers: Vec<HostBuffer> =
        (0..2 * CHIPS).map(|_| worker.create_buffer(nbytes)).collect::<Result<_, _>>()?;
    let mut args = Args::new();
    for buffer in &buffers {
        args = args.host(buffer);
    }
    let (inputs, outputs) = buffers.split_at(CHIPS as usize);
    let mut row = Row {
        mode,
        stats: ProgramStats::default(),
        submit: Vec::new(),
        total: Vec::new(),
        ours: Vec::new(),
        mismatches: 0,
    };
    for iteration in 0..iterations {
        let mut expected = vec![0i32; size as usize];
        for (rank, buffer) in inputs.iter().enumerate() {
            let part: Vec<i32> = (0..size as i32)
                .map(|i| i.wrapping_mul(rank as i32 + 3).wrapping_add(iteration as i32 * 7))
                .collect();
            for (sum, word) in expected.iter_mut().zip(&part) {
                *sum = sum.wrapping_add(*word);
            }
            buffer.write(0, &bytes(&part))?;
        }
        if host_time {
            spent_in_runtime()?;
        }
        let start = Instant::now();
        let dispatch = worker.submit(id, &args)?;
        let submit = start.elapsed();
        row.submit.push(submit);
        if host_time {
            row.ours.push(submit.saturating_sub(spent_in_runtime()?));
        }
        dispatch.wait()?;
        row.total.push(start.elapsed());
        let mut found = vec![0; nbytes as usize];
        for buffer in outputs {
            buffer.read(0, &mut found)?;
            row.mismatches += words(&found).zip(&expected).filter(|(a, b)| a != *b).count() as u64;
        }
        if iteration % 10 == 9 || iteration + 1 == iterations {
            eprint!("\r{mode}: {}/{iterations}", iteration + 1);
        }
    }
    eprintln!();
    row.stats = worker.stats(id)?;
    worker.close()?;
    row.submit.sort();
    row.total.sort();
    row.ours.sort();
    Ok(row)
}

fn percentile(sorted: &[Duration], p: usize) -> f64 {
    sorted.get((sorted.len() * p / 100).min(sorted.len().saturating_sub(1))).map_or(0.0, |d| d.as_secs_f64() * 1e3)
}

/// The table of `production_decode`.
fn table(rows: &[Row]) -> String {
    const HEAD: [&str; 9] = [
        "mode",
        "dispatches",
        "allocations",
        "reuses",
        "bytes zeroed",
        "peak staging",
        "submit p50/p99 ms",
        "total p50/p99 ms",
        "mismatches",
    ];
    let times = |sorted: &[Duration]| format!("{:.2} / {:.2}", percentile(sorted, 50), percentile(sorted, 99));
    let mut lines = vec![HEAD.map(str::to_owned)];
    lines.extend(rows.iter().map(|row| {
        [
            row.mode.to_owned(),
            row.stats.dispatches.to_string(),
            row.stats.allocations.to_string(),
            row.stats.reuses.to_string(),
            row.stats.zeroed_bytes.to_string(),
            row.stats.peak_staging_bytes.to_string(),
            times(&row.submit),
            times(&row.total),
            row.mismatches.to_string(),
        ]
    }));
    let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
    let cell = |(column, text): (usize, &String)| match column {
        0 => format!("{text:<w$}", w = width(column)),
        _ => format!("{text:>w$}", w = width(column)),
    };
    lines.iter().map(|line| line.iter().enumerate().map(cell).collect::<Vec<_>>().join("  ") + "\n").collect()
}

const USAGE: &str = "\
options:
  --backend emulator|simpler|standin   where it runs (default: simpler)
  --iterations N                       dispatches in each mode (default: 100)
  --words N                            32-bit words that each rank brings (default: 1024)
  --host-time                          also tell which share of submit is the runtime's own (not on the emulator)
environment: PTO_PLATFORM, PTO_RETENTION, PTO_PYTHON_PRELUDE, PTO_PYTHON_PATH, PTO_KERNELS (see pto_tests::simpler)";

fn run() -> Result<bool, Box<dyn Error>> {
    let mut backend = "simpler".to_owned();
    let (mut iterations, mut size, mut host_time) = (100, 1024, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(option) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{option} needs a value"));
        match &*option {
            "--backend" => backend = value()?,
            "--iterations" => iterations = value()?.parse()?,
            "--words" => size = value()?.parse()?,
            "--host-time" => host_time = true,
            "--help" | "-h" => {
                println!("{USAGE}");
                return Ok(true);
            }
            _ => return Err(format!("unknown option {option:?}\n{USAGE}").into()),
        }
    }
    if iterations == 0 || size == 0 {
        return Err("--iterations and --words take at least 1".into());
    }
    if host_time {
        match &*backend {
            "simpler" => time_runtime(Runtime::Simpler)?,
            "standin" => time_runtime(Runtime::StandIn)?,
            _ => return Err("--host-time needs --backend simpler or standin".into()),
        }
    }
    let rows = [
        measure(&backend, host_time, "domains per request", &Options::ordinary(), size, iterations)?,
        measure(&backend, host_time, "persistent, reset", &Options::persistent(), size, iterations)?,
        measure(&backend, host_time, "persistent, epochs", &Options::persistent().reset(false), size, iterations)?,
    ];
    print!("{}", table(&rows));
    for row in rows.iter().filter(|row| !row.ours.is_empty()) {
        println!(
            "{}: of submit, {:.3} ms are spent above the runtime (p50; p10 {:.3}, p90 {:.3})",
            row.mode,
            percentile(&row.ours, 50),
            percentile(&row.ours, 10),
            percentile(&row.ours, 90)
        );
    }
    let base = percentile(&rows[0].total, 50).max(f64::MIN_POSITIVE);
    println!(
        "on {backend}, domains per request : persistent with reset : persistent with epochs = 1 : {:.2} : {:.2} (median \
         total of a dispatch)",
        percentile(&rows[1].total, 50) / base,
        percentile(&rows[2].total, 50) / base
    );
    Ok(rows.iter().all(|row| row.mismatches == 0))
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("results were wrong");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
