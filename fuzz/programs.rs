//! The body of the engine's fuzz target: shared by the target and by a short run of it in
//! `crates/cushion-core/tests/fuzz.rs`.

use cushion_core::testing::Program;

/// Runs the program that the bytes encode, with all checks after each action.
pub(crate) fn run(bytes: &[u8]) {
    Program::read(bytes).run();
}
