//! Children made by fork, in a process of its own: whichever lock of Cushion's another thread held at that moment, a child
//! does not wait for it.

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use cushion::core::{current_owner, set_followers};
    use cushion::{DeviceError, StreamId, Task, devices, set_budget, set_priority};

    /// So often that a lock is held at some of them.
    const CHILDREN: u32 = 200;
    /// A child that takes longer hangs.
    const SECONDS: u32 = 20;

    /// What a child may do: all of it knows which threads and tasks there are.
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

    /// Makes a child, and returns how it ended. It ends as programs do: what is left to its thread is dropped.
    fn child() -> i32 {
        // SAFETY: the child runs on in a copy of this thread alone. What it takes beside Cushion's own is the allocator, which
        // the C library makes usable there.
        let process = unsafe { libc::fork() };
        if process == 0 {
            // SAFETY: it has no precondition.
            unsafe { libc::alarm(SECONDS) };
            let lived = std::panic::catch_unwind(live).is_ok();
            // SAFETY: no other thread of this process is left that could end it meanwhile.
            unsafe { libc::exit(i32::from(!lived)) };
        }
        assert!(process > 0, "{}", std::io::Error::last_os_error());
        let mut status = 0;
        // SAFETY: the child is ours, and `status` can be written to.
        let ended = unsafe { libc::waitpid(process, &raw mut status, 0) };
        assert_eq!(ended, process);
        status
    }

    #[test]
    fn a_child_waits_for_no_lock_that_another_thread_held() {
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
            assert_eq!(ends.len(), CHILDREN as usize, "the child after them hung or failed");
        });
        gpu.free(kept).unwrap();
        gpu.check_invariants().unwrap();
    }
}
