//! What is printed, and written as JSON.

use std::time::Duration;

use serde_json::{Value, json};

use crate::driver::{Mode, ProgramReport, Setup};
use crate::runtime::Runtime;

/// A size with its unit.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// The nearest-rank percentile; zero where there are no samples.
pub(crate) fn percentile(samples: &[Duration], percent: usize) -> Duration {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or_default()
}

fn percentiles(samples: &[Duration]) -> String {
    let millis = |percent| percentile(samples, percent).as_secs_f64() * 1e3;
    format!("{:.2} / {:.2}", millis(50), millis(99))
}

/// One table per program, one row per mode.
pub(crate) fn tables(programs: &[&str], reports: &[ProgramReport]) -> String {
    let mut text = String::new();
    for program in programs {
        let of_program: Vec<&ProgramReport> = reports.iter().filter(|r| r.program == *program).collect();
        let elements: u64 = of_program.iter().map(|r| r.elements()).sum();
        text.push_str(&format!("{program} ({elements} elements checked)\n{}\n", table(&of_program)));
    }
    text
}

fn table(reports: &[&ProgramReport]) -> String {
    const HEAD: [&str; 9] = [
        "mode",
        "dispatches",
        "allocations",
        "reuses",
        "bytes zeroed",
        "peak staging",
        "submit p50/p99 ms",
        "total p50/p99 ms",
        "mismatches",
    ];
    let mut rows = vec![HEAD.map(str::to_owned)];
    rows.extend(reports.iter().map(|r| {
        [
            r.mode.to_string(),
            r.stats.dispatches.to_string(),
            r.stats.allocations.to_string(),
            r.stats.reuses.to_string(),
            bytes(r.stats.zeroed_bytes),
            bytes(r.stats.peak_staging_bytes),
            percentiles(&r.submit),
            percentiles(&r.total),
            r.mismatches().to_string(),
        ]
    }));
    let widths: Vec<usize> =
        (0..HEAD.len()).map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0)).collect();
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            // Names to the left, numbers to the right.
            if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        text.push_str(&format!("  {}\n", cells.collect::<Vec<_>>().join("  ").trim_end()));
        if index == 0 {
            text.push_str(&format!("  {}\n", "-".repeat(widths.iter().sum::<usize>() + 2 * (widths.len() - 1))));
        }
    }
    text
}

/// The median total of one mode, averaged over programs.
fn median_total(reports: &[ProgramReport], mode: Mode) -> Option<f64> {
    let medians: Vec<f64> =
        reports.iter().filter(|r| r.mode == mode).map(|r| percentile(&r.total, 50).as_secs_f64()).collect();
    let mean = medians.iter().sum::<f64>() / medians.len() as f64;
    (mean > 0.0).then_some(mean)
}

/// The ratio between the modes, in one line.
pub(crate) fn conclusion(reports: &[ProgramReport], runtime: &Runtime) -> String {
    let [Some(base), Some(reset), Some(epochs)] = Mode::CORRECT.map(|mode| median_total(reports, mode)) else {
        return format!("nothing was measured on {runtime}");
    };
    format!(
        "on {runtime}, domains per request : persistent with reset : persistent with epochs = 1 : {:.2} : {:.2} \
         (median total of a dispatch, mean over programs; {})",
        reset / base,
        epochs / base,
        runtime.caution()
    )
}

/// Everything that was measured. Times are in seconds.
pub(crate) fn to_json(reports: &[ProgramReport], setup: &Setup, runtime: &Runtime) -> Value {
    let times = |samples: &[Duration]| {
        json!({
            "p50": percentile(samples, 50).as_secs_f64(),
            "p99": percentile(samples, 99).as_secs_f64(),
            "samples": samples.iter().map(Duration::as_secs_f64).collect::<Vec<_>>(),
        })
    };
    let rows: Vec<Value> = reports
        .iter()
        .map(|r| {
            json!({
                "program": r.program,
                "mode": r.mode.name(),
                "requests": r.verdicts.len(),
                "dispatches": r.stats.dispatches,
                "allocations": r.stats.allocations,
                "reuses": r.stats.reuses,
                "zeroed_bytes": r.stats.zeroed_bytes,
                "reset_copies": r.stats.reset_copies,
                "staging_buffers": r.stats.staging_buffers,
                "peak_staging_bytes": r.stats.peak_staging_bytes,
                "submit_seconds": times(&r.submit),
                "total_seconds": times(&r.total),
                "elements": r.elements(),
                "mismatches": r.mismatches(),
                "wrong_requests": r.verdicts.iter().filter(|v| v.mismatches > 0).count(),
            })
        })
        .collect();
    json!({
        "backend": runtime.to_string(),
        "chips": setup.chips,
        "depth": setup.depth,
        "iterations": setup.iterations,
        "granularity": format!("{:?}", setup.mapping),
        "results": rows,
    })
}
