//! PyTorch's own threads.
//!
//! Gradients are computed by threads that PyTorch makes, one per device, while the thread that asked for them waits.
//! They allocate in its name: nobody is to wait for memory that such a thread holds, or the other way round.

/// What PyTorch begins the names of those threads with.
const GRADIENTS: &[u8] = b"pt_autograd_";

/// Lets the engine know those threads.
pub(crate) fn know() {
    cushion::core::set_followers(computes_gradients);
}

/// Whether this is one of them.
pub(crate) fn computes_gradients() -> bool {
    // As long as a thread's name may be, and the zero behind it.
    let mut name = [0_u8; 16];
    // SAFETY: it has no precondition.
    let this = unsafe { libc::pthread_self() };
    // SAFETY: the thread is this one, and `name` has as many bytes as are said.
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
