//! Creates pages: on the device, shareable in as many ways as the device and the system allow; in
//! host memory, not shareable.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::call::{Attribute, CallResult, Code};
use crate::sys::{
    Api, CUdevice, CUmemAllocationHandleType as HandleType, CUmemAllocationProp,
    CUmemAllocationType, CUmemLocation, CUmemLocationType,
};

const FILE: HandleType = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const FABRIC: HandleType = HandleType::CU_MEM_HANDLE_TYPE_FABRIC;
const NOTHING: HandleType = HandleType::CU_MEM_HANDLE_TYPE_NONE;

/// How a page can be shared: the handle types it can be exported as, and whether other devices
/// (network cards) may access it directly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageKind {
    handles: HandleType,
    rdma: bool,
}

impl PageKind {
    /// A page that is not shared.
    pub(crate) const OWN: Self = Self { handles: NOTHING, rdma: false };

    pub(crate) fn properties(self, location: CUmemLocation) -> CUmemAllocationProp {
        CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: self.handles,
            location,
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: cudarc::driver::sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: u8::from(self.rdma),
                usage: 0,
                reserved: [0; 4],
            },
        }
    }
}

pub(crate) fn on_device(device: CUdevice) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

/// Returns whether a device has a feature. A driver too old to know the attribute does not support
/// it.
fn supports(api: &Api, device: CUdevice, attribute: Attribute) -> bool {
    api.attribute(device, attribute).is_ok_and(|value| value != 0)
}

/// Returns the location of pages in host memory: the NUMA node next to the device. Returns `None`
/// if the device, or a peer that gets access to all of its pages, cannot use such pages.
pub(crate) fn on_host(api: &Api, device: CUdevice, peers: &[CUdevice]) -> Option<CUmemLocation> {
    let can_use = |&device| supports(api, device, Attribute::HOST_PAGES);
    if ![device].iter().chain(peers).all(can_use) {
        return None;
    }
    // On a host without NUMA nodes CUDA returns -1; all memory is in the first node.
    let node = api.attribute(device, Attribute::HOST_NODE).unwrap_or(0);
    Some(CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA,
        id: node.max(0),
    })
}

/// The kinds to try, the most capable first, and the one that works. A device may claim a kind that
/// the system refuses (a fabric without its service, a container without the permission), which
/// only the first page shows.
#[derive(Debug)]
pub(crate) struct PageKinds {
    kinds: Vec<PageKind>,
    works: AtomicUsize,
}

impl PageKinds {
    pub(crate) fn of(api: &Api, device: CUdevice) -> Self {
        let supports = |attribute| supports(api, device, attribute);
        let either = |yes, kind| if yes { kind } else { NOTHING };
        let file = either(supports(Attribute::FILE_HANDLES), FILE);
        let fabric = either(supports(Attribute::FABRIC_HANDLES), FABRIC);
        let rdma = supports(Attribute::RDMA);
        let mut kinds = vec![
            PageKind { handles: HandleType(file.0 | fabric.0), rdma },
            PageKind { handles: file, rdma },
            PageKind { handles: NOTHING, rdma },
            PageKind::OWN,
        ];
        kinds.dedup();
        Self { kinds, works: AtomicUsize::new(0) }
    }

    /// Creates a page of the best kind that is not refused, and remembers the kind.
    pub(crate) fn first_not_refused<T>(
        &self,
        mut make: impl FnMut(PageKind) -> CallResult<T>,
    ) -> CallResult<T> {
        let start = self.works.load(Ordering::Relaxed);
        let mut first_refusal = None;
        for (index, &kind) in self.kinds.iter().enumerate().skip(start) {
            match make(kind) {
                Ok(made) => {
                    self.works.fetch_max(index, Ordering::Relaxed);
                    return Ok(made);
                }
                Err(code @ (Code::NOT_PERMITTED | Code::NOT_SUPPORTED | Code::INVALID_VALUE)) => {
                    first_refusal.get_or_insert(code);
                }
                Err(code) => return Err(code),
            }
        }
        // All kinds are refused, so the kind is not the cause.
        Err(first_refusal.unwrap_or(Code::INVALID_VALUE))
    }
}
