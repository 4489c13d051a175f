//! The processes that hold memory of a device, on the NVML stand-in. Each test runs in its own
//! process.

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

    /// IDs that no process has: the system's largest is 2²².
    const A: u32 = 1 << 30;
    const B: u32 = A + 1;
    const C: u32 = A + 2;

    fn device(index: u32) -> CudaDriver {
        CudaDriver::new(index).expect("a device of the stand-in")
    }

    fn unnamed(pid: u32, bytes: u64) -> GpuProcess {
        GpuProcess { pid, name: None, bytes: Some(bytes) }
    }

    /// A child process that is killed when the test is done with it.
    struct Sleeper(Child);

    impl Sleeper {
        /// Returns once the child runs its program: until then it has this process's name.
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

    /// Checks the name of the device's only other process.
    fn name_on(lib: &Lib, child: &Sleeper, expected: &str) {
        lib.standin_set_process(0, child.0.id(), GIB);
        let driver = device(0);
        assert_eq!(driver.processes().all.remove(0).name.as_deref(), Some(expected));
    }

    #[test]
    fn others_are_listed_largest_first_without_this_process() {
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
    fn an_unknown_size_is_none() {
        with_standin(&[], |lib| {
            lib.standin_set_process(0, A, u64::MAX);
            lib.standin_set_process(0, B, 1);
            let unknown = GpuProcess { pid: A, name: None, bytes: None };
            assert_eq!(device(0).processes().all, [unnamed(B, 1), unknown]);
        });
    }

    #[test]
    fn in_a_container_processes_have_no_names_and_include_this_one() {
        with_standin(&[], |lib| {
            let child = Sleeper::named("sleep");
            let driver = device(0);
            driver.alloc(100 * MIB).unwrap();
            lib.standin_set_own_pid(A);
            // An ID of the host, which belongs to another process here.
            lib.standin_set_process(0, child.0.id(), GIB);
            let all = vec![unnamed(child.0.id(), GIB), unnamed(A, 100 * MIB)];
            assert_eq!(driver.processes(), GpuProcesses { all, is_self_known: false });
        });
    }

    #[test]
    fn without_nvml_the_list_is_empty() {
        with_standin_alone(|lib| {
            lib.standin_set_process(0, A, GIB);
            assert_eq!(device(0).processes(), GpuProcesses::default());
            // The stand-in was not called: if the machine has an NVML, it does not know the device.
            assert_eq!(lib.standin_calls(c"nvmlInit_v2".as_ptr()), 0);
        });
    }

    #[test]
    fn a_failing_call_empties_the_list() {
        with_standin(&[], |lib| {
            lib.standin_set_process(0, A, GIB);
            let driver = device(0);
            let count = || lib.standin_calls(std::ptr::null());
            let before = count();
            assert_eq!(driver.processes().all.len(), 1);
            let calls = count() - before;
            assert_eq!(calls, 4);
            for nth in 1..=calls {
                // Among them the codes of a device that fell off the bus (15) and of missing
                // permission (4).
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
    fn thousands_of_processes_fit_up_to_a_limit() {
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
    fn entries_of_any_driver_are_read() {
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
    fn a_mig_instance_is_found() {
        with_standin(&[("STANDIN_DEVICES", "2")], |lib| {
            lib.standin_set_mig(1);
            lib.standin_set_process(1, A, GIB);
            assert_eq!(device(1).processes().all, [unnamed(A, GIB)]);
        });
    }

    #[test]
    fn a_process_has_a_name() {
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
    fn an_ending_process_has_its_kernel_name() {
        with_standin(&[], |lib| {
            let mut child = Sleeper::named("something else");
            child.0.kill().unwrap();
            // The child is not waited for, so its entry remains, without a command line.
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
    fn nvml_is_loaded_on_demand_and_creates_no_context() {
        with_standin(&[("STANDIN_DEVICES", "2")], |lib| {
            let driver = device(1);
            assert_eq!(lib.standin_calls(c"nvmlInit_v2".as_ptr()), 0);
            let _ = driver.processes();
            assert_eq!((lib.standin_contexts(), lib.current()), (0b10, 0));
        });
    }
}
