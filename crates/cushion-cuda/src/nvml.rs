//! NVML, the driver's management library: lists the processes that hold memory of a device.
//!
//! The library comes with the driver, and is loaded by the first call. Its answers only go into
//! messages, so a missing library, function or answer is `None`, without a reason. As in `call.rs`,
//! the calls are `unsafe` because they leave Rust, and each `SAFETY` comment justifies the
//! arguments.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::sync::OnceLock;

use libloading::Library;

/// The name that every NVIDIA driver installs.
const NAME: &str = if cfg!(windows) { "nvml.dll" } else { "libnvidia-ml.so.1" };

/// NVML's code if the array has too little room for all processes.
const INSUFFICIENT_SIZE: c_int = 7;

/// Room in processes, for one attempt after another. The numbers are odd so that an array that NVML
/// clears as a whole cannot be mistaken for entries of another size.
const ROOMS: [usize; 3] = [127, 1023, 4095];

/// An entry holds a pid, four bytes of padding, and the bytes held. Most versions of the library
/// add the two numbers of a MIG instance, and some the memory of confidential computing: an entry
/// has two, three or four words of eight bytes. The function has the same name in all versions
/// (drivers 535.43 to 535.86 use four words). So the array always has room for the largest entry,
/// and the words that NVML has written tell the size.
const SMALLEST: usize = 2;
const USUAL: usize = 3;
const LARGEST: usize = 4;

/// The content of unwritten words. The last word of an entry never has this value: it is neither a
/// size that a device can have nor a pair of MIG instances.
const UNWRITTEN: u64 = 0x5a5a_5a5a_5a5a_5a5a;

/// NVML's value for an unknown size.
const NOT_AVAILABLE: u64 = u64::MAX;

/// NVML's handle of a device.
type Handle = *mut c_void;

type Init = unsafe extern "C" fn() -> c_int;
type HandleByUuid = unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int;
type Processes = unsafe extern "C" fn(Handle, *mut c_uint, *mut c_void) -> c_int;

/// The functions of NVML used here.
pub(crate) struct Nvml {
    init: Init,
    handle_by_uuid: HandleByUuid,
    processes: Processes,
    /// Keeps the library loaded.
    _library: Library,
}

/// One process and the bytes it holds, if NVML knows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) pid: u32,
    pub(crate) bytes: Option<u64>,
}

impl Nvml {
    /// Returns the library. The first successful call loads it; it is never unloaded.
    pub(crate) fn load() -> Option<&'static Self> {
        static NVML: OnceLock<Nvml> = OnceLock::new();
        let nvml = match NVML.get() {
            Some(nvml) => nvml,
            // A failure is not cached, as in `sys.rs`.
            None => {
                let found = Self::find()?;
                NVML.get_or_init(|| found)
            }
        };
        // SAFETY: no pointers; it may be called any number of times, from any thread. Calls after
        // the first success only count up.
        let answer = unsafe { (nvml.init)() };
        (answer == 0).then_some(nvml)
    }

    fn find() -> Option<Self> {
        // SAFETY: loading a library runs its initialisers, so it must be safe to load into any
        // process. Every monitor of NVIDIA's devices loads NVML by this name; whoever can put
        // another file there can already run any code in this process. Rust has no safe way to load
        // a library.
        let library = unsafe { Library::new(NAME) }.ok()?;
        // SAFETY: the type is that of NVML's documentation for this name; the result, a C enum, is
        // passed like an `int`.
        let init = unsafe { function::<Init>(&library, "nvmlInit_v2") }?;
        // SAFETY: as above.
        let handle_by_uuid =
            unsafe { function::<HandleByUuid>(&library, "nvmlDeviceGetHandleByUUID") }?;
        // SAFETY: as above, with an untyped pointer for the entries.
        let newer =
            unsafe { function::<Processes>(&library, "nvmlDeviceGetComputeRunningProcesses_v3") };
        // SAFETY: as above. Drivers before 510 have only this function.
        let older = || unsafe {
            function::<Processes>(&library, "nvmlDeviceGetComputeRunningProcesses_v2")
        };
        let processes = newer.or_else(older)?;
        Some(Self { init, handle_by_uuid, processes, _library: library })
    }

    /// Returns the processes that have a context on the device with this CUDA UUID, in any order.
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
        // SAFETY: `uuid` is readable and `device` writable during the call.
        let answer = unsafe { (self.handle_by_uuid)(uuid.as_ptr(), &raw mut device) };
        (answer == 0).then_some(device)
    }

    /// Does the same, with room for `room` processes.
    fn processes_in(&self, room: usize, device: Handle) -> Result<Vec<Entry>, c_int> {
        let mut words = vec![UNWRITTEN; room * LARGEST];
        let mut count = c_uint::try_from(room).unwrap_or(c_uint::MAX);
        // SAFETY: NVML returned `device`, and its handles stay valid. `count` is writable during
        // the call, and so are `count` entries of any known size.
        let answer = unsafe { (self.processes)(device, &raw mut count, words.as_mut_ptr().cast()) };
        if answer != 0 {
            return Err(answer);
        }
        Ok(entries(&words, usize::try_from(count).unwrap_or(room)))
    }
}

/// Looks up a function of the library by name.
///
/// # Safety
///
/// `F` is the type of the function.
unsafe fn function<F: Copy>(library: &Library, name: &str) -> Option<F> {
    // SAFETY: the caller guarantees the type. No safe function can look up a symbol.
    let found = unsafe { library.get::<F>(name) };
    found.ok().map(|function| *function)
}

/// Returns the names that NVML may have for a CUDA device: that of a whole device, and that of a
/// MIG instance.
fn uuid_texts(uuid: [u8; 16]) -> [CString; 2] {
    let mut text = String::new();
    for (index, byte) in uuid.into_iter().enumerate() {
        if [4, 6, 8, 10].contains(&index) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    // The texts contain no zero byte.
    ["GPU", "MIG"].map(|kind| CString::new(format!("{kind}-{text}")).unwrap_or_default())
}

/// Returns the entries that NVML wrote to `words`.
fn entries(words: &[u64], count: usize) -> Vec<Entry> {
    // NVML cannot have written more than there is room for.
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
    fn uuids_are_written_as_nvml_writes_them() {
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
    fn a_cleared_array_has_no_entries() {
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
    fn an_impossible_count_does_not_crash() {
        assert_eq!(entries(&[0; 2 * LARGEST], usize::MAX).len(), 2);
        assert_eq!(entries(&[], 3), []);
    }
}
