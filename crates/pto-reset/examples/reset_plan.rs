//! What zeroing one domain takes on each kind of backend, and why a window with slack is refused on some.
//!
//! `cargo run -p pto-reset --example reset_plan`

use std::error::Error;
use std::sync::Arc;

use pto_reset::{CoveredWindow, Method, ResetPlan};
use pto_simpler_sys::{
    BufferWindow, Capabilities, CopyGranularity, DomainAllocation, DomainId, DomainRequest, HostBufferId,
    MemberWindow, NamedBuffer,
};

/// What a backend would answer that maps windows in pages of 4 KiB.
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
    let buffers = vec![NamedBuffer::bytes("data", 3 << 20), NamedBuffer::bytes("signal", 100)];
    let packed = Arc::new(DomainRequest::packed([0, 1], buffers));
    let mut with_slack = DomainRequest::clone(&packed);
    with_slack.window_bytes += 28;
    let with_slack = Arc::new(with_slack);

    let id = DomainId::new(0, 1);
    for (granularity, device_fill) in [
        (CopyGranularity::WholeBuffer, false),
        (CopyGranularity::ByteRange, false),
        (CopyGranularity::WholeBuffer, true),
        (CopyGranularity::ByteRange, true),
    ] {
        let mut capabilities = Capabilities::new("a2a3sim", "tensormap_and_ringbuffer", vec![0, 1]);
        capabilities.copy_granularity = granularity;
        capabilities.device_fill = device_fill;
        let method = Method::of(&capabilities);
        println!("{method:?}:");
        for request in [&packed, &with_slack] {
            let covered = match CoveredWindow::check(request, method) {
                Ok(covered) => covered,
                Err(error) => {
                    println!("  refused: {error}");
                    continue;
                }
            };
            let plan = ResetPlan::new(method, &[covered.map(id, &allocate(id, request))?])?;
            let sources: Vec<HostBufferId> =
                (0..).take(plan.sources()).map(|index| HostBufferId::new(index, 1)).collect();
            let mut copies = Vec::with_capacity(plan.copies());
            plan.write_copies(&sources, &mut copies)?;
            println!(
                "  {} bytes in {} copies, staging {:?} ({} bytes), first copy {:?}",
                plan.bytes(),
                plan.copies(),
                plan.staging_sizes(),
                plan.staging_bytes(),
                copies.first()
            );
        }
    }
    Ok(())
}
