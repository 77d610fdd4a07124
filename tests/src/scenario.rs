//! The fixtures that scenarios name, as programs.
//!
//! | fixture | programs | domains |
//! |---|---|---|
//! | F0 | one | none; one task |
//! | F1 | one, ranks \[0, 1\] | `comm_d0`: window 64 B, buffer `signal` of 64 B; each dispatch adds 1 to every word |
//! | F1n | F1 persistent, reset off, warm | |
//! | F2 | as F1 | window 1,048,593 B, buffers of 1,048,576 B and 17 B; each dispatch writes into both |
//! | F3 | `prefill` and `decode` | both `comm_d0`, of 64 B and 128 B |
//! | H | one | the two-rank handshake over `comm_d0` |
//!
//! All kernels are the portable ones, so the fixtures run on any backend that has them.

use std::fmt;
use std::sync::Arc;

use pto_dispatch::{
    Args, Build, HostBuffer, Lease, Parameter, PreparedWorker, Program, ProgramResult, ProgramSpec,
};
use pto_mock::kernels;
use pto_simpler_sys::{Access, CallableSpec, ChipId, DataType, DomainRequest, NamedBuffer};

/// The domain name of every fixture.
pub const DOMAIN: &str = "comm_d0";

/// What [`FnProgram`] calls.
type Builder = dyn for<'b> Fn(&Build<'b>, &Args) -> ProgramResult + Send + Sync;

/// A program over a closure.
pub struct FnProgram {
    spec: ProgramSpec,
    build: Box<Builder>,
}

impl fmt::Debug for FnProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FnProgram").field(&self.spec.name).finish()
    }
}

impl Program for FnProgram {
    fn spec(&self) -> &ProgramSpec {
        &self.spec
    }

    fn build<'b>(&self, build: &Build<'b>, args: &Args) -> ProgramResult {
        (self.build)(build, args)
    }
}

/// A program that declares `spec` and builds with `build`.
pub fn program(
    spec: ProgramSpec,
    build: impl for<'b> Fn(&Build<'b>, &Args) -> ProgramResult + Send + Sync + 'static,
) -> Arc<dyn Program> {
    Arc::new(FnProgram { spec, build: Box::new(build) })
}

fn chip(name: &str) -> CallableSpec {
    CallableSpec::chip(name, kernels::signature(name))
}

/// Element i of an OUTPUT i32 tensor becomes v + i.
#[must_use]
pub fn store() -> CallableSpec {
    chip(kernels::STORE)
}

/// Adds v to each element of an INOUT i32 tensor.
#[must_use]
pub fn add() -> CallableSpec {
    chip(kernels::ADD)
}

/// Rank r adds r + 1 to the cell of every other rank. Tensor: the signal buffer; scalars: context, offset.
#[must_use]
pub fn signal() -> CallableSpec {
    chip(kernels::SIGNAL)
}

/// Waits until the own cell is at least the threshold and stores it. Scalars: context, offset, threshold.
#[must_use]
pub fn await_cell() -> CallableSpec {
    chip(kernels::AWAIT)
}

/// Reads n elements of a rank's window. Scalars: context, rank, offset.
#[must_use]
pub fn peek() -> CallableSpec {
    chip(kernels::PEEK)
}

/// Fails with the given code.
#[must_use]
pub fn fail() -> CallableSpec {
    chip(kernels::FAIL)
}

/// A request over the ranks [0, 1] with one buffer `signal` that fills the window.
#[must_use]
pub fn signal_request(window_bytes: u64) -> DomainRequest {
    DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("signal", window_bytes)])
}

/// F2's request.
#[must_use]
pub fn f2_request() -> DomainRequest {
    let buffers = vec![NamedBuffer::bytes("payload", 1_048_576), NamedBuffer::bytes("tail", 17)];
    DomainRequest::packed([0, 1], buffers)
}

/// F0: no domains; one task on chip 0.
#[must_use]
pub fn f0() -> Arc<dyn Program> {
    program(ProgramSpec::new("f0").callable(store()), |build, _| {
        let scratch = build.scratch(64)?;
        let out = build.tensor(scratch, &[16], DataType::Int32, Access::Output)?;
        Ok(build.task(0)?.tensor(out).scalar(1).submit(ChipId(0))?)
    })
}

/// A program that leases `comm_d0` as [`signal_request`] has it and adds 1 to every word of every member.
#[must_use]
pub fn signal_program(name: &str, window_bytes: u64) -> Arc<dyn Program> {
    let request = signal_request(window_bytes);
    program(ProgramSpec::new(name).callable(add()), move |build, _| {
        let lease = build.lease(DOMAIN, &request)?;
        add_one(build, &lease, "signal")
    })
}

/// Adds 1 to every word of buffer `name` on every member, with callable 0.
///
/// # Errors
///
/// What the build returns.
pub fn add_one<'b>(build: &Build<'b>, lease: &Lease<'b>, name: &str) -> ProgramResult {
    for chip in &lease.request().workers {
        let buffer = lease.buffer(*chip, name)?;
        let words = u32::try_from(buffer.nbytes() / 4)?;
        let tensor = build.tensor(&buffer, &[words], DataType::Int32, Access::InOut)?;
        build.task(0)?.tensor(tensor).scalar(1).submit(*chip)?;
    }
    Ok(())
}

/// F1.
#[must_use]
pub fn f1() -> Arc<dyn Program> {
    signal_program("f1", 64)
}

/// F2: writes into both buffers of both members.
#[must_use]
pub fn f2() -> Arc<dyn Program> {
    let request = f2_request();
    program(ProgramSpec::new("f2").callable(add()), move |build, _| {
        let lease = build.lease(DOMAIN, &request)?;
        add_one(build, &lease, "payload")?;
        add_one(build, &lease, "tail")
    })
}

/// F3: `prefill` and `decode`.
#[must_use]
pub fn f3() -> [Arc<dyn Program>; 2] {
    [signal_program("prefill", 64), signal_program("decode", 128)]
}

/// H over `comm_d0`: takes one 4-byte host buffer per rank, `out0` and `out1`. Adding and reading are two steps; the
/// second is a group, which starts on both ranks together and thus after both additions.
#[must_use]
pub fn h() -> Arc<dyn Program> {
    program(h_spec("h"), |build, args| {
        let lease = build.lease(DOMAIN, &signal_request(64))?;
        h_signal(build, &lease, args, 0)?;
        h_await(build, &lease, args, 0, 1)
    })
}

/// What H declares.
#[must_use]
pub fn h_spec(name: &str) -> ProgramSpec {
    let spec = ProgramSpec::new(name).callable(signal()).callable(await_cell());
    spec.parameter(Parameter::host("out0", 4)).parameter(Parameter::host("out1", 4))
}

/// The first step of H, with callable 0. Its tasks name the cells that the second step writes, argument `first_out` + r
/// on rank r: that is what makes the second step wait for them where a runtime orders tasks by their tensors.
///
/// # Errors
///
/// What the build returns.
pub fn h_signal<'b>(build: &Build<'b>, lease: &Lease<'b>, args: &Args, first_out: usize) -> ProgramResult {
    for (rank, chip) in lease.request().workers.iter().enumerate() {
        let tensor = build.tensor(args.host_at(first_out + rank)?, &[1], DataType::Int32, Access::InOut)?;
        let context = lease.device_context(*chip)?;
        build.task(0)?.tensor(tensor).scalar(context).scalar(0).submit(*chip)?;
    }
    Ok(())
}

/// The second step of H, with callable 1: rank r waits for `threshold` and writes into argument `first_out` + r.
///
/// # Errors
///
/// What the build returns.
pub fn h_await<'b>(
    build: &Build<'b>,
    lease: &Lease<'b>,
    args: &Args,
    first_out: usize,
    threshold: u64,
) -> ProgramResult {
    let mut group = build.group(1)?;
    for (rank, chip) in lease.request().workers.iter().enumerate() {
        // Read as well as written, so that it waits for the first step's tasks, which name the same cells.
        let out = build.tensor(args.host_at(first_out + rank)?, &[1], DataType::Int32, Access::InOut)?;
        let context = lease.device_context(*chip)?;
        group = group.member(*chip).tensor(out).scalar(context).scalar(0).scalar(threshold);
    }
    Ok(group.submit()?)
}

/// Host buffers of 4 bytes that programs write results into.
#[derive(Debug)]
pub struct Cells {
    buffers: Vec<HostBuffer>,
}

impl Cells {
    /// `count` cells, all zero.
    #[must_use]
    pub fn new(worker: &PreparedWorker, count: usize) -> Self {
        Self { buffers: (0..count).map(|_| worker.create_buffer(4).unwrap()).collect() }
    }

    /// The cells as arguments, in order.
    #[must_use]
    pub fn args(&self) -> Args {
        self.buffers.iter().fold(Args::new(), |args, buffer| args.host(buffer))
    }

    /// What is in them now.
    #[must_use]
    pub fn values(&self) -> Vec<i32> {
        self.buffers
            .iter()
            .map(|buffer| {
                let mut bytes = [0; 4];
                buffer.read(0, &mut bytes).unwrap();
                i32::from_ne_bytes(bytes)
            })
            .collect()
    }
}
