//! The life of a retained domain without any backend: first use, two warm dispatches, a changed request, close.
//!
//! `cargo run -p pto-domain --example retained_domain`

use std::error::Error;

use pto_domain::{DomainTable, ProgramIndex, ReleaseOutcome, check_request};
use pto_simpler_sys::{BufferWindow, ChipId, DomainAllocation, DomainId, DomainRequest, MemberWindow, NamedBuffer};

/// What a backend would answer: every window at the same address of its chip, buffers back to back.
fn allocate(id: DomainId, request: &DomainRequest) -> DomainAllocation {
    let base = 0x1000;
    let mut reply = DomainAllocation::new();
    reply.begin(id, request.buffers.len());
    for (rank, chip) in (0..).zip(&request.workers) {
        let buffers = request.buffers.iter().scan(base, |address, buffer| {
            let window = BufferWindow { address: *address, nbytes: buffer.nbytes };
            *address += buffer.nbytes;
            Some(window)
        });
        let mapped_bytes = request.window_bytes.next_multiple_of(4096);
        reply.push_member(MemberWindow { chip: *chip, rank, device_context: 0xC0, base, mapped_bytes }, buffers);
    }
    reply
}

fn main() -> Result<(), Box<dyn Error>> {
    let decode = ProgramIndex::new(0);
    let buffers = vec![NamedBuffer::bytes("data", 192), NamedBuffer::bytes("signal", 64)];
    let request = DomainRequest::packed([0, 1], buffers);
    check_request(&request, 2, 64)?;

    let (mut table, authority) = DomainTable::new(1);
    for _ in 0..3 {
        let slot = match table.lookup(decode, "comm_d0", &request)? {
            Some(slot) => slot,
            None => table.insert(decode, "comm_d0", &request, allocate(DomainId::new(0, 1), &request))?,
        };
        let lease = table.lease(slot, &authority)?;
        let signal = lease.buffer(ChipId(1), "signal")?;
        println!(
            "dispatch {}: {} {} on {}, signal at {:#x}, {} of {} bytes",
            lease.epoch(),
            if lease.is_first_use() { "allocated" } else { "leases" },
            lease.key(),
            signal.chip(),
            signal.address(),
            signal.nbytes(),
            lease.window_bytes(),
        );
        table.commit_lease(slot)?;
    }

    let larger = DomainRequest { window_bytes: 512, ..request };
    match table.lookup(decode, "comm_d0", &larger) {
        Ok(_) => return Err("a changed request was served".into()),
        Err(error) => println!("refused: {error}"),
    }

    table.stop_leasing();
    for slot in table.release_plan() {
        let id = table.begin_release(slot)?;
        table.finish_release(slot, ReleaseOutcome::Freed)?;
        if let Some(domain) = table.domain(slot) {
            println!("close: {} ({id}) is {} after {} dispatches", domain.key(), domain.phase(), domain.epoch());
        }
    }
    Ok(())
}
