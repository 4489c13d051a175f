//! Each thread's last error message, and the wrapper that turns every call's result into a status.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use cushion::panic_text;

use crate::status::{Failure, Status};

thread_local! {
    static LAST: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Runs a call and returns its status. A failure's message is stored for this thread. A panic is
/// caught and becomes a failure.
pub(crate) fn status_of(call: impl FnOnce() -> Result<(), Failure>) -> Status {
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let what = panic_text(&*panic);
        let text = format!("a bug in Cushion, please report it: {what}");
        Err(Failure::new(Status::Internal, text))
    });
    match result {
        Ok(()) => Status::Ok,
        Err(failure) => {
            note(failure.text);
            failure.status
        }
    }
}

fn note(text: String) {
    let text = CString::new(text).unwrap_or_else(|error| {
        let mut bytes = error.into_vec();
        bytes.retain(|&byte| byte != 0);
        CString::new(bytes).unwrap_or_default()
    });
    // An exiting thread has no thread-local storage left, and cannot read the message either.
    let _ = LAST.try_with(|last| last.replace(Some(text)));
}

/// Returns the message of this thread's last failure, valid until the next one; empty if no call
/// failed.
pub(crate) fn last() -> *const c_char {
    let of = |last: &RefCell<Option<CString>>| last.borrow().as_ref().map(|text| text.as_ptr());
    LAST.try_with(of).ok().flatten().unwrap_or_else(|| CStr::as_ptr(c""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words() -> String {
        // SAFETY: the message ends in a zero byte and stays until the next failure.
        unsafe { CStr::from_ptr(last()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_a_status() {
        assert_eq!(words(), "");
        assert_eq!(status_of(|| panic!("what was {}", "wrong")), Status::Internal);
        assert_eq!(words(), "a bug in Cushion, please report it: what was wrong");
        assert_eq!(status_of(|| Ok(())), Status::Ok);
        assert!(words().ends_with("wrong"), "only a failure replaces it");
    }

    #[test]
    fn messages_with_a_zero_byte_are_kept() {
        let failure = Failure::new(Status::InvalidOption, "be\0fore");
        assert_eq!(status_of(|| Err(failure)), Status::InvalidOption);
        assert_eq!(words(), "before");
    }
}
