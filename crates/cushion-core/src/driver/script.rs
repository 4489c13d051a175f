//! The script of a simulated device: the calls that fail, and the addresses that calls return.

use std::collections::VecDeque;

use super::{Call, Fault};

/// When a scripted failure occurs. Calls are counted from the moment of scripting; the first is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailWhen {
    /// The n-th call of one kind.
    Nth(Call, u64),
    /// The n-th call of any kind.
    NthOfAny(u64),
    /// Every call of one kind, until
    /// [`SimDriver::clear_failures`](super::SimDriver::clear_failures).
    Every(Call),
}

/// Failures and addresses that calls have not used yet.
#[derive(Debug, Default)]
pub(super) struct Script {
    failures: Vec<(FailWhen, Fault)>,
    /// The call, its size, and the address that it returns.
    places: VecDeque<(Call, u64, u64)>,
}

impl Script {
    pub(super) fn fail(&mut self, when: FailWhen, fault: Fault) {
        self.failures.push((when, fault));
    }

    pub(super) fn clear_failures(&mut self) {
        self.failures.clear();
    }

    /// Counts a call and returns its scripted failure, if any.
    pub(super) fn strike(&mut self, call: Call) -> Option<Fault> {
        let mut struck = None;
        self.failures.retain_mut(|(when, fault)| {
            let left = match when {
                FailWhen::Every(kind) => {
                    if *kind == call {
                        struck = Some(*fault);
                    }
                    return true;
                }
                FailWhen::Nth(kind, left) if *kind == call => left,
                FailWhen::NthOfAny(left) => left,
                FailWhen::Nth(..) => return true,
            };
            *left = left.saturating_sub(1);
            if *left == 0 {
                struck = Some(*fault);
            }
            *left > 0
        });
        struck
    }

    pub(super) fn place_next(&mut self, call: Call, bytes: u64, address: u64) {
        self.places.push_back((call, bytes, address));
    }

    pub(super) fn clear_places(&mut self) {
        self.places.clear();
    }

    /// Removes and returns the scripted address of this call. The size of a reserved range does not
    /// have to match.
    pub(super) fn place(&mut self, call: Call, bytes: u64) -> Option<u64> {
        let matches = |&(kind, size, _): &(Call, u64, u64)| {
            kind == call && (call == Call::Reserve || size == bytes)
        };
        let index = self.places.iter().position(matches)?;
        self.places.remove(index).map(|(_, _, address)| address)
    }
}
