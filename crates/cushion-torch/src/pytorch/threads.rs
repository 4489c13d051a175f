//! PyTorch's own threads.
//!
//! PyTorch computes gradients on threads of its own, one for each device, while the thread that
//! called `backward()` waits. They allocate in the name of that thread. The engine must know them:
//! neither thread may wait for memory that the other holds.

/// The prefix of the names that PyTorch gives these threads.
const GRADIENTS: &[u8] = b"pt_autograd_";

/// Registers these threads with the engine.
pub(crate) fn know() {
    cushion::core::set_followers(computes_gradients);
}

/// Whether the current thread computes gradients for PyTorch.
pub(crate) fn computes_gradients() -> bool {
    // The longest name of a thread has 15 bytes, and a nul follows it.
    let mut name = [0_u8; 16];
    // SAFETY: the function has no precondition.
    let this = unsafe { libc::pthread_self() };
    // SAFETY: the thread is alive, because it is the current one. `name` can be written to, and its
    // length is given.
    let failed = unsafe { libc::pthread_getname_np(this, name.as_mut_ptr().cast(), name.len()) };
    failed == 0 && name.starts_with(GRADIENTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_known_by_its_name() {
        let is_known = |name: &str| {
            let thread = std::thread::Builder::new().name(name.to_owned());
            thread.spawn(computes_gradients).unwrap().join().unwrap()
        };
        assert!(is_known("pt_autograd_0") && !is_known("python") && !is_known("pt_autograd"));
    }
}
