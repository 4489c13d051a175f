//! The layout of Cushion's own trace file. `docs/trace-format.md` describes it byte by byte.

/// The first bytes of every file, once unpacked. A byte with the version follows.
pub(crate) const MAGIC: &[u8] = b"CUSHION";
pub(crate) const VERSION: u8 = 1;

// The origin of the events: PyTorch's allocator, or RMM's log.
pub(crate) const FROM_TORCH: u8 = 0;
pub(crate) const FROM_RMM: u8 = 1;

// Each section starts with a letter, so that a reader at a wrong position notices.
pub(crate) const SETTINGS: u8 = b'A';
pub(crate) const TEXTS: u8 = b'T';
pub(crate) const FRAMES: u8 = b'F';
pub(crate) const STACKS: u8 = b'S';
pub(crate) const MEMORY: u8 = b'M';
pub(crate) const EVENTS: u8 = b'E';
pub(crate) const END: u8 = b'Z';

// The section of settings starts with a number that has one bit for each setting that follows. The
// integers and the flags take the bits from these on, in the order of `Settings::fields`.
pub(crate) const CONF_BIT: u32 = 0;
pub(crate) const THRESHOLD_BIT: u32 = 1;
pub(crate) const DIVISIONS_BIT: u32 = 2;
pub(crate) const FIRST_INT_BIT: u32 = 3;
pub(crate) const FIRST_FLAG_BIT: u32 = 7;
pub(crate) const SETTINGS_BITS: u32 = 11;

// The first byte of a segment.
pub(crate) const LARGE: u8 = 0x01;
pub(crate) const EXPANDABLE: u8 = 0x02;
pub(crate) const PRIVATE: u8 = 0x04;
pub(crate) const SEGMENT_STACK: u8 = 0x08;

// The first byte of a block. Its two low bits are the state.
pub(crate) const STATE: u8 = 0x03;
pub(crate) const REQUESTED: u8 = 0x04;
pub(crate) const BLOCK_STACK: u8 = 0x08;
pub(crate) const ELSEWHERE: u8 = 0x10;
pub(crate) const ALLOCATED: u8 = 0;
pub(crate) const PENDING_FREE: u8 = 1;
pub(crate) const INACTIVE: u8 = 2;
