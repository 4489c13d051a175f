//! What C passes by pointer: where results go, texts, and addresses of the device's that nobody here follows.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;

use cushion::StreamId;

use crate::status::{Failure, Status};

/// Where a result goes. Only a C caller makes one, as an argument of a function whose `# Safety` section says
/// what it must be.
#[repr(transparent)]
#[derive(Debug)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// The place, which holds `value` if the call fails later.
    pub(crate) fn begin(&self, argument: &str, value: T) -> Result<Place<T>, Failure> {
        let place = Place(self.place(argument)?);
        place.give(value);
        Ok(place)
    }

    pub(crate) fn place(&self, argument: &str) -> Result<NonNull<T>, Failure> {
        NonNull::new(self.0).ok_or_else(|| Failure::null(argument))
    }
}

/// Where a result goes, and not null.
pub(crate) struct Place<T>(NonNull<T>);

impl<T> Place<T> {
    pub(crate) fn give(&self, value: T) {
        // SAFETY: not null, so the caller has made it point to a place for a `T`, for the time of the call; it is made
        // during a call and lives no longer. Results leave through C's pointers only.
        unsafe { self.0.write(value) };
    }
}

/// A text of C's, or null; likewise.
#[repr(transparent)]
#[derive(Debug)]
pub struct Text(*const c_char);

impl Text {
    /// The text, if there is one.
    pub(crate) fn get(&self, argument: &str) -> Result<Option<String>, Failure> {
        if self.0.is_null() {
            return Ok(None);
        }
        // SAFETY: not null, so the caller has made it point to a text that ends in a zero byte. It is copied
        // before the function ends.
        let text = unsafe { CStr::from_ptr(self.0) };
        let text = text.to_str().map_err(|_| {
            let what = format!("the argument `{argument}` is not UTF-8: {text:?}");
            Failure::new(Status::InvalidArgument, what)
        })?;
        Ok(Some(text.to_owned()))
    }
}

/// A stream, or memory of the device: a number here.
pub(crate) fn address(pointer: *mut c_void) -> u64 {
    pointer.expose_provenance() as u64
}

pub(crate) fn stream_id(stream: *mut c_void) -> StreamId {
    StreamId(address(stream))
}

pub(crate) fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(size(address))
}

/// Bytes, as C counts them.
pub(crate) fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
