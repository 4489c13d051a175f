//! The tests of the engine through its public interface, in one program: each program that uses the
//! engine compiles it again, for its own drivers.

mod bounds;
mod callbacks;
mod common;
mod drivers;
mod engine;
mod figures;
mod fuzz;
mod growth;
mod ladder;
mod paged;
mod paged_failures;
mod pages;
mod pools;
mod proof;
mod properties;
mod races;
mod restore;
mod threads;
mod trim;
mod waiting;
