//! Shortages: what is tried when neither a free block nor the driver serves a request.
//!
//! A request climbs a [`ladder`] of rungs until it is served or refused. No rung holds the engine's lock while it waits, calls
//! the program back, or lets the driver wait for the device. Every shortage leaves a receipt.

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

/// What a shortage needs beside memory.
#[derive(Debug)]
pub(crate) struct Desk {
    pub(crate) callbacks: Callbacks,
    pub(crate) receipts: Receipts,
    pub(crate) waited: Waited,
    /// Where the random part of pauses begins.
    pub(crate) seed: u64,
}

/// One engine, for requests that climb the ladder.
#[derive(Debug)]
pub(crate) struct Climber<'a, D> {
    pub(crate) shared: &'a Shared<D>,
    pub(crate) desk: &'a Desk,
}

// By hand, because deriving would ask the same of `D`.
impl<D> Clone for Climber<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D> Copy for Climber<'_, D> {}
