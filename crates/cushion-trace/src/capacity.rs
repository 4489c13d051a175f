//! The smallest device on which a program passes.

use cushion_core::DriverError;
use cushion_core::size::MIB;

use crate::program::Program;
use crate::replay::{ReplayConfig, UNLIMITED, replay};

/// How near the answer comes.
pub const CAPACITY_STEP: u64 = 2 * MIB;

/// The smallest capacity with which every request of the program is served, those that PyTorch
/// refused among them, to [`CAPACITY_STEP`]; `None` if no device is large enough. `tried` is called
/// after each run with how many there were and about how many there will be.
///
/// It can be below the floor: the floor takes memory that waits for another stream as live until the
/// trace says the work was done, and a short allocator waits for it itself.
///
/// With this capacity the program passes, and with one step less it does not. Whether it would pass
/// again with much less is not asked: a layout can be lucky.
///
/// # Errors
///
/// Only if the simulated driver refuses a call, which means a bug in the engine.
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
    // Below the floor nothing passes, unless by waiting for another stream's work before the trace
    // says it was done. What an unlimited run held is enough, or nearly: PyTorch asks for room for a
    // whole segment, even where it then takes less.
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
