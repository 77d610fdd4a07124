//! The graph builder.

use std::sync::Arc;

use pto_dispatch::sys::{Access, CallableSpec, DataType};
use pto_dispatch::{
    Args, Build, Error, HostBuffer, Lease, Parameter, ParameterKind, Program, ProgramResult, ProgramSpec,
};

use super::kernel;
use super::model::{ROWS_PER_CHIP, WORD, input};
use super::plan::{DomainPlan, Exchange, ProgramPlan};

/// Positions of the callables.
mod callable {
    pub(super) const EXCHANGE: usize = 0;
    pub(super) const PHASE: usize = 1;
}

/// Positions of the arguments.
pub(crate) mod argument {
    /// Host buffer: the input vector.
    pub(crate) const INPUT: usize = 0;
    /// Host buffer: results of all ranks.
    pub(crate) const OUTPUT: usize = 1;
    /// Host buffer: the exchanges, for the kernels.
    pub(crate) const TABLE: usize = 2;
    /// Scalar: the phase, from 0.
    pub(crate) const PHASE: usize = 3;
    /// Host buffers from here on: one for each rank of each exchange that is ordered by runs.
    pub(crate) const CARRY: usize = 4;
}

/// How the program decides whether a window is fresh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trust {
    /// It asks: windows are fresh unless they are kept between dispatches without a reset; then it uses epochs.
    Informed,
    /// It takes every window for fresh. Wrong where windows keep their contents.
    Blind,
}

/// A sharded step over the domains of one plan.
#[derive(Debug)]
pub(crate) struct ShardedStep {
    plan: Arc<ProgramPlan>,
    spec: ProgramSpec,
    trust: Trust,
}

impl ShardedStep {
    /// The program of a plan.
    pub(crate) fn new(plan: &Arc<ProgramPlan>, trust: Trust) -> Self {
        // The same two kernels for every program.
        let mut spec = ProgramSpec::new(plan.name.as_str())
            .callable(CallableSpec::chip(kernel::EXCHANGE, kernel::exchange_signature()))
            .callable(CallableSpec::chip(kernel::PHASE, kernel::phase_signature()))
            .parameter(Parameter::host("input", input_bytes(plan)))
            // Of any size: requests of several programs share one output buffer, large enough for each of them.
            .parameter(Parameter { name: "output".into(), kind: ParameterKind::Host { nbytes: None } })
            .parameter(Parameter::host("table", plan.table().len() as u64))
            .parameter(Parameter::scalar("phase"));
        for (index, exchange) in plan.run_ordered() {
            for rank in 0..plan.ranks() {
                spec = spec.parameter(Parameter::host(format!("carry of {index} on {rank}"), exchange.nbytes));
            }
        }
        Self { plan: Arc::clone(plan), spec, trust }
    }

    fn fresh(&self, build: &Build<'_>) -> bool {
        self.trust == Trust::Blind || !build.is_persistent() || build.is_resetting()
    }

    fn exchange_domain<'b>(
        &self,
        build: &Build<'b>,
        args: &Args,
        domain: &DomainPlan,
        lease: &Lease<'b>,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let mut group = build.group(callable::EXCHANGE)?;
        for (rank, chip) in domain.request.workers.iter().enumerate() {
            let [input, table, output] = self.tensors(build, args, &domain.exchanges, rank)?;
            group = group
                .member(*chip)
                .tensor(input)
                .tensor(table)
                .tensor(output)
                .scalar(lease.device_context(*chip)?)
                .scalar(domain.exchanges.start as u64)
                .scalar(domain.exchanges.len() as u64)
                .scalar(lease.epoch())
                .scalar(u64::from(self.fresh(build)));
        }
        Ok(group.submit()?)
    }

    fn exchange_phase<'b>(
        &self,
        build: &Build<'b>,
        args: &Args,
        (index, exchange, carries): (usize, &Exchange, usize),
        lease: &Lease<'b>,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let phase = args.scalar_at(argument::PHASE)?;
        let mut group = build.group(callable::PHASE)?;
        for (rank, chip) in self.plan.domains[exchange.domain].request.workers.iter().enumerate() {
            let [input, table, output] = self.tensors(build, args, &(index..index + 1), rank)?;
            let carry = bytes(build, args.host_at(carries + rank)?, 0, exchange.nbytes, Access::InOut)?;
            group = group
                .member(*chip)
                .tensor(input)
                .tensor(table)
                .tensor(output)
                .tensor(carry)
                .scalar(lease.device_context(*chip)?)
                .scalar(index as u64)
                .scalar(1)
                .scalar(phase)
                .scalar(u64::from(self.fresh(build)));
        }
        Ok(group.submit()?)
    }

    fn tensors<'b>(
        &self,
        build: &Build<'b>,
        args: &Args,
        exchanges: &std::ops::Range<usize>,
        rank: usize,
    ) -> Result<[pto_dispatch::Tensor<'b>; 3], Box<dyn std::error::Error + Send + Sync>> {
        let input = args.host_at(argument::INPUT)?;
        let rows = u32::try_from(input.nbytes() / WORD)?;
        let input = build.tensor(input, &[rows], DataType::Uint32, Access::Input)?;
        let table = args.host_at(argument::TABLE)?;
        let words = u32::try_from(table.nbytes() / size_of::<u64>() as u64)?;
        let table = build.tensor(table, &[words], DataType::Uint64, Access::Input)?;
        let range = self.plan.output(exchanges, rank).ok_or("a domain without exchanges has no results")?;
        let output = args.host_at(argument::OUTPUT)?;
        let output = bytes(build, output, range.start, range.end - range.start, Access::OutputExisting)?;
        Ok([input, table, output])
    }
}

/// A tensor over `nbytes` bytes of a host buffer from `offset` on.
fn bytes<'b>(
    build: &Build<'b>,
    buffer: &HostBuffer,
    offset: u64,
    nbytes: u64,
    access: Access,
) -> Result<pto_dispatch::Tensor<'b>, Box<dyn std::error::Error + Send + Sync>> {
    Ok(build.tensor(buffer, &[u32::try_from(nbytes)?], DataType::Uint8, access)?.at(offset))
}

impl Program for ShardedStep {
    fn spec(&self) -> &ProgramSpec {
        &self.spec
    }

    fn build<'b>(&self, build: &Build<'b>, args: &Args) -> ProgramResult {
        let phase = args.scalar_at(argument::PHASE)?;
        // Every lease comes before the first task: a domain that is not retained yet is refused after it. Later
        // phases concern only the domains that need them.
        let leases = self
            .plan
            .domains
            .iter()
            .map(|d| {
                let takes_part = phase == 0 || !d.signalled && !d.exchanges.is_empty();
                takes_part.then(|| build.lease(&d.name, &d.request)).transpose()
            })
            .collect::<Result<Vec<Option<Lease<'b>>>, Error>>()?;
        let mut carries = argument::CARRY;
        let mut phased = Vec::new();
        for (index, exchange) in self.plan.run_ordered() {
            if let Some(lease) = &leases[exchange.domain] {
                phased.push((index, exchange, carries, lease));
            }
            carries += self.plan.ranks();
        }
        if phase > 0 {
            for &(_, exchange, carries, lease) in &phased {
                for (rank, chip) in lease.request().workers.iter().enumerate() {
                    build.copy_to(&lease.buffer_at(*chip, exchange.buffer)?, args.host_at(carries + rank)?)?;
                }
            }
        }
        for (index, domain) in self.plan.domains.iter().enumerate() {
            if let Some(lease) = &leases[index]
                && domain.signalled
                && !domain.exchanges.is_empty()
            {
                self.exchange_domain(build, args, domain, lease)?;
            }
        }
        for (index, exchange, carries, lease) in phased {
            self.exchange_phase(build, args, (index, exchange, carries), lease)?;
        }
        Ok(())
    }
}

/// Bytes of the input vector: one word for each row.
pub(crate) fn input_bytes(plan: &ProgramPlan) -> u64 {
    (plan.ranks() * ROWS_PER_CHIP) as u64 * WORD
}

/// The input vector of the request named by `seed`.
pub(crate) fn input_vector(plan: &ProgramPlan, seed: u64) -> Vec<u8> {
    (0..plan.ranks() * ROWS_PER_CHIP).flat_map(|row| input(seed, row).to_le_bytes()).collect()
}
