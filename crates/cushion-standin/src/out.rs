//! Pointers that C passes: where results go, and what is read.

use std::ffi::{CStr, c_char, c_int};

use crate::{Answer, INVALID_VALUE};

/// Where a result goes. Only a C caller makes one, as an argument of a function whose `# Safety`
/// section says what it must be.
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
        // SAFETY: not null, so the caller has made it point to a place for a `T`. Results leave
        // through C pointers only.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// As [`give`](Self::give), if the caller asked for it.
    pub(crate) fn give_if_asked(&self, value: T) {
        if !self.is_null() {
            let _ = self.give(value);
        }
    }

    /// What is there now.
    pub(crate) fn get(&self) -> Result<T, c_int>
    where
        T: Copy,
    {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, so the caller has made it point to a `T`. C passes it this way.
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
        // SAFETY: not null, so the caller has made it point to an array with the room that it told;
        // `values` was cut to that by the function. It is Rust's own memory, so they do not overlap.
        unsafe { self.0.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        Ok(())
    }
}

/// What is read, likewise.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) fn get(&self) -> Result<T, c_int> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, so the caller has made it point to a `T`. C passes it this way.
        Ok(unsafe { self.0.read() })
    }

    /// An array of as many as the caller told.
    pub(crate) fn get_all(&self, count: usize) -> Result<Vec<T>, c_int> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, so the caller has made it point to an array of `count`. It is copied
        // before the function ends.
        Ok(unsafe { std::slice::from_raw_parts(self.0, count) }.to_vec())
    }
}

impl In<c_char> {
    pub(crate) fn text(&self) -> Option<String> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: not null, so the caller has made it point to a text that ends in a zero byte. It is
        // copied before the function ends.
        let text = unsafe { CStr::from_ptr(self.0) };
        Some(text.to_string_lossy().into_owned())
    }
}
