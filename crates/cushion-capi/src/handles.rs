//! The devices that C holds. A `cushion_device*` is a number that is looked up and never
//! dereferenced: an unknown or destroyed handle is an error, not a crash. A device stays alive
//! while a call on another thread uses it.

use std::ffi::c_void;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use cushion::Device;

use crate::status::{Failure, Status};

/// The largest number of open devices.
const PLACES: usize = 1024;

static TABLE: [Place; PLACES] =
    [const { Place(RwLock::new(Entry { turn: 1, held: None })) }; PLACES];

/// One slot of the table, on its own cache line, so that calls on different devices do not slow
/// each other.
#[repr(align(64))]
struct Place(RwLock<Entry>);

struct Entry {
    /// Counts the devices that had this slot, so that an old handle does not match a new device.
    turn: usize,
    held: Option<Held>,
}

/// A device behind a handle.
pub(crate) struct Held {
    pub(crate) device: Device,
    /// Whether the cache belongs to this handle alone.
    pub(crate) own: bool,
}

/// `cushion_device*`: slot and turn in one number.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handle(*mut c_void);

impl Handle {
    pub(crate) const NULL: Self = Self(std::ptr::null_mut());

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Makes a handle for a device.
    pub(crate) fn open(held: Held) -> Result<Self, Failure> {
        for (index, place) in TABLE.iter().enumerate() {
            // A locked slot holds a device or is being closed: skip it.
            let Ok(mut entry) = place.0.try_write() else { continue };
            if entry.held.is_none() {
                entry.held = Some(held);
                let number = entry.turn * PLACES + index;
                return Ok(Self(std::ptr::without_provenance_mut(number)));
            }
        }
        let text = format!("{PLACES} devices are in use: destroy one before making another");
        Err(Failure::new(Status::InvalidArgument, text))
    }

    /// Runs `f` with the device, which is not destroyed meanwhile.
    pub(crate) fn with<T>(
        self,
        f: impl FnOnce(&Device) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let (place, turn) = self.place()?;
        let entry: RwLockReadGuard<'_, Entry> =
            place.0.read().unwrap_or_else(PoisonError::into_inner);
        match &entry.held {
            Some(held) if entry.turn == turn => f(&held.device),
            _ => Err(self.unknown()),
        }
    }

    /// Removes the device from the table, after the calls in progress on it.
    pub(crate) fn close(self) -> Result<Held, Failure> {
        let (place, turn) = self.place()?;
        let mut entry: RwLockWriteGuard<'_, Entry> =
            place.0.write().unwrap_or_else(PoisonError::into_inner);
        if entry.turn != turn {
            return Err(self.unknown());
        }
        let held = entry.held.take().ok_or_else(|| self.unknown())?;
        entry.turn += 1;
        Ok(held)
    }

    fn place(self) -> Result<(&'static Place, usize), Failure> {
        if self.is_null() {
            return Err(Failure::null("device"));
        }
        let number = self.0.addr();
        Ok((&TABLE[number % PLACES], number / PLACES))
    }

    fn unknown(self) -> Failure {
        let text = format!("{:#x} is no device: it was destroyed, or never made", self.0.addr());
        Failure::new(Status::InvalidArgument, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_valid_until_it_is_closed() {
        let held = || Held { device: Device::simulated(1 << 30), own: true };
        let first = Handle::open(held()).unwrap();
        assert!(first.with(|device| Ok(device.is_simulated())).unwrap());
        drop(first.close().unwrap());
        let second = Handle::open(held()).unwrap();
        for stale in [first, Handle::NULL, Handle(std::ptr::without_provenance_mut(usize::MAX))] {
            assert_ne!(stale, second);
            let refused = stale.with(|_| Ok(())).unwrap_err();
            assert_eq!(refused.status, Status::InvalidArgument);
            assert!(stale.close().is_err());
        }
        drop(second.close().unwrap());
    }
}
