//! The devices that C holds. A `cushion_device*` is a number, never followed: one that was destroyed, or never
//! was a device, is found out instead of crashing, and a device stays while a call on another thread uses it.

use std::ffi::c_void;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use cushion::Device;

use crate::status::{Failure, Status};

/// The most devices at once.
const PLACES: usize = 1024;

static TABLE: [Place; PLACES] =
    [const { Place(RwLock::new(Entry { turn: 1, held: None })) }; PLACES];

/// One place of the table; apart from its neighbours, so that devices do not slow each other.
#[repr(align(64))]
struct Place(RwLock<Entry>);

struct Entry {
    /// Which device this place is at: the next one to stand here has another handle.
    turn: usize,
    held: Option<Held>,
}

/// A device, as C holds it.
pub(crate) struct Held {
    pub(crate) device: Device,
    /// Whether its cache belongs to the handle alone.
    pub(crate) own: bool,
}

/// `cushion_device*`: place and turn.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handle(*mut c_void);

impl Handle {
    pub(crate) const NULL: Self = Self(std::ptr::null_mut());

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// A handle for a device.
    pub(crate) fn open(held: Held) -> Result<Self, Failure> {
        for (index, place) in TABLE.iter().enumerate() {
            // A place that somebody looks at has a device, or soon will be free again.
            let Ok(mut entry) = place.0.try_write() else { continue };
            if entry.held.is_none() {
                entry.held = Some(held);
                let number = entry.turn * PLACES + index;
                return Ok(Self(std::ptr::without_provenance_mut(number)));
            }
        }
        let text = format!("{PLACES} devices are in use: destroy one before the next is made");
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

    /// Takes the device from C, once the calls under way on it are done.
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
    fn a_handle_is_good_until_it_is_closed() {
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
