//! From a program's domain requests to exchanges: who guards which buffer, and where results go.

use std::ops::Range;

use pto_dispatch::sys::DomainRequest;
use pto_mock::fixtures::{BufferKind, CELL_BYTES, DomainFixture, FixtureError, ProgramFixture};

use super::model::WORD;

/// Why no program can be made of a fixture.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanError {
    /// The requests do not fit the chips.
    #[error("program {program}: {source}")]
    Request {
        /// The program.
        program: String,
        /// What is wrong.
        source: FixtureError,
    },
    /// More bytes than this example can address in one tensor.
    #[error(
        "program {program}: the results of {chips} chips take more than {permitted_bytes} bytes; use smaller buffers"
    )]
    TooLarge {
        /// The program.
        program: String,
        /// The chips.
        chips: u32,
        /// The limit: a tensor dimension is a 32-bit number.
        permitted_bytes: u64,
    },
}

/// Words of one line of [`ProgramPlan::table`].
pub(crate) const ENTRY_WORDS: usize = 5;

/// How the cells of one signal buffer guard one exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Guard {
    /// Where the cell of rank 0 is in the window: at the start of the signal buffer, if that is aligned.
    pub(crate) cells: u64,
    /// Additions to each cell in one dispatch before this exchange.
    pub(crate) before: u64,
    /// Additions to each cell in one dispatch altogether.
    pub(crate) per_dispatch: u64,
}

/// One data buffer and what travels through it.
#[derive(Clone, Debug)]
pub(crate) struct Exchange {
    /// The domain, by position in the program.
    pub(crate) domain: usize,
    /// Position of the data buffer in the request.
    pub(crate) buffer: usize,
    /// Where that buffer starts in the window.
    pub(crate) offset: u64,
    /// Its size.
    pub(crate) nbytes: u64,
    /// The signal that orders it; `None` where runs do.
    pub(crate) guard: Option<Guard>,
    /// Where each rank's result goes in the output buffer: offset and length in bytes.
    pub(crate) results: Vec<(u64, u64)>,
}

/// One domain.
#[derive(Clone, Debug)]
pub(crate) struct DomainPlan {
    /// Its name.
    pub(crate) name: String,
    /// What is asked for.
    pub(crate) request: DomainRequest,
    /// Its exchanges among those of the program.
    pub(crate) exchanges: Range<usize>,
    /// Whether its exchanges are ordered by signals within one run.
    pub(crate) signalled: bool,
}

/// One program.
#[derive(Clone, Debug)]
pub(crate) struct ProgramPlan {
    /// `model/program`.
    pub(crate) name: String,
    /// Number of chips.
    pub(crate) chips: u32,
    /// Domains in order of first use.
    pub(crate) domains: Vec<DomainPlan>,
    /// Exchanges of all domains, domain by domain.
    pub(crate) exchanges: Vec<Exchange>,
    /// Bytes of the output buffer.
    pub(crate) output_bytes: u64,
    /// What a reader of the report should know.
    pub(crate) notes: Vec<String>,
}

/// The bytes of chunk `chunk` of a buffer that is cut into `ranks` chunks of whole words.
pub(crate) fn chunk(nbytes: u64, ranks: usize, chunk: usize) -> Range<u64> {
    let words = u128::from(nbytes.div_ceil(WORD));
    // In 128 bits, since words times chunk may not fit in 64.
    let cut = |at: usize| {
        let word = words * at as u128 / ranks as u128;
        u64::try_from(word * u128::from(WORD)).unwrap_or(nbytes).min(nbytes)
    };
    cut(chunk)..cut(chunk + 1)
}

impl ProgramPlan {
    /// Plans a program for `chips` chips.
    ///
    /// # Errors
    ///
    /// [`PlanError`].
    pub(crate) fn new(fixture: &ProgramFixture, chips: u32) -> Result<Self, PlanError> {
        let mut plan = Self {
            name: fixture.name.clone(),
            chips,
            domains: Vec::new(),
            exchanges: Vec::new(),
            output_bytes: 0,
            notes: Vec::new(),
        };
        for domain in &fixture.domains {
            plan.add_domain(domain)?;
        }
        if plan.exchanges.is_empty() {
            plan.notes.push(format!("{}: no data buffers, so nothing is computed", plan.name));
        }
        plan.place_results()?;
        Ok(plan)
    }

    fn add_domain(&mut self, domain: &DomainFixture) -> Result<(), PlanError> {
        let request = domain
            .to_request(self.chips)
            .map_err(|source| PlanError::Request { program: self.name.clone(), source })?;
        let (mut data, mut signals) = (Vec::new(), Vec::new());
        let mut offset = 0u64;
        for (index, buffer) in domain.buffers.iter().enumerate() {
            match buffer.kind {
                BufferKind::Data => data.push((index, offset, buffer.nbytes)),
                BufferKind::Signal => match aligned_cells(offset, buffer.nbytes, self.chips) {
                    Some(skip) => signals.push(offset + skip),
                    None => self.notes.push(format!(
                        "{}: signal {} of {} starts at byte {offset} of its window, which leaves no room for aligned \
                         cells; it orders nothing",
                        self.name, buffer.name, domain.name
                    )),
                },
            }
            offset = offset.saturating_add(buffer.nbytes);
        }
        if signals.is_empty() && !data.is_empty() {
            self.notes.push(format!("{}: {} has no usable signals: one run per phase", self.name, domain.name));
        }
        let first = self.exchanges.len();
        for (i, &(buffer, offset, nbytes)) in data.iter().enumerate() {
            let guard = signals.get(i.checked_rem(signals.len()).unwrap_or(0)).map(|&cells| {
                let hops = u64::from(self.chips);
                let turn = (i / signals.len()) as u64;
                let sharing = (data.len() - i % signals.len()).div_ceil(signals.len()) as u64;
                Guard { cells, before: turn * hops, per_dispatch: sharing * hops }
            });
            let domain = self.domains.len();
            self.exchanges.push(Exchange { domain, buffer, offset, nbytes, guard, results: Vec::new() });
        }
        self.domains.push(DomainPlan {
            name: domain.name.clone(),
            request,
            exchanges: first..self.exchanges.len(),
            signalled: !signals.is_empty(),
        });
        Ok(())
    }

    /// Lays results out rank by rank, so that the results of one domain on one rank are one range.
    fn place_results(&mut self) -> Result<(), PlanError> {
        let permitted_bytes = u64::from(u32::MAX);
        let mut next = 0u64;
        for rank in 0..self.ranks() {
            for exchange in &mut self.exchanges {
                let bytes = chunk(exchange.nbytes, self.chips as usize, rank);
                let len = bytes.end - bytes.start;
                exchange.results.push((next, len));
                // A tensor has at least one element, also where a tiny buffer leaves this rank none.
                next = next.saturating_add(len.max(1));
            }
        }
        if next > permitted_bytes {
            return Err(PlanError::TooLarge { program: self.name.clone(), chips: self.chips, permitted_bytes });
        }
        self.output_bytes = next.max(1);
        Ok(())
    }

    /// Number of ranks of every domain.
    pub(crate) fn ranks(&self) -> usize {
        self.chips as usize
    }

    /// Runs that one request takes: one, or one for each phase where some domain has no signals.
    pub(crate) fn runs(&self) -> u64 {
        if self.run_ordered().next().is_some() { u64::from(self.chips) + 1 } else { 1 }
    }

    /// The exchanges that are ordered by runs, with their positions.
    pub(crate) fn run_ordered(&self) -> impl Iterator<Item = (usize, &Exchange)> {
        self.exchanges.iter().enumerate().filter(|(_, e)| e.guard.is_none())
    }

    /// The range of the output buffer that these exchanges of one rank fill.
    pub(crate) fn output(&self, exchanges: &Range<usize>, rank: usize) -> Option<Range<u64>> {
        let slots = self.exchanges.get(exchanges.clone())?;
        let (start, _) = *slots.first()?.results.get(rank)?;
        let (offset, len) = *slots.last()?.results.get(rank)?;
        Some(start..offset + len.max(1))
    }

    /// What kernels know of the program: [`ENTRY_WORDS`] words for each exchange, little-endian. In this order: where
    /// the data buffer starts in the window, its size, where the cell of rank 0 is, additions to each cell before this
    /// exchange, and in the whole dispatch. At least one line, since no tensor is empty.
    pub(crate) fn table(&self) -> Vec<u8> {
        let line = |exchange: &Exchange| {
            let Guard { cells, before, per_dispatch } =
                exchange.guard.unwrap_or(Guard { cells: 0, before: 0, per_dispatch: 0 });
            [exchange.offset, exchange.nbytes, cells, before, per_dispatch]
        };
        let mut lines: Vec<[u64; ENTRY_WORDS]> = self.exchanges.iter().map(line).collect();
        if lines.is_empty() {
            lines.push([0; ENTRY_WORDS]);
        }
        lines.as_flattened().iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Whether some window has bytes that no buffer covers, which whole-buffer copies cannot reset.
    pub(crate) fn has_slack(&self) -> bool {
        self.domains.iter().any(|d| {
            let named = d.request.buffers.iter().fold(0u64, |sum, b| sum.saturating_add(b.nbytes));
            named < d.request.window_bytes
        })
    }
}

/// Where the cells of a signal buffer that starts at `offset` of its window begin, if they can be aligned.
fn aligned_cells(offset: u64, nbytes: u64, chips: u32) -> Option<u64> {
    let skip = offset.checked_next_multiple_of(CELL_BYTES)? - offset;
    (skip.checked_add(CELL_BYTES * u64::from(chips))? <= nbytes).then_some(skip)
}
