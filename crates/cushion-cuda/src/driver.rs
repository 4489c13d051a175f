//! [`CudaDriver`]: the engine's [`Driver`] on a real device.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cushion_core::driver::{
    Call, Capture, DriverResult, EventId, Fault, MemoryInfo, NodeId, PageHandle, Properties,
};
use cushion_core::size::MIB;
use cushion_core::{Driver, DriverError, StreamId};

use crate::call::{Attribute, CallResult, Code, ContextId};
use crate::context::{Entered, Primary};
use crate::error::CudaError;
use crate::page::{PageKind, PageKinds, on_device, on_host};
use crate::sys::{Api, CUdevice, CUmemAccess_flags, CUmemAccessDesc, CUmemLocation};

/// A CUDA device, in its primary context. Every method may be called from any thread and with any
/// current context, and leaves that context current.
#[derive(Debug)]
pub struct CudaDriver {
    api: &'static Api,
    device: CUdevice,
    primary: Primary,
    properties: Properties,
    /// The other devices that can access this device's memory.
    peers: Vec<CUdevice>,
    /// The access that `set_access` grants: this device and its peers.
    access: Vec<CUmemAccessDesc>,
    kinds: PageKinds,
    /// The location of pages in host memory, if the device and its peers can use them.
    host: Option<CUmemLocation>,
    /// The pages created here and not released.
    pages: Mutex<BTreeSet<PageHandle>>,
    /// The events created here and not destroyed. The value is the event that was recorded instead,
    /// if the stream belongs to another device.
    events: Mutex<BTreeMap<EventId, Option<EventId>>>,
}

impl CudaDriver {
    /// Opens the device with this index, as CUDA numbers the devices that the process can see. Its
    /// primary context is retained as long as the driver lives. No other context is created, on
    /// this or another device.
    pub fn new(device: u32) -> Result<Self, CudaError> {
        let count = crate::device_count()?;
        if count == 0 {
            return Err(CudaError::NoDevice);
        }
        if device >= count {
            return Err(CudaError::NoSuchDevice { device, count });
        }
        let api = Api::load()?;
        let failed = |function| move |code| CudaError::of(api, function, code);
        let id = api.device(device).map_err(failed("cuDeviceGet"))?;
        let peers = peers_of(api, id, count);
        let primary = Primary::retain(api, id).map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let kinds = PageKinds::of(api, id);
        let entered = Entered::enter(api, primary.context).map_err(failed("cuCtxPushCurrent"))?;
        let total = api.memory_info().map_err(failed("cuMemGetInfo"))?.total;
        let granularity =
            granularity(api, id, &kinds).map_err(failed("cuMemGetAllocationGranularity"))?;
        drop(entered);
        Ok(Self {
            api,
            device: id,
            primary,
            properties: Properties {
                device,
                total,
                granularity: granularity.unwrap_or(PAGE),
                has_pages: granularity.is_some(),
                process_overhead: PROCESS_OVERHEAD,
            },
            access: [id].iter().chain(&peers).map(|&device| read_and_write(device)).collect(),
            host: on_host(api, id, &peers),
            peers,
            kinds,
            pages: Mutex::default(),
            events: Mutex::default(),
        })
    }

    /// Returns the device's name.
    pub fn device_name(&self) -> Result<String, CudaError> {
        let name = self.api.device_name(self.device);
        name.map_err(|code| CudaError::of(self.api, "cuDeviceGetName", code))
    }

    pub(crate) fn api(&self) -> &'static Api {
        self.api
    }

    pub(crate) fn device(&self) -> CUdevice {
        self.device
    }

    pub(crate) fn context(&self) -> ContextId {
        self.primary.context
    }

    /// Makes calls in the device's context.
    fn inside<T>(
        &self,
        call: Call,
        calls: impl FnOnce(&'static Api) -> CallResult<T>,
    ) -> DriverResult<T> {
        Entered::enter(self.api, self.primary.context)
            .and_then(|_entered| calls(self.api))
            .map_err(|code| DriverError { call, fault: fault(code) })
    }

    fn events(&self) -> MutexGuard<'_, BTreeMap<EventId, Option<EventId>>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pages(&self) -> MutexGuard<'_, BTreeSet<PageHandle>> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the event that was recorded for `event`.
    fn marked(&self, event: EventId) -> CallResult<EventId> {
        self.events().get(&event).map(|elsewhere| elsewhere.unwrap_or(event)).ok_or(UNKNOWN)
    }

    /// Stores the event that is recorded for `event` from now on, if it is another one.
    fn set_marked(&self, event: EventId, elsewhere: Option<EventId>) {
        let before = match self.events().get_mut(&event) {
            Some(marked) => std::mem::replace(marked, elsewhere),
            None => elsewhere,
        };
        if let Some(before) = before {
            // The replaced event is not needed any more. If CUDA refuses to destroy it, a few bytes
            // are lost.
            let _ = self.api.event_destroy(before);
        }
    }

    fn record(&self, api: &'static Api, event: EventId, stream: StreamId) -> CallResult<()> {
        match api.event_record(event, stream) {
            Ok(()) => {
                self.set_marked(event, None);
                Ok(())
            }
            Err(code) if may_be_gone(code) => match api.stream_context(stream) {
                // A stream of another device: only an event of that device can be recorded on it.
                Ok(context) if context != self.primary.context => {
                    let _there = Entered::enter(api, context)?;
                    let elsewhere = api.event_create()?;
                    if let Err(code) = api.event_record(elsewhere, stream) {
                        let _ = api.event_destroy(elsewhere);
                        return Err(code);
                    }
                    self.set_marked(event, Some(elsewhere));
                    Ok(())
                }
                _ => self.record_after_everything(api, event),
            },
            Err(code) => Err(code),
        }
    }

    /// Records an event for a stream that has been destroyed. A program may destroy a stream while
    /// its work runs, and then no event can be recorded after that work; an error would leave its
    /// memory pending for ever. So this waits for all work of every device that can access this
    /// device's memory, whichever of them the stream belonged to, and records the event on the
    /// default stream.
    fn record_after_everything(&self, api: &'static Api, event: EventId) -> CallResult<()> {
        api.synchronize()?;
        for &peer in &self.peers {
            if api.primary_is_active(peer)? {
                let primary = Primary::retain(api, peer)?;
                let _there = Entered::enter(api, primary.context)?;
                api.synchronize()?;
            }
        }
        api.event_record(event, StreamId(0))?;
        self.set_marked(event, None);
        Ok(())
    }
}

/// More than a context, and the libraries around PyTorch, take of a device.
const PROCESS_OVERHEAD: u64 = 1 << 30;

/// The code that CUDA returns for a handle it never gave.
const UNKNOWN: Code = Code::INVALID_HANDLE;

/// Returns whether CUDA may return this code for a stream that was destroyed, or that belongs to
/// another device.
fn may_be_gone(code: Code) -> bool {
    matches!(
        code,
        Code::INVALID_HANDLE
            | Code::INVALID_VALUE
            | Code::INVALID_CONTEXT
            | Code::CONTEXT_IS_DESTROYED
    )
}

fn fault(code: Code) -> Fault {
    match code {
        Code::OUT_OF_MEMORY => Fault::OutOfMemory,
        Code(code) => Fault::Failed(code),
    }
}

/// Returns the devices that can access the memory of `device`. The query creates no context. A
/// device that cannot be queried is not a peer: a broken device must not prevent the use of the
/// others.
fn peers_of(api: &Api, device: CUdevice, count: u32) -> Vec<CUdevice> {
    let others = (0..count).filter_map(|index| api.device(index).ok());
    let reaches = |&other: &CUdevice| other != device && api.can_reach(other, device) == Ok(true);
    others.filter(reaches).collect()
}

/// The smallest page, on a device that supports pages.
const PAGE: u64 = 2 * MIB;

/// Returns the page granularity, or `None` if the device does not support pages.
fn granularity(api: &Api, device: CUdevice, kinds: &PageKinds) -> CallResult<Option<u64>> {
    if api.attribute(device, Attribute::PAGES)? == 0 {
        return Ok(None);
    }
    let page =
        kinds.first_not_refused(|kind| api.granularity(&kind.properties(on_device(device))))?;
    Ok(Some(page))
}

fn read_and_write(device: CUdevice) -> CUmemAccessDesc {
    CUmemAccessDesc {
        location: on_device(device),
        flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    }
}

impl Driver for CudaDriver {
    fn properties(&self) -> Properties {
        self.properties
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        self.inside(Call::MemoryInfo, |api| api.memory_info())
    }

    fn alloc(&self, bytes: u64) -> DriverResult<u64> {
        self.inside(Call::Alloc, |api| api.alloc(bytes))
    }

    fn free(&self, address: u64) -> DriverResult<()> {
        self.inside(Call::Free, |api| api.free(address))
    }

    fn reserve(&self, bytes: u64) -> DriverResult<u64> {
        self.inside(Call::Reserve, |api| api.reserve(bytes, self.properties.granularity))
    }

    fn unreserve(&self, address: u64, bytes: u64) -> DriverResult<()> {
        self.inside(Call::Unreserve, |api| api.unreserve(address, bytes))
    }

    fn create(&self, bytes: u64) -> DriverResult<PageHandle> {
        let page = self.inside(Call::Create, |api| {
            let device = on_device(self.device);
            self.kinds.first_not_refused(|kind| api.create(bytes, &kind.properties(device)))
        })?;
        self.pages().insert(page);
        Ok(page)
    }

    fn create_host(&self, bytes: u64) -> DriverResult<PageHandle> {
        let page = self.inside(Call::CreateHost, |api| {
            let host = self.host.ok_or(Code::NOT_SUPPORTED)?;
            api.create(bytes, &PageKind::OWN.properties(host))
        })?;
        self.pages().insert(page);
        Ok(page)
    }

    fn release(&self, page: PageHandle) -> DriverResult<()> {
        self.inside(Call::Release, |api| {
            if !self.pages().remove(&page) {
                return Err(UNKNOWN);
            }
            api.release(page).inspect_err(|_| {
                self.pages().insert(page);
            })
        })
    }

    fn map(&self, address: u64, bytes: u64, page: PageHandle) -> DriverResult<()> {
        self.inside(Call::Map, |api| {
            if !self.pages().contains(&page) {
                return Err(UNKNOWN);
            }
            api.map(address, bytes, page)
        })
    }

    fn set_access(&self, address: u64, bytes: u64) -> DriverResult<()> {
        self.inside(Call::SetAccess, |api| api.set_access(address, bytes, &self.access))
    }

    fn unmap(&self, address: u64, bytes: u64) -> DriverResult<()> {
        self.inside(Call::Unmap, |api| api.unmap(address, bytes))
    }

    fn event_create(&self) -> DriverResult<EventId> {
        let event = self.inside(Call::EventCreate, |api| api.event_create())?;
        self.events().insert(event, None);
        Ok(event)
    }

    fn event_destroy(&self, event: EventId) -> DriverResult<()> {
        self.inside(Call::EventDestroy, |api| {
            let elsewhere = self.events().remove(&event).ok_or(UNKNOWN)?;
            if let Err(code) = api.event_destroy(event) {
                self.events().insert(event, elsewhere);
                return Err(code);
            }
            if let Some(elsewhere) = elsewhere {
                let _ = api.event_destroy(elsewhere);
            }
            Ok(())
        })
    }

    fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        self.inside(Call::EventRecord, |api| {
            self.marked(event)?;
            self.record(api, event, stream)
        })
    }

    fn event_query(&self, event: EventId) -> DriverResult<bool> {
        self.inside(Call::EventQuery, |api| api.event_query(self.marked(event)?))
    }

    fn event_synchronize(&self, event: EventId) -> DriverResult<()> {
        self.inside(Call::EventSynchronize, |api| api.event_synchronize(self.marked(event)?))
    }

    fn stream_synchronize(&self, stream: StreamId) -> DriverResult<()> {
        // The engine calls this before it releases memory that a stream used, and by then the
        // program may have destroyed the stream: CUDA does not check such a handle, it crashes.
        // Waiting for all work of the device needs no handle. It would invalidate a capture, and
        // the engine does not call it during one.
        let _ = stream;
        self.inside(Call::StreamSynchronize, Api::synchronize)
    }

    fn capture(&self, stream: StreamId) -> DriverResult<Option<Capture>> {
        self.inside(Call::Capture, |api| match api.capture(stream) {
            Err(code) if may_be_gone(code) => match api.stream_context(stream) {
                Ok(context) if context != self.primary.context => {
                    let _there = Entered::enter(api, context)?;
                    api.capture(stream)
                }
                // A destroyed stream is not being captured.
                _ => Ok(None),
            },
            other => other,
        })
    }

    fn dependencies(&self, node: NodeId) -> DriverResult<Vec<NodeId>> {
        self.inside(Call::Dependencies, |api| api.dependencies(node))
    }
}
