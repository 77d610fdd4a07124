//! What chips execute: two kernels for all programs, since what they need to know of a program is a tensor.
//!
//! This is their form for the emulator. For Simpler the same two are C++ (`tests/kernels/decode.h`).

use std::ops::Range;

use pto_dispatch::sys::{Access, Signature};
use pto_mock::{DomainView, Kernel, KernelError, MemoryView};

use super::model::{ROWS_PER_CHIP, Rows, WORD, add_partial, add_words, salt};
use super::plan::{ENTRY_WORDS, chunk};

/// Name of the kernel that runs exchanges which signals order.
pub(crate) const EXCHANGE: &str = "decode_exchange";
/// Name of the kernel that runs one phase of an exchange which runs order.
pub(crate) const PHASE: &str = "decode_phase";

/// Signature of [`EXCHANGE`].
pub(crate) fn exchange_signature() -> Signature {
    Signature::new([Access::Input, Access::Input, Access::OutputExisting], scalar::COUNT)
}

/// Signature of [`PHASE`].
pub(crate) fn phase_signature() -> Signature {
    Signature::new([Access::Input, Access::Input, Access::OutputExisting, Access::InOut], scalar::COUNT)
}

/// Bytes that a kernel handles at a time: small enough for a cache, large enough to amortise a call.
const BLOCK: u64 = 32 << 10;

/// Tensor arguments of both kernels.
pub(crate) mod tensor {
    /// The input vector.
    pub(crate) const INPUT: usize = 0;
    /// The exchanges of the program, as [`ProgramPlan::table`](crate::workload::plan::ProgramPlan::table) makes it.
    pub(crate) const TABLE: usize = 1;
    /// This rank's results.
    pub(crate) const OUTPUT: usize = 2;
    /// What this rank has so far, between runs; of the phase kernel only.
    pub(crate) const CARRY: usize = 3;
}

/// Scalar arguments of both kernels.
pub(crate) mod scalar {
    /// Device context of the domain.
    pub(crate) const CONTEXT: usize = 0;
    /// The first exchange, by position in the program.
    pub(crate) const FIRST: usize = 1;
    /// How many exchanges (1 for the phase kernel).
    pub(crate) const EXCHANGES: usize = 2;
    /// The epoch (exchange kernel) or the phase (phase kernel).
    pub(crate) const STEP: usize = 3;
    /// 1 where the window is promised to be zero.
    pub(crate) const FRESH: usize = 4;
    /// How many there are.
    pub(crate) const COUNT: u32 = 5;
}

/// One line of the table: offsets are bytes of the window.
struct Exchange {
    /// Where the data buffer starts.
    data: u64,
    nbytes: u64,
    /// Where the cell of rank 0 is.
    cells: u64,
    before: u64,
    per_dispatch: u64,
}

impl Exchange {
    fn load(kernel: &Kernel<'_>, index: u64) -> Result<Self, KernelError> {
        let mut words = [[0; 8]; ENTRY_WORDS];
        let line = size_of_val(&words) as u64;
        kernel.tensor(tensor::TABLE)?.load(index.saturating_mul(line), words.as_flattened_mut())?;
        let [data, nbytes, cells, before, per_dispatch] = words.map(u64::from_le_bytes);
        Ok(Self { data, nbytes, cells, before, per_dispatch })
    }
}

/// The rows of an exchange that this rank owns.
fn rows(kernel: &Kernel<'_>, exchange: u64, rank: usize) -> Result<Rows, KernelError> {
    let input = kernel.tensor(tensor::INPUT)?;
    let mut rows = [(0, 0); ROWS_PER_CHIP];
    for (i, slot) in rows.iter_mut().enumerate() {
        let row = rank * ROWS_PER_CHIP + i;
        let mut word = [0; WORD as usize];
        input.load(row as u64 * WORD, &mut word)?;
        *slot = (u32::from_le_bytes(word), salt(exchange, row));
    }
    Ok(rows)
}

/// Calls `f` with each block of `bytes`.
fn blocks(bytes: Range<u64>, mut f: impl FnMut(u64, usize) -> Result<(), KernelError>) -> Result<(), KernelError> {
    let mut at = bytes.start;
    while at < bytes.end {
        let len = (bytes.end - at).min(BLOCK);
        f(at, len as usize)?;
        at += len;
    }
    Ok(())
}

/// The cells of one exchange, as one rank uses them.
struct Cells<'a> {
    view: &'a DomainView<'a>,
    exchange: &'a Exchange,
    /// Additions that earlier dispatches have left in every cell.
    base: u64,
}

impl Cells<'_> {
    /// Tells rank `owner` that a chunk is in its buffer.
    fn add(&self, owner: usize) -> Result<(), KernelError> {
        let cell = self.view.window(owner)?.cell(self.offset(self.view.rank()))?;
        cell.fetch_add(1)?;
        Ok(())
    }

    /// Waits for the `nth` chunk (from 1) that `writer` puts into this rank's buffer.
    fn wait(&self, writer: usize, nth: u64) -> Result<(), KernelError> {
        let cell = self.view.window(self.view.rank())?.cell(self.offset(writer))?;
        // Cells wrap around, so compare by distance.
        let target = self.base.wrapping_add(self.exchange.before).wrapping_add(nth) as i32;
        cell.wait(|value| value.wrapping_sub(target) >= 0)?;
        Ok(())
    }

    fn offset(&self, rank: usize) -> u64 {
        self.exchange.cells + rank as u64 * WORD
    }
}

/// Runs some exchanges of one domain, ordered by signals; their results follow each other in the output.
pub(crate) fn exchange(kernel: &Kernel<'_>) -> Result<(), KernelError> {
    let view = kernel.domain(kernel.scalar(scalar::CONTEXT)?)?;
    let (first, count) = (kernel.scalar(scalar::FIRST)?, kernel.scalar(scalar::EXCHANGES)?);
    let fresh = kernel.scalar(scalar::FRESH)? == 1;
    let earlier = if fresh { 0 } else { kernel.scalar(scalar::STEP)?.saturating_sub(1) };
    let output = kernel.tensor(tensor::OUTPUT)?;
    let (rank, ranks) = (view.rank(), view.size());
    let mut at = 0;
    for index in first..first.saturating_add(count) {
        let exchange = Exchange::load(kernel, index)?;
        let cells = Cells { view: &view, exchange: &exchange, base: earlier.wrapping_mul(exchange.per_dispatch) };
        ring(&view, &cells, &rows(kernel, index, rank)?, fresh)?;
        at += copy_out(&view.window(rank)?, &exchange, (rank, ranks), &output, at)?.max(1);
    }
    Ok(())
}

/// One exchange: every chunk goes once round the ring.
fn ring(view: &DomainView<'_>, cells: &Cells<'_>, rows: &Rows, fresh: bool) -> Result<(), KernelError> {
    let exchange = cells.exchange;
    let (rank, ranks) = (view.rank(), view.size());
    let (writer, reader) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
    let (mine, theirs) = (view.window(rank)?, view.window(reader)?);
    let (mut sum, mut there) = (vec![0; BLOCK as usize], vec![0; BLOCK as usize]);
    for hop in 0..ranks {
        if hop > 0 {
            cells.wait(writer, hop as u64)?;
        }
        let bytes = chunk(exchange.nbytes, ranks, (rank + ranks - hop) % ranks);
        blocks(bytes, |at, len| {
            let (sum, there) = (&mut sum[..len], &mut there[..len]);
            if hop > 0 {
                mine.load(exchange.data + at, sum)?;
            } else {
                sum.fill(0);
            }
            add_partial(sum, rows, (at / WORD) as u32);
            if fresh {
                theirs.load(exchange.data + at, there)?;
                add_words(sum, there);
            }
            theirs.store(exchange.data + at, sum)
        })?;
        cells.add(reader)?;
    }
    cells.wait(writer, ranks as u64)
}

/// Copies a rank's complete chunk from a window to its place in the output; says how many bytes it has.
fn copy_out(
    from: &MemoryView,
    exchange: &Exchange,
    (rank, ranks): (usize, usize),
    output: &MemoryView,
    offset: u64,
) -> Result<u64, KernelError> {
    let bytes = chunk(exchange.nbytes, ranks, rank);
    let (start, len) = (bytes.start, bytes.end - bytes.start);
    let mut block = vec![0; BLOCK as usize];
    blocks(bytes, |at, len| {
        from.load(exchange.data + at, &mut block[..len])?;
        output.store(offset + (at - start), &block[..len])
    })?;
    Ok(len)
}

/// One phase of one exchange that is ordered by runs: the same ring, one hop per run.
///
/// The builder has copied what each rank had after the previous phase into that rank's buffer.
pub(crate) fn phase(kernel: &Kernel<'_>) -> Result<(), KernelError> {
    let view = kernel.domain(kernel.scalar(scalar::CONTEXT)?)?;
    let index = kernel.scalar(scalar::FIRST)?;
    let exchange = Exchange::load(kernel, index)?;
    let hop = usize::try_from(kernel.scalar(scalar::STEP)?).unwrap_or(usize::MAX);
    let fresh = kernel.scalar(scalar::FRESH)? == 1;
    let (rank, ranks) = (view.rank(), view.size());
    let carry = kernel.tensor(tensor::CARRY)?;
    let arrived = view.window((rank + ranks - 1) % ranks)?;
    if hop >= ranks {
        let output = kernel.tensor(tensor::OUTPUT)?;
        return copy_out(&arrived, &exchange, (rank, ranks), &output, 0).map(drop);
    }
    let rows = rows(kernel, index, rank)?;
    let (mut sum, mut there) = (vec![0; BLOCK as usize], vec![0; BLOCK as usize]);
    if hop == 0 {
        // A fresh window is zero; all of it takes part, so that a byte that is not shows up in some result.
        let mine = view.window(rank)?;
        blocks(0..exchange.nbytes, |at, len| {
            if fresh {
                mine.load(exchange.data + at, &mut sum[..len])?;
            } else {
                sum[..len].fill(0);
            }
            carry.store(at, &sum[..len])
        })?;
    }
    blocks(chunk(exchange.nbytes, ranks, (rank + ranks - hop) % ranks), |at, len| {
        let (sum, there) = (&mut sum[..len], &mut there[..len]);
        carry.load(at, sum)?;
        if hop > 0 {
            arrived.load(exchange.data + at, there)?;
            add_words(sum, there);
        }
        add_partial(sum, &rows, (at / WORD) as u32);
        carry.store(at, sum)
    })
}
