//! What chips execute.

use std::ops::Range;

use pto_mock::{DomainView, Kernel, KernelError, MemoryView};

use super::model::{ROWS_PER_CHIP, Rows, WORD, add_partial, add_words, salt};
use super::plan::{Exchange, Guard, ProgramPlan, chunk};

/// Bytes that a kernel handles at a time: small enough for a cache, large enough to amortise a call.
const BLOCK: u64 = 32 << 10;

/// Tensor arguments of both kernels.
pub(crate) mod tensor {
    /// The input vector.
    pub(crate) const INPUT: usize = 0;
    /// This rank's results.
    pub(crate) const OUTPUT: usize = 1;
    /// What this rank has so far, between runs; of the phase kernel only.
    pub(crate) const CARRY: usize = 2;
}

/// Scalar arguments of both kernels.
pub(crate) mod scalar {
    /// Device context of the domain.
    pub(crate) const CONTEXT: usize = 0;
    /// The domain (exchange kernel) or the exchange (phase kernel), by position in the program.
    pub(crate) const SUBJECT: usize = 1;
    /// The epoch (exchange kernel) or the phase (phase kernel).
    pub(crate) const STEP: usize = 2;
    /// 1 where the window is promised to be zero.
    pub(crate) const FRESH: usize = 3;
    /// How many there are.
    pub(crate) const COUNT: u32 = 4;
}

/// A position that came as a scalar.
fn position<T>(list: &[T], index: u64) -> Result<(usize, &T), KernelError> {
    let index = usize::try_from(index).unwrap_or(usize::MAX);
    list.get(index).map(|item| (index, item)).ok_or_else(|| KernelError::failed(format!("no subject {index}")))
}

/// The rows of an exchange that this rank owns.
fn rows(kernel: &Kernel<'_>, exchange: usize, rank: usize) -> Result<Rows, KernelError> {
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
    guard: Guard,
    /// Additions that earlier dispatches have left in every cell.
    base: u64,
}

impl Cells<'_> {
    /// Tells rank `owner` that a chunk is in its buffer.
    fn add(&self, owner: usize) -> Result<(), KernelError> {
        let cell = self.view.buffer(owner, self.guard.buffer)?.cell(self.offset(self.view.rank()))?;
        cell.fetch_add(1)?;
        Ok(())
    }

    /// Waits for the `nth` chunk (from 1) that `writer` puts into this rank's buffer.
    fn wait(&self, writer: usize, nth: u64) -> Result<(), KernelError> {
        let cell = self.view.buffer(self.view.rank(), self.guard.buffer)?.cell(self.offset(writer))?;
        // Cells wrap around, so compare by distance.
        let target = self.base.wrapping_add(self.guard.before).wrapping_add(nth) as i32;
        cell.wait(|value| value.wrapping_sub(target) >= 0)?;
        Ok(())
    }

    fn offset(&self, rank: usize) -> u64 {
        self.guard.cells + rank as u64 * WORD
    }
}

/// Runs all exchanges of one domain, ordered by signals.
pub(crate) fn exchange(plan: &ProgramPlan, kernel: &Kernel<'_>) -> Result<(), KernelError> {
    let view = kernel.domain(kernel.scalar(scalar::CONTEXT)?)?;
    let (_, domain) = position(&plan.domains, kernel.scalar(scalar::SUBJECT)?)?;
    let fresh = kernel.scalar(scalar::FRESH)? == 1;
    let earlier = if fresh { 0 } else { kernel.scalar(scalar::STEP)?.saturating_sub(1) };
    let output = kernel.tensor(tensor::OUTPUT)?;
    let rank = view.rank();
    let start = plan.output(&domain.exchanges, rank).map_or(0, |range| range.start);
    for index in domain.exchanges.clone() {
        let (_, exchange) = position(&plan.exchanges, index as u64)?;
        let guard = exchange.guard.ok_or_else(|| KernelError::failed("an exchange without its signal"))?;
        let cells = Cells { view: &view, guard, base: earlier.wrapping_mul(guard.per_dispatch) };
        ring(&view, &cells, exchange, &rows(kernel, index, rank)?, fresh)?;
        let (offset, _) = exchange.results[rank];
        copy_out(&view.buffer(rank, exchange.buffer)?, exchange, (rank, view.size()), &output, offset - start)?;
    }
    Ok(())
}

/// One exchange: every chunk goes once round the ring.
fn ring(
    view: &DomainView<'_>,
    cells: &Cells<'_>,
    exchange: &Exchange,
    rows: &Rows,
    fresh: bool,
) -> Result<(), KernelError> {
    let (rank, ranks) = (view.rank(), view.size());
    let (writer, reader) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
    let (mine, theirs) = (view.buffer(rank, exchange.buffer)?, view.buffer(reader, exchange.buffer)?);
    let (mut sum, mut there) = (vec![0; BLOCK as usize], vec![0; BLOCK as usize]);
    for hop in 0..ranks {
        if hop > 0 {
            cells.wait(writer, hop as u64)?;
        }
        let bytes = chunk(exchange.nbytes, ranks, (rank + ranks - hop) % ranks);
        blocks(bytes, |at, len| {
            let (sum, there) = (&mut sum[..len], &mut there[..len]);
            if hop > 0 {
                mine.load(at, sum)?;
            } else {
                sum.fill(0);
            }
            add_partial(sum, rows, (at / WORD) as u32);
            if fresh {
                theirs.load(at, there)?;
                add_words(sum, there);
            }
            theirs.store(at, sum)
        })?;
        cells.add(reader)?;
    }
    cells.wait(writer, ranks as u64)
}

/// Copies a rank's complete chunk to its place in the output.
fn copy_out(
    from: &MemoryView,
    exchange: &Exchange,
    (rank, ranks): (usize, usize),
    output: &MemoryView,
    offset: u64,
) -> Result<(), KernelError> {
    let bytes = chunk(exchange.nbytes, ranks, rank);
    let start = bytes.start;
    let mut block = vec![0; BLOCK as usize];
    blocks(bytes, |at, len| {
        from.load(at, &mut block[..len])?;
        output.store(offset + (at - start), &block[..len])
    })
}

/// One phase of one exchange that is ordered by runs: the same ring, one hop per run.
///
/// The builder has copied what each rank had after the previous phase into that rank's buffer.
pub(crate) fn phase(plan: &ProgramPlan, kernel: &Kernel<'_>) -> Result<(), KernelError> {
    let view = kernel.domain(kernel.scalar(scalar::CONTEXT)?)?;
    let (index, exchange) = position(&plan.exchanges, kernel.scalar(scalar::SUBJECT)?)?;
    let hop = usize::try_from(kernel.scalar(scalar::STEP)?).unwrap_or(usize::MAX);
    let fresh = kernel.scalar(scalar::FRESH)? == 1;
    let (rank, ranks) = (view.rank(), view.size());
    let carry = kernel.tensor(tensor::CARRY)?;
    let arrived = view.buffer((rank + ranks - 1) % ranks, exchange.buffer)?;
    if hop == ranks {
        let output = kernel.tensor(tensor::OUTPUT)?;
        return copy_out(&arrived, exchange, (rank, ranks), &output, 0);
    }
    let rows = rows(kernel, index, rank)?;
    let (mut sum, mut there) = (vec![0; BLOCK as usize], vec![0; BLOCK as usize]);
    if hop == 0 {
        // A fresh window is zero; all of it takes part, so that a byte that is not shows up in some result.
        let mine = view.buffer(rank, exchange.buffer)?;
        blocks(0..exchange.nbytes, |at, len| {
            if fresh {
                mine.load(at, &mut sum[..len])?;
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
            arrived.load(at, there)?;
            add_words(sum, there);
        }
        add_partial(sum, &rows, (at / WORD) as u32);
        carry.store(at, sum)
    })
}
