//! The same step on one chip, and the comparison.

use pto_dispatch::{Error, HostBuffer};

use super::model::{ROWS_PER_CHIP, WORD, input, map_words, salt, weight};
use super::plan::{ProgramPlan, chunk};

/// Bytes that are computed and compared at a time, so that the largest program needs little memory.
const BLOCK: u64 = 32 << 10;

/// What a comparison found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// Elements compared.
    pub(crate) elements: u64,
    /// Elements that differ.
    pub(crate) mismatches: u64,
    /// The first one that differs.
    pub(crate) first: Option<String>,
}

/// The step on one chip: all rows, elements from `first` on.
fn step(bytes: &mut [u8], exchange: usize, rows: usize, seed: u64, first: u32) {
    bytes.fill(0);
    for row in 0..rows {
        let (x, salt) = (input(seed, row), salt(exchange as u64, row));
        map_words(bytes, |index, sum| sum.wrapping_add(x.wrapping_mul(weight(salt, first.wrapping_add(index)))));
    }
}

/// Compares every element of every rank's results with the step on one chip.
///
/// # Errors
///
/// The output cannot be read.
pub(crate) fn verify(plan: &ProgramPlan, seed: u64, output: &HostBuffer) -> Result<Verdict, Error> {
    let mut verdict = Verdict::default();
    let (mut expected, mut actual) = (vec![0; BLOCK as usize], vec![0; BLOCK as usize]);
    for (index, exchange) in plan.exchanges.iter().enumerate() {
        for (rank, &(offset, len)) in exchange.results.iter().enumerate() {
            let start = chunk(exchange.nbytes, plan.ranks(), rank).start;
            let mut done = 0;
            while done < len {
                let n = (len - done).min(BLOCK) as usize;
                let (expected, actual) = (&mut expected[..n], &mut actual[..n]);
                output.read(offset + done, actual)?;
                let first = (start + done) / WORD;
                step(expected, index, plan.ranks() * ROWS_PER_CHIP, seed, first as u32);
                verdict.elements += (n as u64).div_ceil(WORD);
                if expected != actual {
                    let words = expected.chunks(WORD as usize).zip(actual.chunks(WORD as usize));
                    for (element, (wanted, found)) in words.enumerate().filter(|(_, (a, b))| a != b) {
                        verdict.mismatches += 1;
                        verdict.first.get_or_insert_with(|| {
                            let buffers = &plan.domains[exchange.domain].request.buffers;
                            format!(
                                "{} of {} on rank {rank}: element {} is {found:02x?}, expected {wanted:02x?}",
                                buffers[exchange.buffer].name,
                                plan.name,
                                first + element as u64,
                            )
                        });
                    }
                }
                done += n as u64;
            }
        }
    }
    Ok(verdict)
}
