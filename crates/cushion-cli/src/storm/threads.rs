//! A storm on real threads and real time.

use std::io::Write;
use std::time::Duration;

use super::{Plan, Told};
use crate::Streams;

pub(crate) fn run_all<O: Write, T: Write>(
    _plan: &Plan,
    _watchdog: Duration,
    _told: &mut Told,
    _streams: &mut Streams<O, T>,
) {
}
