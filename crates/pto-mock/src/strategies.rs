//! proptest strategies for the plain values of the hardware-abstraction layer: requests, faults, task arguments.
//!
//! Valid values are valid by construction and shrink towards small ones. Each invalid value comes with its flaw, so
//! that a property can say which refusal it expects.
//!
//! ```
//! use proptest::prelude::*;
//! use pto_mock::strategies;
//!
//! proptest!(|(request in strategies::request(4))| {
//!     prop_assert!(request.buffers.iter().map(|b| b.nbytes).sum::<u64>() <= request.window_bytes);
//! });
//! ```

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select, subsequence};
use pto_simpler_sys::{
    Access, ChipId, DataType, DomainRequest, NamedBuffer, Shape, Signature, TaskArgs, TensorArg, TensorPlace,
};

use crate::{CALLS, FailureTemplate, Fault, FaultEffect, FaultKind, FaultSchedule};

/// The most named buffers of a generated request.
pub const MOST_BUFFERS: usize = 5;

/// The most bytes of a generated buffer, and of generated slack.
pub const MOST_BYTES: u64 = 5000;

/// What makes a generated request invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RequestFlaw {
    /// No workers.
    NoWorkers,
    /// A worker occurs twice.
    DuplicateWorker,
    /// A worker that does not exist.
    WorkerOutOfRange,
    /// A window of zero bytes.
    WindowZero,
    /// The buffers exceed the window.
    BuffersOverWindow,
    /// The sum of the buffers does not fit in 64 bits.
    SumOverflow,
    /// Two buffers of one name.
    DuplicateBuffer,
}

impl RequestFlaw {
    /// Every flaw.
    pub const ALL: [Self; 7] = [
        Self::NoWorkers,
        Self::DuplicateWorker,
        Self::WorkerOutOfRange,
        Self::WindowZero,
        Self::BuffersOverWindow,
        Self::SumOverflow,
        Self::DuplicateBuffer,
    ];
}

fn buffer_bytes() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => 1..=MOST_BYTES,
        2 => (1..=MOST_BYTES / 64).prop_map(|n| n * 64),
        1 => select(&[1u64, 3, 4, 17, 32, 63, 64, 65, 4095, 4096, 4097][..]),
    ]
}

fn buffers() -> impl Strategy<Value = Vec<NamedBuffer>> {
    let sized = (buffer_bytes(), any::<Option<u64>>(), select(&["opaque", "fp32", "int32"][..]));
    vec(sized, 0..=MOST_BUFFERS).prop_map(|all| {
        all.into_iter()
            .enumerate()
            .map(|(index, (nbytes, count, dtype))| NamedBuffer {
                dtype: dtype.into(),
                count: count.unwrap_or(nbytes),
                ..NamedBuffer::bytes(format!("b{index}"), nbytes)
            })
            .collect()
    })
}

fn sum(buffers: &[NamedBuffer]) -> u64 {
    buffers.iter().fold(0, |sum, b| sum.saturating_add(b.nbytes))
}

/// A request whose window its buffers fill exactly: what every backend and every reset choice accepts. One to
/// `chips` members in any order, at least one buffer.
pub fn packed_request(chips: u32) -> impl Strategy<Value = DomainRequest> {
    request(chips).prop_map(|mut request| {
        if request.buffers.is_empty() {
            request.buffers.push(NamedBuffer::bytes("b0", request.window_bytes));
        }
        request.window_bytes = sum(&request.buffers);
        request
    })
}

/// A valid request over at most `chips` chips (at least 1): members in any order, buffers of any size, slack or
/// none.
pub fn request(chips: u32) -> impl Strategy<Value = DomainRequest> {
    let all: Vec<ChipId> = (0..chips.max(1)).map(ChipId).collect();
    let most = all.len();
    let workers = subsequence(all, 1..=most).prop_shuffle();
    let slack = prop_oneof![2 => Just(0), 1 => 0..=MOST_BYTES];
    (workers, buffers(), slack).prop_map(|(workers, buffers, slack)| DomainRequest {
        workers,
        window_bytes: sum(&buffers).saturating_add(slack).max(1),
        buffers,
    })
}

/// An invalid request, and the flaw that was put into an otherwise valid one.
pub fn invalid_request(chips: u32) -> impl Strategy<Value = (RequestFlaw, DomainRequest)> {
    (packed_request(chips), select(&RequestFlaw::ALL[..]), any::<Index>(), any::<u32>()).prop_map(
        move |(mut request, flaw, at, beyond)| {
            spoil(&mut request, flaw, at, chips.saturating_add(beyond % 1000));
            (flaw, request)
        },
    )
}

fn spoil(request: &mut DomainRequest, flaw: RequestFlaw, at: Index, beyond: u32) {
    let worker = at.index(request.workers.len());
    let buffer = at.index(request.buffers.len());
    match flaw {
        RequestFlaw::NoWorkers => request.workers.clear(),
        RequestFlaw::DuplicateWorker => request.workers.push(request.workers[worker]),
        RequestFlaw::WorkerOutOfRange => request.workers[worker] = ChipId(beyond),
        RequestFlaw::WindowZero => {
            request.buffers.clear();
            request.window_bytes = 0;
        }
        RequestFlaw::BuffersOverWindow => request.buffers[buffer].nbytes += 1,
        RequestFlaw::SumOverflow => {
            request.buffers.push(NamedBuffer::bytes("huge", u64::MAX));
        }
        RequestFlaw::DuplicateBuffer => {
            let again = NamedBuffer { nbytes: 1, ..request.buffers[buffer].clone() };
            request.buffers.push(again);
            request.window_bytes += 1;
        }
    }
}

fn fault_kind() -> impl Strategy<Value = FaultKind> {
    prop_oneof![
        4 => Just(FaultKind::Plain),
        1 => (0..=255i32).prop_map(FaultKind::ChipExited),
        1 => (1..=31i32).prop_map(FaultKind::ChipKilled),
        1 => Just(FaultKind::DeviceTimeout),
        1 => any::<u64>().prop_map(FaultKind::OutOfSharedMemory),
        1 => any::<u64>().prop_map(FaultKind::OutOfDeviceMemory),
        1 => Just(FaultKind::Deferred),
    ]
}

/// One fault, on any call, with one of these effects (all of [`FaultEffect::ALL`] where the list is empty).
pub fn fault(chips: u32, effects: &[FaultEffect]) -> impl Strategy<Value = Fault> + use<> {
    let effects = if effects.is_empty() { FaultEffect::ALL.to_vec() } else { effects.to_vec() };
    let chip = proptest::option::of((0..chips.max(1)).prop_map(ChipId));
    let call = select(&CALLS[..]).prop_map(|(call, _)| call);
    let fatal = prop::bool::weighted(0.2);
    (call, chip, 1..=4u64, select(effects), fault_kind(), fatal).prop_map(
        |(call, chip, occurrence, effect, kind, fatal)| Fault {
            call,
            chip,
            occurrence,
            effect,
            failure: FailureTemplate { kind, fatal },
        },
    )
}

/// A schedule of at most `most` faults; shrinks towards fewer and plainer ones.
pub fn fault_schedule(
    chips: u32,
    effects: &[FaultEffect],
    most: usize,
) -> impl Strategy<Value = FaultSchedule> + use<> {
    vec(fault(chips, effects), 0..=most)
        .prop_map(|faults| faults.into_iter().fold(FaultSchedule::none(), FaultSchedule::with))
}

/// Memory that generated tensors may lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Where it is.
    pub place: TensorPlace,
    /// Its size in bytes, at least 1.
    pub nbytes: u64,
}

/// What makes generated arguments invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ArgsFlaw {
    /// A tensor too many.
    ExtraTensor,
    /// A tensor too few.
    MissingTensor,
    /// A scalar too many.
    ExtraScalar,
    /// A scalar too few.
    MissingScalar,
    /// A tensor that reaches beyond its memory.
    OutOfBounds,
    /// An offset that is no multiple of the element size.
    Misaligned,
    /// Sizes that do not fit in 64 bits.
    Overflow,
}

impl ArgsFlaw {
    /// Every flaw.
    pub const ALL: [Self; 7] = [
        Self::ExtraTensor,
        Self::MissingTensor,
        Self::ExtraScalar,
        Self::MissingScalar,
        Self::OutOfBounds,
        Self::Misaligned,
        Self::Overflow,
    ];
}

const DATA_TYPES: [DataType; 11] = [
    DataType::Float32,
    DataType::Float16,
    DataType::Int32,
    DataType::Int16,
    DataType::Int8,
    DataType::Uint8,
    DataType::Bfloat16,
    DataType::Int64,
    DataType::Uint64,
    DataType::Uint16,
    DataType::Uint32,
];

/// A dense tensor of one to three dimensions inside `memory`, used with `access`.
pub fn tensor(memory: Memory, access: Access) -> impl Strategy<Value = TensorArg> {
    (select(&DATA_TYPES[..]), any::<Index>(), any::<Index>(), 0..3usize).prop_map(
        move |(dtype, offset, length, ones)| {
            // Memory smaller than one element holds tensors of bytes only.
            let dtype = if dtype.size() > memory.nbytes { DataType::Uint8 } else { dtype };
            let fit = memory.nbytes / dtype.size();
            let first = offset.index(usize::try_from(fit).unwrap_or(usize::MAX)) as u64;
            let room = (fit - first).min(u64::from(u32::MAX));
            let elements = 1 + length.index(usize::try_from(room).unwrap_or(usize::MAX)) as u64;
            let mut dims = std::vec![1; ones];
            dims.push(u32::try_from(elements).unwrap_or(1));
            TensorArg { place: memory.place, shape: shape(&dims), dtype, byte_offset: first * dtype.size(), access }
        },
    )
}

/// A shape of dimensions that are known to be one to five, and not zero.
fn shape(dims: &[u32]) -> Shape {
    Shape::new(dims).unwrap_or_else(|| unreachable!("{dims:?} are valid dimensions"))
}

/// Arguments that fit `signature`, with tensors anywhere in `memory` (at least one piece where the signature has
/// tensors).
pub fn task_args(signature: &Signature, memory: &[Memory]) -> BoxedStrategy<TaskArgs> {
    let tensors: Vec<_> = signature
        .tensors
        .iter()
        .map(|access| {
            let access = *access;
            select(memory.to_vec()).prop_flat_map(move |memory| tensor(memory, access))
        })
        .collect();
    let scalars = vec(any::<u64>(), signature.scalars as usize);
    (tensors, scalars).prop_map(|(tensors, scalars)| collect(&tensors, &scalars)).boxed()
}

fn collect(tensors: &[TensorArg], scalars: &[u64]) -> TaskArgs {
    let mut args = TaskArgs::new();
    for tensor in tensors {
        args.tensor(*tensor);
    }
    for scalar in scalars {
        args.scalar(*scalar);
    }
    args
}

/// Arguments with one flaw, over the same signature and memory. The signature must have a tensor and a scalar, so
/// that every flaw is possible.
pub fn invalid_task_args(signature: &Signature, memory: &[Memory]) -> BoxedStrategy<(ArgsFlaw, TaskArgs)> {
    let sizes = memory.to_vec();
    (task_args(signature, memory), select(&ArgsFlaw::ALL[..]), any::<Index>())
        .prop_map(move |(args, flaw, at)| (flaw, spoil_args(&args, flaw, at, &sizes)))
        .boxed()
}

fn spoil_args(args: &TaskArgs, flaw: ArgsFlaw, at: Index, memory: &[Memory]) -> TaskArgs {
    let (mut tensors, mut scalars) = (args.tensors().to_vec(), args.scalars().to_vec());
    let index = at.index(tensors.len());
    let tensor = tensors[index];
    let size = memory.iter().find(|m| m.place == tensor.place).map_or(0, |m| m.nbytes);
    match flaw {
        ArgsFlaw::ExtraTensor => tensors.push(tensor),
        ArgsFlaw::MissingTensor => {
            tensors.remove(index);
        }
        ArgsFlaw::ExtraScalar => scalars.push(0),
        ArgsFlaw::MissingScalar => {
            scalars.pop();
        }
        ArgsFlaw::OutOfBounds => {
            let past = size.next_multiple_of(tensor.dtype.size());
            tensors[index] = TensorArg { byte_offset: past, ..tensor };
        }
        ArgsFlaw::Misaligned => {
            // In bounds where there is room, so that alignment is what is wrong with it.
            tensors[index] = TensorArg { dtype: DataType::Int16, shape: shape(&[1]), byte_offset: 1, ..tensor };
        }
        ArgsFlaw::Overflow => {
            tensors[index] = TensorArg { shape: shape(&[u32::MAX; 5]), byte_offset: 0, ..tensor };
        }
    }
    collect(&tensors, &scalars)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use pto_simpler_sys::HostBufferId;

    use super::*;

    /// Every flaw of a request, found one by one with wide arithmetic.
    fn flaws(request: &DomainRequest, chips: u32) -> HashSet<RequestFlaw> {
        let mut found = HashSet::new();
        let named: u128 = request.buffers.iter().map(|b| u128::from(b.nbytes)).sum();
        let workers: HashSet<_> = request.workers.iter().collect();
        let names: HashSet<_> = request.buffers.iter().map(|b| &b.name).collect();
        for (flaw, present) in [
            (RequestFlaw::NoWorkers, request.workers.is_empty()),
            (RequestFlaw::DuplicateWorker, workers.len() < request.workers.len()),
            (RequestFlaw::WorkerOutOfRange, request.workers.iter().any(|w| w.0 >= chips)),
            (RequestFlaw::WindowZero, request.window_bytes == 0),
            (RequestFlaw::SumOverflow, named > u128::from(u64::MAX)),
            (
                RequestFlaw::BuffersOverWindow,
                named > u128::from(request.window_bytes) && named <= u128::from(u64::MAX),
            ),
            (RequestFlaw::DuplicateBuffer, names.len() < request.buffers.len()),
        ] {
            if present {
                found.insert(flaw);
            }
        }
        found
    }

    const SIGNATURE: [Access; 2] = [Access::Input, Access::InOut];

    fn memory() -> Vec<Memory> {
        [1u64, 7, 64, 4097]
            .into_iter()
            .zip(0..)
            .map(|(nbytes, i)| Memory { place: TensorPlace::Host(HostBufferId::new(i, 1)), nbytes })
            .collect()
    }

    fn size_of(place: TensorPlace) -> u64 {
        memory().iter().find(|m| m.place == place).unwrap().nbytes
    }

    fn fits(tensor: &TensorArg) -> bool {
        let end = tensor.nbytes().and_then(|n| n.checked_add(tensor.byte_offset));
        tensor.byte_offset.is_multiple_of(tensor.dtype.size())
            && end.is_some_and(|end| end <= size_of(tensor.place))
    }

    proptest! {
        #[test]
        fn valid_requests_have_no_flaw(request in request(5), packed in packed_request(5)) {
            prop_assert_eq!(flaws(&request, 5), HashSet::new());
            prop_assert_eq!(flaws(&packed, 5), HashSet::new());
            prop_assert_eq!(packed.buffers.iter().map(|b| b.nbytes).sum::<u64>(), packed.window_bytes);
        }

        #[test]
        fn invalid_requests_have_exactly_their_flaw((flaw, request) in invalid_request(5)) {
            prop_assert_eq!(flaws(&request, 5), HashSet::from([flaw]));
        }

        #[test]
        fn schedules_print_and_parse_back(schedule in fault_schedule(3, &[], 6)) {
            prop_assert!(schedule.faults.len() <= 6);
            prop_assert_eq!(&schedule.to_string().parse::<FaultSchedule>().unwrap(), &schedule);
        }

        #[test]
        fn schedules_keep_to_the_effects_asked_for(schedule in fault_schedule(3, &[FaultEffect::After], 6)) {
            prop_assert!(schedule.faults.iter().all(|f| f.effect == FaultEffect::After && f.occurrence > 0));
        }

        #[test]
        fn valid_arguments_fit(args in task_args(&Signature::new(SIGNATURE, 2), &memory())) {
            prop_assert_eq!((args.tensors().len(), args.scalars().len()), (2, 2));
            prop_assert!(args.tensors().iter().all(fits));
            prop_assert_eq!(args.tensors().iter().map(|t| t.access).collect::<Vec<_>>(), SIGNATURE.to_vec());
        }

        #[test]
        fn invalid_arguments_do_not((flaw, args) in invalid_task_args(&Signature::new(SIGNATURE, 2), &memory())) {
            let counted = (args.tensors().len(), args.scalars().len()) == (2, 2);
            prop_assert!(!counted || !args.tensors().iter().all(fits), "{flaw:?}");
        }
    }
}
