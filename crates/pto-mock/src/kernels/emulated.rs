//! The emulator's versions of the portable kernels.

use pto_simpler_sys::{BackendError, Call, CallbackError, DomainAllocation, EntryValue, RuntimeFailure};

use super::{
    ADD, AWAIT, COPY, ENTRY, FAIL, GATE, HANDSHAKE, PEEK, RANK, SIGNAL, STORE, SUB_ADD, SUB_FAIL, entry_request,
    signature,
};
use crate::{Cell, DomainView, EmulatorBuilder, EntryContext, Kernel, KernelError, MemoryView, SubTask};

/// Adds the library to an emulator's named kernels.
#[must_use]
pub fn install(builder: EmulatorBuilder) -> EmulatorBuilder {
    builder
        .kernel(STORE, signature(STORE), store)
        .kernel(ADD, signature(ADD), |k| add(&k.tensor(0)?, k.scalar(0)?))
        .kernel(COPY, signature(COPY), |k| k.tensor(1)?.store(0, &k.tensor(0)?.to_vec()?))
        .kernel(SIGNAL, signature(SIGNAL), |k| signal(&k.domain(k.scalar(0)?)?, k.scalar(1)?))
        .kernel(AWAIT, signature(AWAIT), |k| await_cell(k, &k.tensor(0)?))
        .kernel(HANDSHAKE, signature(HANDSHAKE), |k| {
            signal(&k.domain(k.scalar(0)?)?, k.scalar(1)?)?;
            await_cell(k, &k.tensor(1)?)
        })
        .kernel(PEEK, signature(PEEK), peek)
        .kernel(RANK, signature(RANK), |k| {
            let domain = k.domain(k.scalar(0)?)?;
            k.tensor(0)?.store(0, &words(&[count(domain.rank())?, count(domain.size())?]))
        })
        .kernel(FAIL, signature(FAIL), |k| Err(KernelError::failed(format!("told to fail with {}", k.scalar(0)?))))
        .sub(GATE, signature(GATE), gate)
        .sub(SUB_ADD, signature(SUB_ADD), |k| add(&k.tensor(0)?, k.scalar(0)?))
        .sub(SUB_FAIL, signature(SUB_FAIL), |k| {
            Err(KernelError::failed(format!("told to fail with {}", k.scalar(0)?)))
        })
        .entry(ENTRY, entry)
}

fn entry(e: &mut EntryContext<'_>) -> Result<(), CallbackError> {
    e.host().domain(ENTRY, &entry_request(), &mut DomainAllocation::new())?;
    match e.arg("code") {
        Some(EntryValue::Scalar(0)) => Ok(()),
        Some(EntryValue::Scalar(code)) => {
            let message = format!("told to fail with {code}");
            Err(BackendError::from(RuntimeFailure::new(Call::RunEntry, "RuntimeError", message)).into())
        }
        other => {
            let message = format!("{ENTRY} takes a scalar called code; given {other:?}");
            Err(BackendError::misuse(Call::RunEntry, message).into())
        }
    }
}

/// The low 32 bits of a scalar.
const fn low(scalar: u64) -> i32 {
    (scalar & 0xFFFF_FFFF) as u32 as i32
}

fn count(n: usize) -> Result<i32, KernelError> {
    i32::try_from(n).map_err(|_| KernelError::failed(format!("{n} does not fit in 32 bits")))
}

fn words(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn store(k: &Kernel<'_>) -> Result<(), KernelError> {
    let (out, first) = (k.tensor(0)?, low(k.scalar(0)?));
    let values: Vec<i32> = (0..out.len() / 4).map(|i| first.wrapping_add(low(i))).collect();
    out.store(0, &words(&values))
}

fn add(view: &MemoryView, value: u64) -> Result<(), KernelError> {
    let mut bytes = view.to_vec()?;
    for word in bytes.chunks_exact_mut(4) {
        let sum = i32::from_ne_bytes([word[0], word[1], word[2], word[3]]).wrapping_add(low(value));
        word.copy_from_slice(&sum.to_ne_bytes());
    }
    view.store(0, &bytes)
}

fn own_cell(domain: &DomainView<'_>, offset: u64) -> Result<Cell, KernelError> {
    domain.window(domain.rank())?.cell(offset)
}

fn signal(domain: &DomainView<'_>, offset: u64) -> Result<(), KernelError> {
    let amount = count(domain.rank())?.wrapping_add(1);
    for rank in (0..domain.size()).filter(|rank| *rank != domain.rank()) {
        domain.window(rank)?.cell(offset)?.fetch_add(amount)?;
    }
    Ok(())
}

fn await_cell(k: &Kernel<'_>, out: &MemoryView) -> Result<(), KernelError> {
    let (context, offset, threshold) = (k.scalar(0)?, k.scalar(1)?, low(k.scalar(2)?));
    let value = own_cell(&k.domain(context)?, offset)?.wait(|value| value >= threshold)?;
    out.store(0, &value.to_ne_bytes())
}

fn peek(k: &Kernel<'_>) -> Result<(), KernelError> {
    let (domain, out) = (k.domain(k.scalar(0)?)?, k.tensor(0)?);
    let rank = usize::try_from(k.scalar(1)?).unwrap_or(usize::MAX);
    let mut bytes = out.to_vec()?;
    domain.window(rank)?.load(k.scalar(2)?, &mut bytes)?;
    out.store(0, &bytes)
}

fn gate(k: &SubTask<'_>) -> Result<(), KernelError> {
    let cells = k.tensor(0)?;
    cells.cell(4)?.store(1)?;
    cells.cell(0)?.wait(|value| value != 0).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::low;

    #[test]
    fn scalars_are_signed_in_their_low_32_bits() {
        assert_eq!([low(5), low(u64::from(u32::MAX)), low(1 << 40 | 7)], [5, -1, 7]);
    }
}
