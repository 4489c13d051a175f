//! The smallest device on which a program succeeds.

use cushion_core::DriverError;
use cushion_core::size::MIB;

use super::outcome::ReplayConfig;
use super::replay;
use crate::program::{Program, UNLIMITED};

/// The precision of [`min_capacity`], in bytes.
pub const CAPACITY_STEP: u64 = 2 * MIB;

/// Returns the smallest capacity, to [`CAPACITY_STEP`], with which every request of the program is
/// served, including those that PyTorch refused; `None` if no device is large enough. After each
/// replay, `tried` gets the number of replays so far and their estimated total.
///
/// The result can be below the floor: the floor counts pending memory as live until the trace
/// completes the free, while an allocator that is short of memory waits for it.
///
/// With this capacity the program succeeds, and with one step less it fails. A much smaller
/// capacity is not tried, though a lucky layout could make it succeed.
///
/// # Errors
///
/// Fails only if the simulated driver refuses a call, which means a bug in the engine.
pub fn min_capacity(
    program: &Program,
    config: &ReplayConfig,
    mut tried: impl FnMut(u32, u32),
) -> Result<Option<u64>, DriverError> {
    let mut runs = 0;
    let mut expected = 16;
    let mut peak_with = |steps: u64, expected: u32| -> Result<Option<u64>, DriverError> {
        let capacity = Some(steps.saturating_mul(CAPACITY_STEP));
        let outcome = replay(program, &ReplayConfig { capacity, ..config.clone() })?;
        runs += 1;
        tried(runs, expected.max(runs));
        Ok(outcome.oom.is_none().then_some(outcome.reserved_peak))
    };
    let Some(most) = peak_with(UNLIMITED / CAPACITY_STEP, expected)? else { return Ok(None) };
    // Below the floor every replay fails, unless it waits for pending frees before the trace
    // completes them. The peak of the unlimited replay is enough, or nearly: PyTorch checks the
    // limit for a whole segment even if it then allocates less.
    let floor = if program.waits() { 0 } else { program.floor_bytes(true) };
    let mut fails = (floor / CAPACITY_STEP).saturating_sub(1);
    let mut passes = most.div_ceil(CAPACITY_STEP).max(fails + 1);
    let mut more = 1;
    while peak_with(passes, expected)?.is_none() {
        fails = passes;
        passes += more;
        more *= 2;
    }
    expected = (passes - fails).ilog2() + 4;
    while passes - fails > 1 {
        let middle = fails + (passes - fails) / 2;
        if peak_with(middle, expected)?.is_some() {
            passes = middle;
        } else {
            fails = middle;
        }
    }
    Ok(Some(passes * CAPACITY_STEP))
}
