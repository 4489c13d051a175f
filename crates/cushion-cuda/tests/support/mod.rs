//! Shared test code: functions of a driver library by name, and tests in a process of their own,
//! where the stand-in is `libcuda.so.1` and `libnvidia-ml.so.1`.

#![allow(dead_code, reason = "each test uses some of it")]

use std::ffi::{c_char, c_int, c_uint};
use std::path::{Path, PathBuf};
use std::process::Command;

use libloading::Library;

/// Set in a process that was started to run one test.
const CHILD: &str = "CUSHION_TEST_CHILD";

/// Declares functions of the library as methods. They are safe because tests pass valid arguments.
macro_rules! library_functions {
    ($($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        #[expect(non_snake_case, reason = "CUDA's own names")]
        impl Lib {
            $(pub(crate) fn $name(&self, $($argument: $type),*) $(-> $result)? {
                // SAFETY: the type is that of CUDA's header, or of the stand-in's source, for this
                // name; only lookups by name reach the library.
                let function = unsafe {
                    self.0.get::<unsafe extern "C" fn($($type),*) $(-> $result)?>(stringify!($name))
                };
                let function = function.expect(stringify!($name));
                // SAFETY: tests pass pointers that are valid during the call, and handles that CUDA
                // returned or the stand-in accepts.
                unsafe { function($($argument),*) }
            })*
        }
    };
}

/// The driver library that the process under test has loaded.
pub(crate) struct Lib(Library);

library_functions! {
    cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) -> c_int;
    cuCtxGetCurrent(context: *mut usize) -> c_int;
    cuCtxSetCurrent(context: usize) -> c_int;
    cuStreamCreate(stream: *mut u64, flags: c_uint) -> c_int;
    cuStreamDestroy_v2(stream: u64) -> c_int;
    cuStreamBeginCapture_v2(stream: u64, mode: c_uint) -> c_int;
    cuStreamEndCapture(stream: u64, graph: *mut usize) -> c_int;
    cuGraphDestroy(graph: usize) -> c_int;
    cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int;
    cuMemsetD8Async(address: u64, value: u8, bytes: usize, stream: u64) -> c_int;
    cuMemcpyDtoH_v2(to: *mut u8, from: u64, bytes: usize) -> c_int;
    standin_calls(name: *const c_char) -> u64;
    standin_fail(nth: u64, code: c_int);
    standin_shut_down();
    standin_contexts() -> u64;
    standin_access(address: u64) -> u64;
    standin_held(device: c_int) -> u64;
    standin_held_host(device: c_int) -> u64;
    standin_set_process(device: c_int, pid: c_uint, bytes: u64);
    standin_set_own_pid(pid: c_uint);
    standin_set_entry_words(words: c_uint);
    standin_set_mig(is_mig: c_int);
    standin_refuse_pages(handles: c_uint, rdma: c_int, code: c_int);
    standin_page_kind(page: u64) -> c_uint;
    standin_page_node(page: u64) -> c_int;
    standin_launch(device: c_int, stream: u64);
    standin_finish(device: c_int, stream: u64);
    standin_finish_all();
    standin_destroy_stream(stream: u64);
    standin_begin_capture(device: c_int, stream: u64);
    standin_wait_for(device: c_int, waiter: u64, other: u64);
    standin_end_capture(device: c_int, stream: u64);
    standin_odd_capture(stream: u64, answer: c_int);
}

impl Lib {
    pub(crate) fn open() -> Self {
        // SAFETY: this is the stand-in or the machine's own driver: both may be loaded into any
        // process.
        Self(unsafe { Library::new("libcuda.so.1") }.expect("the driver that was loaded before"))
    }

    /// Returns the current context of this thread.
    pub(crate) fn current(&self) -> usize {
        let mut context = 0;
        assert_eq!(self.cuCtxGetCurrent(&raw mut context), 0);
        context
    }

    /// Retains a device's primary context.
    pub(crate) fn primary(&self, device: c_int) -> usize {
        let mut context = 0;
        assert_eq!(self.cuDevicePrimaryCtxRetain(&raw mut context, device), 0);
        context
    }

    /// Creates a stream in the current context.
    pub(crate) fn stream(&self) -> u64 {
        let mut stream = 0;
        const NON_BLOCKING: c_uint = 1;
        assert_eq!(self.cuStreamCreate(&raw mut stream, NON_BLOCKING), 0);
        stream
    }
}

/// Runs a test in a process of its own, with the stand-in as driver. `Test` is the test's own
/// closure: its type name contains the name of the test.
pub(crate) fn with_standin<Test: FnOnce(&Lib)>(environment: &[(&str, &str)], test: Test) {
    in_child::<Test>(&standin(), &[CUDA, &["libnvidia-ml.so.1"]].concat(), environment, || {
        test(&Lib::open());
    });
}

/// Does the same without NVML.
pub(crate) fn with_standin_alone<Test: FnOnce(&Lib)>(test: Test) {
    in_child::<Test>(&standin(), CUDA, &[], || test(&Lib::open()));
}

/// Does the same with `library` as the driver.
pub(crate) fn with_library<Test: FnOnce()>(library: &Path, test: Test) {
    in_child::<Test>(library, CUDA, &[], test);
}

/// The file names of the driver.
const CUDA: &[&str] = &["libcuda.so.1", "libcuda.so"];

fn in_child<Named>(
    library: &Path,
    names: &[&str],
    environment: &[(&str, &str)],
    body: impl FnOnce(),
) {
    if std::env::var_os(CHILD).is_some() {
        return body();
    }
    let folder = tempfile::tempdir().expect("a folder");
    for name in names {
        std::os::unix::fs::symlink(library, folder.path().join(name)).expect("a link");
    }
    // A closure is named after its function: `crate::tests::name::{{closure}}`.
    let name = std::any::type_name::<Named>().trim_end_matches("::{{closure}}");
    let name = name.split_once("::").map_or(name, |(_, name)| name);
    let mut paths = vec![folder.path().to_owned()];
    let before = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    paths.extend(std::env::split_paths(&before));
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args([name, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .env("LD_LIBRARY_PATH", std::env::join_paths(paths).expect("paths"))
        .envs(environment.iter().copied())
        .output()
        .expect("a process");
    let [out, err] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    // A filter that matches no test would pass without running anything.
    let passed = output.status.success() && out.contains("1 passed");
    assert!(passed, "{name} in a process of its own: {}\n{out}\n{err}", output.status);
}

/// Returns the stand-in, which is built beside the tests that depend on it.
fn standin() -> PathBuf {
    let this = std::env::current_exe().expect("this program");
    let beside =
        this.ancestors().skip(1).take(2).map(|folder| folder.join("libcushion_standin.so"));
    let found = beside.clone().find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("no stand-in at {:?}", beside.collect::<Vec<_>>()))
}
