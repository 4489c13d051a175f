//! Children made by fork never wait for a lock that another thread of the parent held. Runs in its
//! own process.

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use cushion::core::{current_owner, set_followers};
    use cushion::{DeviceError, StreamId, Task, devices, set_budget, set_priority};

    /// Enough children that some fork happens while a lock is held.
    const CHILDREN: u32 = 200;
    /// A child that takes longer is taken to hang.
    const SECONDS: u32 = 20;

    /// Does what a child may do. All of it takes the lock of threads and tasks.
    fn live() {
        let own = current_owner();
        set_priority(1);
        set_budget(Some(Duration::ZERO));
        let task = Task::new("of the child", 0);
        {
            let _working = task.enter();
            assert_ne!(current_owner(), own);
        }
        drop(task);
        assert_eq!(std::thread::spawn(move || current_owner() != own).join().ok(), Some(true));
        assert!(own.to_string().starts_with("thread "), "{own}");
        assert!(devices().get(0).is_none());
        assert!(matches!(devices().get_or_make(0), Err(DeviceError::Forked)));
    }

    /// Forks a child and returns its exit status. The child ends through `exit`, which runs its
    /// thread-local destructors.
    fn child() -> i32 {
        // SAFETY: the child continues in a copy of this thread alone. Beside Cushion's locks it
        // takes the allocator's, which the C library makes usable in the child.
        let process = unsafe { libc::fork() };
        if process == 0 {
            // SAFETY: `alarm` has no precondition.
            unsafe { libc::alarm(SECONDS) };
            let lived = std::panic::catch_unwind(live).is_ok();
            // SAFETY: this process has no other thread that could call `exit` at the same time.
            unsafe { libc::exit(i32::from(!lived)) };
        }
        assert!(process > 0, "{}", std::io::Error::last_os_error());
        let mut status = 0;
        // SAFETY: the process is our child, and `status` is writable.
        let ended = unsafe { libc::waitpid(process, &raw mut status, 0) };
        assert_eq!(ended, process);
        status
    }

    #[test]
    fn a_child_never_waits_for_a_lock_held_by_another_thread() {
        static STOP: AtomicBool = AtomicBool::new(false);
        set_followers(|| false);
        devices().simulate(1 << 30).unwrap();
        let gpu = devices().get_or_make(0).unwrap();
        let kept = gpu.alloc(1 << 20, StreamId(0)).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !STOP.load(Ordering::Relaxed) {
                        let task = Task::new("a name that takes a moment to copy", 0);
                        let _working = task.enter();
                        set_budget(Some(Duration::from_secs(1)));
                    }
                });
            }
            let ends: Vec<i32> =
                (0..CHILDREN).map(|_| child()).take_while(|&end| end == 0).collect();
            STOP.store(true, Ordering::Relaxed);
            assert_eq!(ends.len(), CHILDREN as usize, "the next child hung or failed");
        });
        gpu.free(kept).unwrap();
        gpu.check_invariants().unwrap();
    }
}
