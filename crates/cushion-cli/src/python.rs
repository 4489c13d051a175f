//! `cushion run` belongs to the Python package: the plain binary starts it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Replaces this process by `python3 -m cushion run`; returns only if that cannot be started.
pub(crate) fn hand_over(program: &[OsString]) -> anyhow::Error {
    let mut command = Command::new("python3");
    command.args(["-m", "cushion", "run"]).args(program);
    let error = command.exec();
    anyhow::anyhow!(
        "cushion run needs python3 with the package cushion: python3 cannot be started: {error}"
    )
}
