//! Shortages: the steps tried when neither a free block nor the driver serves a request.
//!
//! A request climbs a [`ladder`] of rungs until it is served or refused. No rung holds the engine's
//! lock while it waits, calls a callback, or lets the driver wait for the device. Every shortage is
//! recorded in a receipt.

mod borrow;
pub(crate) mod callbacks;
mod candidates;
pub(crate) mod climb;
mod end;
mod give_back;
mod ladder;
pub(crate) mod receipts;
mod rungs;
mod wait;

use self::callbacks::Callbacks;
use self::climb::Waited;
use self::receipts::Receipts;
use crate::core::Shared;

/// Callbacks, receipts and waiting time: the state of shortages outside the engine's lock.
#[derive(Debug)]
pub(crate) struct Desk {
    pub(crate) callbacks: Callbacks,
    pub(crate) receipts: Receipts,
    pub(crate) waited: Waited,
    /// The seed of the random part of pauses.
    pub(crate) seed: u64,
}

/// One engine, as a request on the ladder uses it.
#[derive(Debug)]
pub(crate) struct Climber<'a, D> {
    pub(crate) shared: &'a Shared<D>,
    pub(crate) desk: &'a Desk,
}

// By hand: `derive` would require `D: Clone` and `D: Copy`.
impl<D> Clone for Climber<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D> Copy for Climber<'_, D> {}
