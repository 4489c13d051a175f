//! The `cushion` command: a thin door to the library, which the Python wheel calls too.

use std::process::ExitCode;

fn main() -> ExitCode {
    cushion_cli::run(std::env::args_os()).into()
}
