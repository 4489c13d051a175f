//! Random programs for property tests and fuzzing: actions, a world that runs them, and a model of
//! what the engine promises.
//!
//! A [`World`] runs each [`Program`] on an engine over a [`CheckedDriver`](crate::CheckedDriver) over a
//! [`SimDriver`](crate::SimDriver). After every action the engine's own invariants are checked, and the model's: no two
//! live blocks share a byte, no memory is handed out while another stream may still be at work on it, none is taken from
//! under a graph's replay, and the figures agree with what was asked for. It panics at the first that does not hold.
//! [`stress`] does the like on real threads.

mod action;
pub mod churn;
pub mod contract;
mod gpu;
mod program;
mod real_clock;
mod threads;
mod world;

pub use action::Action;
pub use program::{Program, Setup, Summary, run_programs};
pub use real_clock::RealClock;
#[doc(hidden)]
pub use threads::{Stress, Stressed, stress};
pub use world::{Futures, World};

/// The device the world simulates: small, so that memory runs out often.
pub const CAPACITY: u64 = 256 << 20;
