//! Random programs for property tests and fuzzing: actions, a world that runs them, and a model of
//! the engine's promises.
//!
//! A [`World`] runs each [`Program`] on an engine, on a [`CheckedDriver`](crate::CheckedDriver)
//! that wraps a [`SimDriver`](crate::SimDriver). After every action it checks the engine's own
//! invariants and the promises of the model:
//!
//! - No two live blocks share a byte.
//! - The engine hands out no memory that another stream may still work on.
//! - Memory that a graph's replay uses stays in place.
//! - The figures agree with the requests.
//!
//! The world panics at the first violation. [`stress`] runs a similar load on real threads.

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

/// The capacity of the simulated device: small, so that memory runs out often.
pub const CAPACITY: u64 = 256 << 20;
