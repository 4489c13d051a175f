//! The snapshot: the segments and blocks of PyTorch's allocator at one moment, the events before
//! that moment, and the allocator's settings.
//!
//! The snapshot leaves out what no replay uses: metadata, annotations and host memory.

use super::events::Events;
use super::settings::Settings;
use super::stacks::{StackId, Stacks};

/// A PyTorch memory snapshot.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// The segments at the time of the snapshot, in the file's order.
    pub segments: Vec<Segment>,
    /// The recorded events of each device, oldest first (`device_traces`).
    pub devices: Vec<Events>,
    /// The allocator's settings.
    pub settings: Settings,
    /// The stacks that events refer to.
    pub stacks: Stacks,
    /// The program that recorded the trace.
    pub origin: Origin,
}

/// The program that recorded a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Origin {
    /// PyTorch's caching allocator: requests, segments and their driver calls.
    #[default]
    Torch,
    /// RAPIDS Memory Manager's log: requests only, no segments.
    Rmm,
}

/// A segment: one range of device addresses that blocks are cut from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The device.
    pub device: u32,
    /// The first address.
    pub address: u64,
    /// The length in bytes.
    pub total_size: u64,
    /// The stream that the segment belongs to, as the bits of its handle.
    pub stream: u64,
    /// Whether the segment serves large requests.
    pub large: bool,
    /// The memory pool that the segment belongs to; the default pool is `(0, 0)`.
    pub pool: (u64, u64),
    /// Whether this is a mapped range of an expandable segment.
    pub expandable: bool,
    /// The call stack of the segment's allocation, if stacks were recorded.
    pub stack: Option<StackId>,
    /// The blocks, by address, without gaps.
    pub blocks: Vec<Block>,
}

/// A block of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The first address.
    pub address: u64,
    /// The length in bytes.
    pub size: u64,
    /// The requested bytes when the block was last handed out.
    pub requested_size: u64,
    /// Whether the block is in use.
    pub state: BlockState,
    /// The call stack of the request, if stacks were recorded.
    pub stack: Option<StackId>,
}

/// Whether a block is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// The program uses the block.
    Allocated,
    /// The program freed the block, but a stream may still use it.
    PendingFree,
    /// The block is in the cache.
    Inactive,
}
