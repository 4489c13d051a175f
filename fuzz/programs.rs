//! What the fuzz target of the engine does with its bytes: shared by the target and by a short run
//! of it in `crates/cushion-core/tests/all/fuzz.rs`.

use cushion_core::testing::Program;

/// Runs the program that the bytes stand for, with everything checked after each action.
pub(crate) fn run(bytes: &[u8]) {
    Program::read(bytes).run();
}
