//! The machine: its devices and its state.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::str::FromStr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use cushion_core::driver::{DriverResult, Fault, SimMemory};
use cushion_core::size::{GIB, MIB};
use cushion_core::{SimConfig, SimDriver, StreamId};

use crate::gate;
use crate::nvml::Nvml;
use crate::{
    Answer, CAPTURE_UNSUPPORTED, CONTEXT_IS_DESTROYED, DEINITIALIZED, INVALID_CONTEXT,
    INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, NOT_INITIALIZED, OUT_OF_MEMORY, UNKNOWN,
};

/// The mode in which a thread may call anything during a capture.
const RELAXED: c_uint = 2;

/// Handles of pages, events and nodes contain their device, because CUDA's calls take them without
/// one.
const DEVICE_SHIFT: u32 = 40;

/// Addresses start here. The addresses of the simulated devices themselves would overlap.
const FIRST_ADDRESS: u64 = 1 << 40;

thread_local! {
    /// The contexts of this thread, as device numbers; the last is current. `None` stands for no
    /// context.
    pub(crate) static STACK: RefCell<Vec<Option<usize>>> = const { RefCell::new(Vec::new()) };
    pub(crate) static MODE: Cell<c_uint> = const { Cell::new(0) };
}

/// One simulated device.
pub(crate) struct Device {
    pub(crate) sim: SimDriver,
    /// How often its primary context is retained.
    pub(crate) retained: u32,
    /// The devices with access to each mapped range.
    pub(crate) access: BTreeMap<u64, (u64, u64)>,
    /// Streams being captured.
    pub(crate) capturing: BTreeSet<u64>,
    /// Other processes that NVML reports, and the bytes each holds.
    pub(crate) processes: BTreeMap<c_uint, u64>,
}

/// The kind of a page.
#[derive(Clone, Copy)]
pub(crate) struct PageKind {
    /// The handle types.
    pub(crate) handles: c_uint,
    pub(crate) rdma: bool,
    /// The NUMA node, for a page in host memory.
    pub(crate) node: Option<c_int>,
}

/// What the environment says about the machine.
struct Machine {
    peers: BTreeSet<(usize, usize)>,
    without: Vec<String>,
    /// The NUMA node next to the devices, or -1.
    node: c_int,
    lenient: bool,
}

/// The library's own state, and the calls made so far.
#[derive(Default)]
pub(crate) struct Calls {
    pub(crate) initialised: bool,
    pub(crate) shut_down: bool,
    pub(crate) counts: BTreeMap<&'static str, u64>,
    /// The number of calls until one fails, and its code.
    pub(crate) failure: Option<(u64, c_int)>,
}

#[derive(Default)]
pub(crate) struct Streams {
    /// Streams made here, and their devices.
    pub(crate) made: BTreeMap<u64, usize>,
    pub(crate) destroyed: BTreeSet<u64>,
    /// Streams that report something else about their capture.
    pub(crate) odd_captures: BTreeMap<u64, c_int>,
}

#[derive(Default)]
pub(crate) struct Pages {
    /// The pages to refuse: handle types, RDMA, and the code to return.
    pub(crate) refused: (c_uint, bool, c_int),
    /// The kind of each page.
    pub(crate) kinds: BTreeMap<u64, PageKind>,
}

/// The state that every call sees.
pub(crate) struct World {
    pub(crate) devices: Vec<Device>,
    machine: Machine,
    pub(crate) calls: Calls,
    next_address: u64,
    /// The device of each plain allocation and reserved range.
    pub(crate) owners: BTreeMap<u64, (u64, usize)>,
    pub(crate) streams: Streams,
    pub(crate) pages: Pages,
    /// The content of the devices' memory.
    pub(crate) memory: SimMemory,
    /// How NVML answers.
    pub(crate) nvml: Nvml,
}

#[expect(
    clippy::disallowed_methods,
    reason = "this library stands in for one that environment variables configure"
)]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn number<T: FromStr>(name: &str, default: T) -> T {
    variable(name).and_then(|text| text.trim().parse().ok()).unwrap_or(default)
}

impl World {
    fn from_environment() -> Self {
        let plain = SimConfig::with_capacity(number("STANDIN_CAPACITY", GIB));
        let config = SimConfig { host: number("STANDIN_HOST", plain.host), ..plain };
        let devices: Vec<Device> = (0..number("STANDIN_DEVICES", 1))
            .map(|device| Device {
                sim: SimDriver::new(SimConfig { device, ..config }),
                retained: 0,
                access: BTreeMap::new(),
                capturing: BTreeSet::new(),
                processes: BTreeMap::new(),
            })
            .collect();
        let count = devices.len();
        let peers = match variable("STANDIN_PEERS").unwrap_or_default().trim() {
            "all" => (0..count).flat_map(|from| (0..count).map(move |to| (from, to))).collect(),
            pairs => pairs
                .split(',')
                .filter_map(|pair| {
                    let (from, to) = pair.split_once('>')?;
                    Some((from.trim().parse().ok()?, to.trim().parse().ok()?))
                })
                .collect(),
        };
        let without = variable("STANDIN_WITHOUT").unwrap_or_default();
        let machine = Machine {
            peers,
            without: without.split(',').map(|word| word.trim().to_owned()).collect(),
            node: number("STANDIN_NUMA", 0),
            lenient: number("STANDIN_LENIENT", 0) != 0,
        };
        Self {
            devices,
            machine,
            calls: Calls::default(),
            next_address: FIRST_ADDRESS,
            owners: BTreeMap::new(),
            streams: Streams::default(),
            pages: Pages::default(),
            memory: SimMemory::default(),
            nvml: Nvml::default(),
        }
    }

    /// Returns the NUMA node next to the devices, or -1.
    pub(crate) fn node(&self) -> c_int {
        self.machine.node
    }

    pub(crate) fn supports(&self, device: usize, what: &str) -> bool {
        let alone = format!("{what}@{device}");
        !self.machine.without.iter().any(|word| word == what || *word == alone)
    }

    pub(crate) fn can_reach(&self, from: usize, to: usize) -> bool {
        from != to && self.machine.peers.contains(&(from, to))
    }

    /// Returns a device by its CUDA number.
    pub(crate) fn device(&self, device: c_int) -> Result<usize, c_int> {
        let index = usize::try_from(device).map_err(|_| INVALID_DEVICE)?;
        if index < self.devices.len() { Ok(index) } else { Err(INVALID_DEVICE) }
    }

    /// Returns the device whose context is current.
    pub(crate) fn current(&self) -> Result<usize, c_int> {
        let current = STACK.with_borrow(|stack| stack.last().copied().flatten());
        let device = current.ok_or(INVALID_CONTEXT)?;
        if self.devices[device].retained == 0 {
            return Err(CONTEXT_IS_DESTROYED);
        }
        Ok(device)
    }

    /// Does as [`current`](Self::current), for a call that would invalidate a capture in progress.
    pub(crate) fn current_outside_capture(&self) -> Result<usize, c_int> {
        let captured = self.devices.iter().any(|device| !device.capturing.is_empty());
        if captured && MODE.get() != RELAXED {
            return Err(CAPTURE_UNSUPPORTED);
        }
        self.current()
    }

    /// Does the same for a call on pages, which CUDA allows during a capture.
    pub(crate) fn current_for_pages(&self) -> Result<usize, c_int> {
        if self.machine.lenient { self.current() } else { self.current_outside_capture() }
    }

    /// Does the same for a call on pages that belong to `device`.
    pub(crate) fn expect_current(&self, device: usize) -> Result<&SimDriver, c_int> {
        if self.current_for_pages()? != device {
            return Err(INVALID_CONTEXT);
        }
        Ok(&self.devices[device].sim)
    }

    /// Returns addresses that are unused on all devices.
    pub(crate) fn fresh_address(&mut self, bytes: u64) -> u64 {
        let address = self.next_address;
        let span = bytes.next_multiple_of(2 * MIB).saturating_add(2 * MIB);
        self.next_address = address.saturating_add(span);
        address
    }

    /// Returns the device of the allocation or range that contains `address`.
    pub(crate) fn owner(&self, address: u64) -> Option<usize> {
        let (&start, &(bytes, device)) = self.owners.range(..=address).next_back()?;
        (address - start < bytes).then_some(device)
    }

    /// Checks that work on a stream may use a range of memory: all of it lies in one allocation.
    pub(crate) fn reach(&self, address: u64, bytes: usize, stream: *mut ()) -> Answer {
        self.current()?;
        self.stream(stream)?;
        let found = self.owners.range(..=address).next_back();
        let (&start, &(size, _)) = found.ok_or(INVALID_VALUE)?;
        let end = address.checked_add(bytes as u64).ok_or(INVALID_VALUE)?;
        if end - start <= size { Ok(()) } else { Err(INVALID_VALUE) }
    }

    /// Returns the device of a stream.
    pub(crate) fn stream(&self, stream: *mut ()) -> Result<(usize, StreamId), c_int> {
        let stream = stream.addr() as u64;
        if self.streams.destroyed.contains(&stream) {
            return Err(INVALID_HANDLE);
        }
        let device = match self.streams.made.get(&stream) {
            Some(&device) => device,
            None => self.current()?,
        };
        Ok((device, StreamId(stream)))
    }

    /// Splits a handle made by [`tagged`] into its device and its number there.
    pub(crate) fn untag(&self, handle: u64) -> Result<(usize, u64), c_int> {
        let device = usize::try_from(handle >> DEVICE_SHIFT).unwrap_or(0);
        let device = device.checked_sub(1).filter(|&device| device < self.devices.len());
        let number = handle & ((1 << DEVICE_SHIFT) - 1);
        device.map(|device| (device, number)).ok_or(INVALID_HANDLE)
    }
}

/// Returns a handle that contains its device and is never null.
pub(crate) fn tagged(device: usize, number: u64) -> u64 {
    ((device as u64 + 1) << DEVICE_SHIFT) | number
}

/// Returns CUDA's code for a simulated device's error.
pub(crate) fn code_of<T>(result: DriverResult<T>) -> Result<T, c_int> {
    result.map_err(|error| match error.fault {
        Fault::OutOfMemory => OUT_OF_MEMORY,
        Fault::Failed(code) => code,
    })
}

pub(crate) fn world() -> MutexGuard<'static, World> {
    static WORLD: OnceLock<Mutex<World>> = OnceLock::new();
    let world = WORLD.get_or_init(|| Mutex::new(World::from_environment()));
    world.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs one function of the driver API or of NVML.
pub(crate) fn answer(name: &'static str, call: impl FnOnce(&mut World) -> Answer) -> c_int {
    // A panic must not reach the C caller.
    let answered = catch_unwind(AssertUnwindSafe(|| {
        gate::pass(name);
        let mut world = world();
        *world.calls.counts.entry(name).or_default() += 1;
        if let Some((left, code)) = &mut world.calls.failure {
            *left -= 1;
            if *left == 0 {
                let code = *code;
                world.calls.failure = None;
                return Err(code);
            }
        }
        if world.calls.shut_down {
            return Err(DEINITIALIZED);
        }
        let is_nvml = name.starts_with("nvml");
        if !world.calls.initialised && !is_nvml && !WITHOUT_INIT.contains(&name) {
            return Err(NOT_INITIALIZED);
        }
        call(&mut world)
    }));
    answered.unwrap_or(Err(UNKNOWN)).err().unwrap_or(0)
}

/// The functions that may be called before `cuInit`; all of NVML's may.
const WITHOUT_INIT: [&str; 4] =
    ["cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"];
