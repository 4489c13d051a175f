//! Catches a panic of a run, so that the other runs go on, and returns its message.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::Once;

thread_local! {
    /// Whether panics of this thread are caught.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
    /// The message and place of the first panic.
    static SAID: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs `f`. Returns its value, or the message of its panic. Nothing is printed: the command holds
/// standard error while it runs, and reports the failure itself.
pub(crate) fn guarded<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(
            move |info| {
                if GUARDED.get() { note(info) } else { before(info) }
            },
        ));
    });
    let before = GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(f));
    GUARDED.set(before);
    result.map_err(|_| SAID.take().unwrap_or_else(|| "a panic".to_owned()))
}

fn note(info: &PanicHookInfo<'_>) {
    let said = info.payload_as_str().unwrap_or("a panic");
    let place = info.location().map(|at| format!(" ({}:{})", at.file(), at.line()));
    // The first panic is the cause of any other.
    SAID.with_borrow_mut(|first| {
        first.get_or_insert_with(|| format!("{said}{}", place.unwrap_or_default()));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_caught_with_its_message() {
        assert_eq!(guarded(|| 7), Ok(7));
        let found = guarded(|| panic!("{} went wrong", 1)).unwrap_err();
        assert!(found.starts_with("1 went wrong (") && found.contains("guard.rs:"), "{found}");
        assert_eq!(guarded(|| 8), Ok(8));
    }
}
