//! `cushion run` is the Python package's: this hands over to it, where this program is the plain one.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Becomes `python3 -m cushion run`; returns only if that cannot be started.
pub(crate) fn hand_over(program: &[OsString]) -> anyhow::Error {
    let mut command = Command::new("python3");
    command.args(["-m", "cushion", "run"]).args(program);
    let error = command.exec();
    anyhow::anyhow!(
        "cushion run needs python3 with the package cushion: python3 cannot be started: {error}"
    )
}
