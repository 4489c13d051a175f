//! Pointers that C passes: for results and for input.

use std::ffi::{CStr, c_char, c_int};

use crate::{Answer, INVALID_VALUE};

/// A result pointer. Only a C caller makes one, as an argument of a function whose `# Safety`
/// section states the conditions.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn give(&self, value: T) -> Answer {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the pointer is not null, so the caller guarantees that it points to memory for a
        // `T`.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Does as [`give`](Self::give), unless the pointer is null.
    pub(crate) fn give_if_asked(&self, value: T) {
        if !self.is_null() {
            let _ = self.give(value);
        }
    }

    /// Returns the present value.
    pub(crate) fn get(&self) -> Result<T, c_int>
    where
        T: Copy,
    {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the pointer is not null, so the caller guarantees that it points to a `T`.
        Ok(unsafe { self.0.read() })
    }

    /// Writes to an array that has room for `values`.
    pub(crate) fn give_all(&self, values: &[T]) -> Answer
    where
        T: Copy,
    {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the pointer is not null, so the caller guarantees an array with the room that it
        // stated; the function has cut `values` to that. `values` is memory of Rust's, so they do
        // not overlap.
        unsafe { self.0.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        Ok(())
    }
}

/// An input pointer. The same conditions apply.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) fn get(&self) -> Result<T, c_int> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the pointer is not null, so the caller guarantees that it points to a `T`.
        Ok(unsafe { self.0.read() })
    }

    /// Returns an array of `count` values.
    pub(crate) fn get_all(&self, count: usize) -> Result<Vec<T>, c_int> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the pointer is not null, so the caller guarantees an array of `count`. It is
        // copied before the function returns.
        Ok(unsafe { std::slice::from_raw_parts(self.0, count) }.to_vec())
    }
}

impl In<c_char> {
    pub(crate) fn text(&self) -> Option<String> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: the pointer is not null, so the caller guarantees a text that ends in a zero
        // byte. It is copied before the function returns.
        let text = unsafe { CStr::from_ptr(self.0) };
        Some(text.to_string_lossy().into_owned())
    }
}
