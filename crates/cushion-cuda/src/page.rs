//! How pages are made: with as many ways to share them as the device and the system allow.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::call::{CallResult, Code};
use crate::sys::{
    Api, CUdevice, CUdevice_attribute as Attribute, CUmemAllocationHandleType as HandleType,
    CUmemAllocationProp, CUmemAllocationType, CUmemLocation, CUmemLocationType,
};

const FILE: HandleType = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const FABRIC: HandleType = HandleType::CU_MEM_HANDLE_TYPE_FABRIC;
const NOTHING: HandleType = HandleType::CU_MEM_HANDLE_TYPE_NONE;

/// How a page can be shared: the handles it can be exported as, and whether other devices (network
/// cards) may reach it directly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageKind {
    handles: HandleType,
    rdma: bool,
}

impl PageKind {
    pub(crate) fn properties(self, device: CUdevice) -> CUmemAllocationProp {
        CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: self.handles,
            location: on_device(device),
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

/// The kinds to try, the most able first, and which of them works. A device may claim what the system
/// around it refuses (a fabric without its service, a container without the right), and only the
/// first page shows it.
#[derive(Debug)]
pub(crate) struct PageKinds {
    kinds: Vec<PageKind>,
    works: AtomicUsize,
}

impl PageKinds {
    pub(crate) fn of(api: &Api, device: CUdevice) -> Self {
        // A driver too old to know the attribute does not support it.
        let supports = |attribute| api.attribute(device, attribute).is_ok_and(|value| value != 0);
        let either = |yes, kind| if yes { kind } else { NOTHING };
        let file = either(
            supports(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
            FILE,
        );
        let fabric =
            either(supports(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED), FABRIC);
        let rdma = supports(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
        let mut kinds = vec![
            PageKind { handles: HandleType(file.0 | fabric.0), rdma },
            PageKind { handles: file, rdma },
            PageKind { handles: NOTHING, rdma },
            PageKind { handles: NOTHING, rdma: false },
        ];
        kinds.dedup();
        Self { kinds, works: AtomicUsize::new(0) }
    }

    /// Makes one with the best kind that is not refused, and remembers it.
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
        // All of them are refused, so it is not the kind that is wrong.
        Err(first_refusal.unwrap_or(Code::INVALID_VALUE))
    }
}
