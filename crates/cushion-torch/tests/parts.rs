//! Files of the library that need no interpreter. The library itself has no test executable,
//! because it would have to link one; so they are compiled here, with the tests that they contain.

#![allow(dead_code, reason = "the library uses the rest")]

#[path = "../src/shortage/refusals.rs"]
mod refusals;
#[path = "../src/pytorch/threads.rs"]
mod threads;
