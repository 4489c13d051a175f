#![no_main]

#[path = "../programs.rs"]
mod programs;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| programs::run(bytes));
