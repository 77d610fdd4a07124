//! Random workers: what they are prepared from, and the program that every one of them runs.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use proptest::prelude::*;
use pto_dispatch::{Args, Build, Options, Parameter, Program, ProgramResult, ProgramSpec, Staging};
use pto_simpler_sys::{CallableSpec, ChipId, CopyGranularity, DomainRequest, NamedBuffer, RunId, Signature};

use crate::{Completion, Emulator, EmulatorBuilder, Kernel, KernelError, Mapping, Memory};

/// How a backend under test zeroes windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeroing {
    /// Whole named buffers only.
    WholeBuffer,
    /// Any range.
    ByteRange,
    /// The device by itself.
    DeviceFill,
}

/// A worker, its programs and its backend, as plain data.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Number of chips.
    pub chips: u32,
    /// The domains of each program, named `d0`, `d1`, ...
    pub programs: Vec<Vec<DomainRequest>>,
    /// Persistent mode.
    pub persistent: bool,
    /// Reset, where persistent.
    pub reset: bool,
    /// Whether zero buffers are kept between dispatches.
    pub retained_staging: bool,
    /// Depth of the backend.
    pub depth: u32,
    /// How the backend zeroes.
    pub zeroing: Zeroing,
    /// Whether mappings are larger than requests.
    pub padded: bool,
    /// Whether host buffers and fresh windows arrive dirty.
    pub dirty: bool,
    /// Whether a failed task ends the worker.
    pub failed_task_is_final: bool,
}

impl Shape {
    /// The name of a domain.
    #[must_use]
    pub fn domain_name(index: usize) -> String {
        format!("d{index}")
    }

    /// The name that the backend sees.
    #[must_use]
    pub fn backend_name(&self, program: usize, domain: usize) -> String {
        if self.persistent { format!("p{program}:d{domain}") } else { format!("d{domain}") }
    }

    /// Whether dispatches of retained domains zero them.
    #[must_use]
    pub fn resets(&self) -> bool {
        self.persistent && self.reset
    }

    /// The options to prepare with.
    pub fn options(&self) -> Options {
        if !self.persistent {
            return Options::ordinary();
        }
        let staging =
            if self.retained_staging { Staging::Retained { cap_bytes: 1 << 20 } } else { Staging::PerDispatch };
        Options::persistent().reset(self.reset).staging(staging)
    }

    /// The emulator, with runs held until a test lets them go.
    #[must_use]
    pub fn emulator(&self) -> EmulatorBuilder {
        let granularity = match self.zeroing {
            Zeroing::WholeBuffer => CopyGranularity::WholeBuffer,
            Zeroing::ByteRange | Zeroing::DeviceFill => CopyGranularity::ByteRange,
        };
        Emulator::builder()
            .chips(self.chips)
            .depth(self.depth)
            .copy_granularity(granularity)
            .device_fill(self.zeroing == Zeroing::DeviceFill)
            .mapping(if self.padded { Mapping::Pages4K } else { Mapping::Exact })
            .dirty_host_buffers(self.dirty)
            .dirty_windows(self.dirty)
            .failed_task_is_final(self.failed_task_is_final)
            .completion(Completion::ByHand)
            .memory(Memory::Heap)
    }
}

fn request(chips: u32) -> impl Strategy<Value = DomainRequest> {
    let workers = Just((0..chips).collect::<Vec<u32>>()).prop_shuffle();
    let buffers = proptest::collection::vec(prop_oneof![3 => 1u64..64, 1 => Just(16u64), 1 => Just(64u64)], 1..4);
    (workers, 1..=chips as usize, buffers, prop_oneof![4 => Just(0u64), 1 => 1u64..24]).prop_map(
        |(workers, members, sizes, slack)| {
            let buffers: Vec<NamedBuffer> = sizes
                .iter()
                .enumerate()
                .map(|(index, nbytes)| NamedBuffer::bytes(format!("b{index}"), *nbytes))
                .collect();
            let mut request = DomainRequest::packed(workers.into_iter().take(members), buffers);
            request.window_bytes += slack;
            request
        },
    )
}

/// Workers of all kinds.
pub fn shapes() -> impl Strategy<Value = Shape> {
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let zeroing = prop_oneof![
        2 => Just(Zeroing::WholeBuffer),
        1 => Just(Zeroing::ByteRange),
        1 => Just(Zeroing::DeviceFill),
    ];
    (1u32..4, 1u32..3, zeroing, flags).prop_flat_map(|(chips, depth, zeroing, flags)| {
        let programs = proptest::collection::vec(proptest::collection::vec(request(chips), 1..3), 1..3);
        programs.prop_map(move |programs| {
            let (ordinary, keep, retained_staging, padded, dirty, failed_task_is_final) = flags;
            Shape {
                chips,
                programs,
                // Persistent workers are what this is about: three in four.
                persistent: !(ordinary && keep),
                reset: ordinary || padded,
                retained_staging,
                depth,
                zeroing,
                padded,
                dirty,
                failed_task_is_final,
            }
        })
    })
}

/// What the program does in one dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Leases, tasks, Ok.
    Normal,
    /// Fails before it asks for anything.
    FailFirst,
    /// Fails after all leases and tasks.
    FailLast,
    /// Panics before it asks for anything.
    PanicFirst,
    /// Panics after all leases and tasks.
    PanicLast,
    /// Asks for its first domain with another request.
    ChangeRequest,
}

/// Windows as the first task of a run found them, by run, chip and position of the domain in its program.
pub(super) type Seen = Arc<Mutex<BTreeMap<(RunId, ChipId, u64), Vec<u8>>>>;

/// Epochs of leases as builders found them, by run and position of the domain in its program.
pub(super) type Epochs = Arc<Mutex<BTreeMap<(u64, usize), u64>>>;

/// The byte that run `run` writes all over the window of `chip`.
pub(super) fn pattern(run: u64, chip: u32) -> u8 {
    let mixed = run.wrapping_mul(37).wrapping_add(u64::from(chip) * 11);
    (mixed % 254) as u8 + 1
}

/// The error of a program that was told to fail.
#[derive(Debug, thiserror::Error)]
#[error("told to fail")]
pub(super) struct ToldToFail;

/// The panic message of a program that was told to panic.
pub(super) const TOLD_TO_PANIC: &str = "told to panic";

/// Unwinds as a panic does, without the message on stderr that thousands of cases would repeat.
fn panic_quietly() -> ! {
    std::panic::resume_unwind(Box::new(TOLD_TO_PANIC))
}

/// A program that leases the domains it is told to and has every member record and then overwrite its window.
#[derive(Debug)]
pub(super) struct Toucher {
    spec: ProgramSpec,
    domains: Vec<DomainRequest>,
    epochs: Epochs,
}

const TOUCH: &str = "lifecycle_touch";

impl Toucher {
    pub(super) fn new(index: usize, domains: Vec<DomainRequest>, epochs: Epochs) -> Self {
        let spec = ProgramSpec::new(format!("program{index}"))
            .callable(CallableSpec::chip(TOUCH, Signature::new([], 2)))
            .parameter(Parameter::scalar("leases"))
            .parameter(Parameter::scalar("act"));
        Self { spec, domains, epochs }
    }

    /// Installs the kernel that this program runs; what it finds goes to `seen`.
    pub(super) fn install(builder: EmulatorBuilder, seen: Seen) -> EmulatorBuilder {
        builder.kernel(TOUCH, Signature::new([], 2), move |kernel: &Kernel<'_>| -> Result<(), KernelError> {
            let context = kernel.scalar(0)?;
            let domain = kernel.domain(context)?;
            let window = domain.window(domain.rank())?;
            seen.lock().entry((kernel.run(), kernel.chip(), kernel.scalar(1)?)).or_insert(window.to_vec()?);
            window.fill(0, window.len(), pattern(kernel.run().0, kernel.chip().0))
        })
    }

    /// The arguments that make it lease the domains in `leases` and then do `act`.
    pub(super) fn args(leases: &[usize], act: Act) -> Args {
        let mask = leases.iter().fold(0u64, |mask, domain| mask | 1 << domain);
        Args::new().scalar(mask).scalar(act as u64)
    }
}

impl Program for Toucher {
    fn spec(&self) -> &ProgramSpec {
        &self.spec
    }

    fn build<'b>(&self, build: &Build<'b>, args: &Args) -> ProgramResult {
        let (mask, act) = (args.scalar_at(0)?, args.scalar_at(1)?);
        let is = |other: Act| act == other as u64;
        if is(Act::FailFirst) {
            return Err(ToldToFail.into());
        }
        if is(Act::PanicFirst) {
            panic_quietly();
        }
        let mut leases = Vec::new();
        for (index, request) in self.domains.iter().enumerate().filter(|(index, _)| mask >> index & 1 == 1) {
            if is(Act::ChangeRequest) {
                let mut changed = request.clone();
                changed.window_bytes += 8;
                build.lease(&Shape::domain_name(index), &changed)?;
            }
            let lease = build.lease(&Shape::domain_name(index), request)?;
            self.epochs.lock().insert((build.dispatch().get(), index), lease.epoch());
            leases.push((index, request, lease));
        }
        for (index, request, lease) in &leases {
            for chip in &request.workers {
                build.task(0)?.scalar(lease.device_context(*chip)?).scalar(*index as u64).submit(*chip)?;
            }
        }
        if is(Act::FailLast) {
            return Err(ToldToFail.into());
        }
        if is(Act::PanicLast) {
            panic_quietly();
        }
        Ok(())
    }
}
