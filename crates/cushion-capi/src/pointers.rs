//! Arguments that C passes by pointer: result pointers, texts, and device addresses, which are
//! never dereferenced here.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;

use cushion::StreamId;

use crate::status::{Failure, Status};

/// A result pointer. Only a C caller makes one, as an argument of a function whose `# Safety`
/// section states the conditions.
#[repr(transparent)]
#[derive(Debug)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Checks the pointer and stores `value`, which stays there if the call fails later.
    pub(crate) fn begin(&self, argument: &str, value: T) -> Result<Place<T>, Failure> {
        let place = Place(self.place(argument)?);
        place.give(value);
        Ok(place)
    }

    pub(crate) fn place(&self, argument: &str) -> Result<NonNull<T>, Failure> {
        NonNull::new(self.0).ok_or_else(|| Failure::null(argument))
    }
}

/// A result pointer that is not null.
pub(crate) struct Place<T>(NonNull<T>);

impl<T> Place<T> {
    pub(crate) fn give(&self, value: T) {
        // SAFETY: the pointer is not null, so the caller guarantees that it points to writable
        // memory for a `T` during the call. A `Place` is made during a call and does not outlive
        // it.
        unsafe { self.0.write(value) };
    }
}

/// A text from C, or null. The same conditions apply.
#[repr(transparent)]
#[derive(Debug)]
pub struct Text(*const c_char);

impl Text {
    /// Returns the text, or `None` if the pointer is null.
    pub(crate) fn get(&self, argument: &str) -> Result<Option<String>, Failure> {
        if self.0.is_null() {
            return Ok(None);
        }
        // SAFETY: the pointer is not null, so the caller guarantees that it points to a text that
        // ends in a zero byte. The text is copied before this function returns.
        let text = unsafe { CStr::from_ptr(self.0) };
        let text = text.to_str().map_err(|_| {
            let what = format!("the argument `{argument}` is not UTF-8: {text:?}");
            Failure::new(Status::InvalidArgument, what)
        })?;
        Ok(Some(text.to_owned()))
    }
}

/// Returns a stream handle or a device address as a number.
pub(crate) fn address(pointer: *mut c_void) -> u64 {
    pointer.expose_provenance() as u64
}

pub(crate) fn stream_id(stream: *mut c_void) -> StreamId {
    StreamId(address(stream))
}

pub(crate) fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(size(address))
}

/// Returns a number of bytes as `size_t`.
pub(crate) fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
