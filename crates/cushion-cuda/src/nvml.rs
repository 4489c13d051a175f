//! NVML, the driver's library of questions about devices: which processes hold memory of one.
//!
//! It comes with the driver and is loaded at run time, by whoever asks first. It is only ever asked
//! for the sake of a message, so a library, a function or an answer that is missing is `None`, and
//! why does not matter. As in `call.rs`, the calls are `unsafe` because they leave Rust, and each
//! `SAFETY` comment answers for the arguments.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::sync::OnceLock;

use libloading::Library;

/// The name that every NVIDIA driver installs.
const NAME: &str = if cfg!(windows) { "nvml.dll" } else { "libnvidia-ml.so.1" };

/// What NVML answers where there are more processes than it was given room for.
const INSUFFICIENT_SIZE: c_int = 7;

/// For how many processes there is room, try after try. With odd numbers, room that NVML clears as
/// a whole cannot be taken for entries of another size.
const ROOMS: [usize; 3] = [127, 1023, 4095];

/// An entry is a pid, four bytes of nothing, and the bytes held; then the two numbers of a MIG
/// instance, in most versions of the library, and memory of confidential computing in some: two,
/// three or four words of eight bytes. The function has the same name in all of them (drivers
/// 535.43 to 535.86 are those with four). So there is always room for the largest, and what was
/// written tells which it is.
const SMALLEST: usize = 2;
const USUAL: usize = 3;
const LARGEST: usize = 4;

/// What is in room that nobody has written to. The last word of an entry is never this: it is a
/// size that no device has, and no pair of MIG instances.
const UNWRITTEN: u64 = 0x5a5a_5a5a_5a5a_5a5a;

/// How NVML says that it does not know a size.
const NOT_AVAILABLE: u64 = u64::MAX;

/// A device, as NVML knows it.
type Handle = *mut c_void;

type Init = unsafe extern "C" fn() -> c_int;
type HandleByUuid = unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int;
type Processes = unsafe extern "C" fn(Handle, *mut c_uint, *mut c_void) -> c_int;

/// The functions of NVML that are used here, all of them found.
pub(crate) struct Nvml {
    init: Init,
    handle_by_uuid: HandleByUuid,
    processes: Processes,
    /// Keeps the functions where they are.
    _library: Library,
}

/// One process and how much it holds, if NVML knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) pid: u32,
    pub(crate) bytes: Option<u64>,
}

impl Nvml {
    /// The library, loaded by the first call that finds it, and never unloaded.
    pub(crate) fn load() -> Option<&'static Self> {
        static NVML: OnceLock<Nvml> = OnceLock::new();
        let nvml = match NVML.get() {
            Some(nvml) => nvml,
            // A failure is not remembered, as in `sys.rs`.
            None => {
                let found = Self::find()?;
                NVML.get_or_init(|| found)
            }
        };
        // SAFETY: no pointers; may be called any number of times, from any thread. All but the
        // first that succeeds are only counted.
        let answer = unsafe { (nvml.init)() };
        (answer == 0).then_some(nvml)
    }

    fn find() -> Option<Self> {
        // SAFETY: loading a library runs its initialisers, so it must be one meant to be loaded
        // into any process. This is the name under which every monitor of NVIDIA's devices loads
        // it; whoever can put another file there can run any code in this process already. There is
        // no safe way to load a library.
        let library = unsafe { Library::new(NAME) }.ok()?;
        // SAFETY: the type is that of NVML's documentation for this name; the result, a C enum, is
        // passed as an `int` is.
        let init = unsafe { function::<Init>(&library, "nvmlInit_v2") }?;
        // SAFETY: likewise.
        let handle_by_uuid =
            unsafe { function::<HandleByUuid>(&library, "nvmlDeviceGetHandleByUUID") }?;
        // SAFETY: likewise, where the pointer to the entries is one to anything.
        let newer =
            unsafe { function::<Processes>(&library, "nvmlDeviceGetComputeRunningProcesses_v3") };
        // SAFETY: likewise. Drivers before 510 have this one only.
        let older = || unsafe {
            function::<Processes>(&library, "nvmlDeviceGetComputeRunningProcesses_v2")
        };
        let processes = newer.or_else(older)?;
        Some(Self { init, handle_by_uuid, processes, _library: library })
    }

    /// The processes that have a context on the device that CUDA knows by these bytes, in no order.
    pub(crate) fn processes(&self, uuid: [u8; 16]) -> Option<Vec<Entry>> {
        let device = uuid_texts(uuid).iter().find_map(|text| self.device(text))?;
        for room in ROOMS {
            match self.processes_in(room, device) {
                Err(INSUFFICIENT_SIZE) => {}
                found => return found.ok(),
            }
        }
        None
    }

    fn device(&self, uuid: &CStr) -> Option<Handle> {
        let mut device = null_mut();
        // SAFETY: `uuid` can be read and `device` written for the time of the call.
        let answer = unsafe { (self.handle_by_uuid)(uuid.as_ptr(), &raw mut device) };
        (answer == 0).then_some(device)
    }

    /// The same, if there are no more than `room`.
    fn processes_in(&self, room: usize, device: Handle) -> Result<Vec<Entry>, c_int> {
        let mut words = vec![UNWRITTEN; room * LARGEST];
        let mut count = c_uint::try_from(room).unwrap_or(c_uint::MAX);
        // SAFETY: `device` is one that NVML gave, and those are never taken back. `count` can be
        // written for the time of the call, and so can as many entries of any known size as it
        // tells.
        let answer = unsafe { (self.processes)(device, &raw mut count, words.as_mut_ptr().cast()) };
        if answer != 0 {
            return Err(answer);
        }
        Ok(entries(&words, usize::try_from(count).unwrap_or(room)))
    }
}

/// A function of the library, if it has one of this name.
///
/// # Safety
///
/// `F` is the type of the function.
unsafe fn function<F: Copy>(library: &Library, name: &str) -> Option<F> {
    // SAFETY: as the caller promises. No safe function can look up a symbol.
    let found = unsafe { library.get::<F>(name) };
    found.ok().map(|function| *function)
}

/// What NVML may call a device of CUDA's: a whole one, or a part of one under MIG.
fn uuid_texts(uuid: [u8; 16]) -> [CString; 2] {
    let mut text = String::new();
    for (index, byte) in uuid.into_iter().enumerate() {
        if [4, 6, 8, 10].contains(&index) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    // There is no zero byte in these.
    ["GPU", "MIG"].map(|kind| CString::new(format!("{kind}-{text}")).unwrap_or_default())
}

/// The entries that were written to `words`.
fn entries(words: &[u64], count: usize) -> Vec<Entry> {
    // More than there is room for cannot have been written.
    let count = count.min(words.len() / LARGEST);
    let written = words.iter().rposition(|&word| word != UNWRITTEN).map_or(0, |last| last + 1);
    let size = [SMALLEST, LARGEST].into_iter().find(|size| size * count == written);
    let entry = |words: &[u64]| {
        let [a, b, c, d, ..] = words[0].to_ne_bytes();
        let bytes = Some(words[1]).filter(|&bytes| bytes != NOT_AVAILABLE);
        Entry { pid: u32::from_ne_bytes([a, b, c, d]), bytes }
    };
    words.chunks_exact(size.unwrap_or(USUAL)).take(count).map(entry).collect()
}

impl fmt::Debug for Nvml {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvml").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_named_as_nvml_names_it() {
        let texts = uuid_texts([
            0xea, 0x5a, 0x7f, 0x29, 0xc7, 0x14, 0x06, 0xba, 0x23, 0xef, 0xce, 0xdb, 0xc4, 0x42,
            0x48, 0xda,
        ]);
        assert_eq!(texts[0].as_c_str(), c"GPU-ea5a7f29-c714-06ba-23ef-cedbc44248da");
        assert_eq!(texts[1].as_c_str(), c"MIG-ea5a7f29-c714-06ba-23ef-cedbc44248da");
    }

    #[test]
    fn entries_of_every_size_are_read() {
        for size in [SMALLEST, USUAL, LARGEST] {
            for count in [0, 1, 2, 48, 126, 127] {
                let mut words = vec![UNWRITTEN; ROOMS[0] * LARGEST];
                for (number, entry) in (1..).zip(words.chunks_exact_mut(size).take(count)) {
                    entry.fill(u64::MAX);
                    entry[..2].copy_from_slice(&[number, number << 30]);
                }
                let found = entries(&words, count);
                let expected = (1..)
                    .take(count)
                    .map(|number: u32| Entry { pid: number, bytes: Some(u64::from(number) << 30) });
                assert_eq!(found, expected.collect::<Vec<_>>(), "{count} of {size} words");
            }
        }
    }

    #[test]
    fn room_that_was_cleared_as_a_whole_is_no_entry() {
        for count in 1..=ROOMS[0] {
            let mut words = vec![UNWRITTEN; ROOMS[0] * LARGEST];
            words[..ROOMS[0] * USUAL].fill(0);
            for entry in words.chunks_exact_mut(USUAL).take(count) {
                entry.copy_from_slice(&[7, NOT_AVAILABLE, u64::MAX]);
            }
            assert_eq!(entries(&words, count), vec![Entry { pid: 7, bytes: None }; count]);
        }
    }

    #[test]
    fn a_count_that_cannot_be_is_survived() {
        assert_eq!(entries(&[0; 2 * LARGEST], usize::MAX).len(), 2);
        assert_eq!(entries(&[], 3), []);
    }
}
