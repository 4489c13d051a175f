//! Which processes hold memory of a device, on the stand-in for NVML. Each test runs in a process of
//! its own.

#![cfg(target_os = "linux")]

mod support;

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt as _;
    use std::process::{Child, Command};

    use cushion_core::Driver;
    use cushion_core::size::{GIB, MIB};
    use cushion_cuda::{CudaDriver, GpuProcess, GpuProcesses};

    use super::support::{Lib, with_standin, with_standin_alone};

    /// Numbers that no process has: the system's largest is 2²².
    const A: u32 = 1 << 30;
    const B: u32 = A + 1;
    const C: u32 = A + 2;

    fn device(index: u32) -> CudaDriver {
        CudaDriver::new(index).expect("a device of the stand-in")
    }

    fn unnamed(pid: u32, bytes: u64) -> GpuProcess {
        GpuProcess { pid, name: None, bytes: Some(bytes) }
    }

    /// A child that is ended by its number when the test is done with it, whatever becomes of that.
    struct Sleeper(Child);

    impl Sleeper {
        /// One that runs its program: until then it is called as this one is.
        fn named(name: &str) -> Self {
            let child = Command::new("sleep").arg0(name).arg("5").spawn().expect("a child");
            let line = format!("/proc/{}/cmdline", child.id());
            while std::fs::read(&line).is_ok_and(|line| !line.starts_with(name.as_bytes())) {
                std::thread::yield_now();
            }
            Self(child)
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// What the device's only other process is called.
    fn name_on(lib: &Lib, child: &Sleeper, expected: &str) {
        lib.standin_set_process(0, child.0.id(), GIB);
        let driver = device(0);
        assert_eq!(driver.processes().all.remove(0).name.as_deref(), Some(expected));
    }

    #[test]
    fn others_are_listed_largest_first_and_this_one_is_left_out() {
        with_standin(&[("STANDIN_DEVICES", "2")], |lib| {
            let driver = device(0);
            driver.alloc(100 * MIB).unwrap();
            let nobody = GpuProcesses { all: vec![], is_self_known: true };
            assert_eq!(driver.processes(), nobody);
            lib.standin_set_process(0, A, GIB);
            lib.standin_set_process(0, B, 3 * GIB);
            lib.standin_set_process(1, C, GIB);
            let others = vec![unnamed(B, 3 * GIB), unnamed(A, GIB)];
            assert_eq!(driver.processes(), GpuProcesses { all: others, is_self_known: true });
            assert_eq!(device(1).processes().all, [unnamed(C, GIB)]);
            lib.standin_set_process(0, B, 0);
            assert_eq!(driver.processes().all, [unnamed(A, GIB)]);
            lib.standin_set_process(0, A, 0);
            assert_eq!(driver.processes(), nobody);
        });
    }

    #[test]
    fn a_size_that_is_not_known_is_none() {
        with_standin(&[], |lib| {
            lib.standin_set_process(0, A, u64::MAX);
            lib.standin_set_process(0, B, 1);
            let unknown = GpuProcess { pid: A, name: None, bytes: None };
            assert_eq!(device(0).processes().all, [unnamed(B, 1), unknown]);
        });
    }

    #[test]
    fn in_a_container_nobody_is_named_and_this_one_is_among_them() {
        with_standin(&[], |lib| {
            let child = Sleeper::named("sleep");
            let driver = device(0);
            driver.alloc(100 * MIB).unwrap();
            lib.standin_set_own_pid(A);
            // A number of the host's, which is that of another process here.
            lib.standin_set_process(0, child.0.id(), GIB);
            let all = vec![unnamed(child.0.id(), GIB), unnamed(A, 100 * MIB)];
            assert_eq!(driver.processes(), GpuProcesses { all, is_self_known: false });
        });
    }

    #[test]
    fn without_nvml_there_is_nobody() {
        with_standin_alone(|lib| {
            lib.standin_set_process(0, A, GIB);
            assert_eq!(device(0).processes(), GpuProcesses::default());
            // Nobody has asked the stand-in: where the machine has an NVML, that does not know its device.
            assert_eq!(lib.standin_calls(c"nvmlInit_v2".as_ptr()), 0);
        });
    }

    #[test]
    fn a_failing_call_leaves_nobody() {
        with_standin(&[], |lib| {
            lib.standin_set_process(0, A, GIB);
            let driver = device(0);
            let count = || lib.standin_calls(std::ptr::null());
            let before = count();
            assert_eq!(driver.processes().all.len(), 1);
            let calls = count() - before;
            assert_eq!(calls, 4);
            for nth in 1..=calls {
                // Among others, what a device says that fell off the bus (15), or one that tells nobody (4).
                for code in [1, 3, 4, 15, 999] {
                    lib.standin_fail(nth, code);
                    assert_eq!(driver.processes(), GpuProcesses::default(), "call {nth}: {code}");
                    assert_eq!(driver.processes().all.len(), 1);
                }
            }
            lib.standin_shut_down();
            assert_eq!(driver.processes(), GpuProcesses::default());
        });
    }

    #[test]
    fn there_is_room_for_thousands_and_an_end_to_it() {
        with_standin(&[], |lib| {
            let driver = device(0);
            let mut there = 0;
            for count in [126, 127, 1022, 1023, 4094] {
                for pid in there..count {
                    lib.standin_set_process(0, A + pid, u64::from(pid) + 1);
                }
                there = count;
                let found = driver.processes();
                let pids: Vec<u32> = found.all.iter().map(|process| process.pid).collect();
                assert!(pids.iter().copied().eq((A..A + count).rev()), "{count}");
                assert!(found.is_self_known);
            }
            lib.standin_set_process(0, A + there, 1);
            let asked = lib.standin_calls(c"nvmlDeviceGetComputeRunningProcesses_v3".as_ptr());
            assert_eq!(driver.processes(), GpuProcesses::default());
            let calls = lib.standin_calls(c"nvmlDeviceGetComputeRunningProcesses_v3".as_ptr());
            assert_eq!(calls - asked, 3);
        });
    }

    #[test]
    fn entries_of_any_driver_are_understood() {
        with_standin(&[], |lib| {
            let driver = device(0);
            for words in [2, 4, 3] {
                lib.standin_set_entry_words(words);
                for count in 0..126 {
                    for pid in 0..126 {
                        let bytes = if pid < count { GIB - u64::from(pid) } else { 0 };
                        lib.standin_set_process(0, A + pid, bytes);
                    }
                    let found = driver.processes();
                    let expected = (0..count).map(|pid| unnamed(A + pid, GIB - u64::from(pid)));
                    assert!(found.all.iter().cloned().eq(expected), "{count} of {words} words");
                    assert!(found.is_self_known);
                }
            }
        });
    }

    #[test]
    fn a_part_of_a_device_is_found() {
        with_standin(&[("STANDIN_DEVICES", "2")], |lib| {
            lib.standin_set_mig(1);
            lib.standin_set_process(1, A, GIB);
            assert_eq!(device(1).processes().all, [unnamed(A, GIB)]);
        });
    }

    #[test]
    fn a_process_is_named() {
        with_standin(&[], |lib| name_on(lib, &Sleeper::named("/usr/bin/sleep"), "sleep"));
    }

    #[test]
    fn a_hostile_name_is_made_harmless() {
        with_standin(&[], |lib| {
            let name = format!("\x1b[2J\nfree\u{202e}: {}", "x".repeat(100_000));
            let harmless = format!("?[2J?free?: {}", "x".repeat(28));
            name_on(lib, &Sleeper::named(&name), &harmless);
        });
    }

    #[test]
    fn a_process_that_is_ending_is_named_by_the_system() {
        with_standin(&[], |lib| {
            let mut child = Sleeper::named("something else");
            child.0.kill().unwrap();
            // Not waited for, so it is still there, and its command line is not.
            let stat = format!("/proc/{}/stat", child.0.id());
            while !std::fs::read_to_string(&stat).unwrap().contains(") Z ") {
                std::thread::yield_now();
            }
            lib.standin_set_process(0, child.0.id(), GIB);
            let name = device(0).processes().all.remove(0).name;
            assert_eq!(name.as_deref(), Some("sleep"));
        });
    }

    #[test]
    fn nothing_is_asked_before_it_is_needed_and_no_context_is_made() {
        with_standin(&[("STANDIN_DEVICES", "2")], |lib| {
            let driver = device(1);
            assert_eq!(lib.standin_calls(c"nvmlInit_v2".as_ptr()), 0);
            let _ = driver.processes();
            assert_eq!((lib.standin_contexts(), lib.current()), (0b10, 0));
        });
    }
}
