//! The `cushion` command: calls the library, as the Python wheel does.

use std::process::ExitCode;

fn main() -> ExitCode {
    cushion_cli::run(std::env::args_os()).into()
}
