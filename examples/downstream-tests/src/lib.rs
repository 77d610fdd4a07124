//! A team's own program: each chip counts in a window of its own and hands the count out.

use pto_dispatch::{Args, Build, Parameter, Program, ProgramResult, ProgramSpec};
use pto_simpler_sys::{Access, CallableSpec, ChipId, DataType, DomainRequest, NamedBuffer, Signature};

/// Adds 1 to the counter of each chip, then copies both counters into the host buffers `out0` and `out1`.
#[derive(Debug)]
pub struct Counter {
    spec: ProgramSpec,
}

impl Default for Counter {
    fn default() -> Self {
        let spec = ProgramSpec::new("counter")
            .callable(CallableSpec::chip("pto_add", Signature::new([Access::InOut], 1)))
            .callable(CallableSpec::chip("pto_copy", Signature::new([Access::Input, Access::OutputExisting], 0)))
            .parameter(Parameter::host("out0", 4))
            .parameter(Parameter::host("out1", 4));
        Self { spec }
    }
}

impl Counter {
    /// The one domain that the program asks for.
    pub fn request() -> DomainRequest {
        DomainRequest::packed([0, 1], vec![NamedBuffer::bytes("count", 64)])
    }
}

impl Program for Counter {
    fn spec(&self) -> &ProgramSpec {
        &self.spec
    }

    fn build<'b>(&self, build: &Build<'b>, args: &Args) -> ProgramResult {
        let lease = build.lease("counters", &Self::request())?;
        for (index, chip) in [ChipId(0), ChipId(1)].into_iter().enumerate() {
            let count = lease.buffer(chip, "count")?;
            let cell = build.tensor(&count, &[1], DataType::Int32, Access::InOut)?;
            build.task(0)?.tensor(cell).scalar(1).submit(chip)?;
            let from = build.tensor(&count, &[1], DataType::Int32, Access::Input)?;
            let out = build.tensor(args.host_at(index)?, &[1], DataType::Int32, Access::OutputExisting)?;
            build.task(1)?.tensor(from).tensor(out).submit(chip)?;
        }
        Ok(())
    }
}
