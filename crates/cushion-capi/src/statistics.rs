//! `cushion_statistics`: a struct that can grow. The caller says how many bytes of it it knows.

use std::ptr::NonNull;

use cushion::Stats;

use crate::pointers::Out;
use crate::status::{Failure, Status};

/// Declares the struct and the source of each field.
macro_rules! statistics {
    ($($(#[doc = $doc:literal])* $field:ident: |$stats:ident| $value:expr;)*) => {
        /// The struct of the header, field by field. New fields go to the end.
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        pub struct Statistics {
            struct_size: usize,
            $($(#[doc = $doc])* $field: u64,)*
        }

        impl From<&Stats> for Statistics {
            fn from(stats: &Stats) -> Self {
                Self {
                    struct_size: size_of::<Self>(),
                    $($field: { let $stats = stats; $value },)*
                }
            }
        }
    };
}

statistics! {
    /// Bytes of live blocks.
    allocated_bytes: |stats| stats.allocated_bytes.all.current;
    /// The peak of `allocated_bytes`.
    allocated_bytes_peak: |stats| stats.allocated_bytes.all.peak;
    /// Bytes held from the device.
    reserved_bytes: |stats| stats.reserved_bytes.all.current;
    /// The peak of `reserved_bytes`.
    reserved_bytes_peak: |stats| stats.reserved_bytes.all.peak;
    /// Live bytes as requested.
    requested_bytes: |stats| stats.requested_bytes.all.current;
    /// The peak of `requested_bytes`.
    requested_bytes_peak: |stats| stats.requested_bytes.all.peak;
    /// Bytes of live and pending blocks.
    active_bytes: |stats| stats.active_bytes.all.current;
    /// The peak of `active_bytes`.
    active_bytes_peak: |stats| stats.active_bytes.all.peak;
    /// Allocations so far.
    allocations: |stats| stats.allocation.all.allocated;
    /// Frees so far.
    frees: |stats| stats.allocation.all.freed;
    /// Blocks, in use and free.
    blocks: |stats| stats.blocks();
    /// Free blocks.
    free_blocks: |stats| stats.free_blocks();
    /// Reserved bytes that are not in use.
    cached_bytes: |stats| stats.cached_bytes();
    /// Bytes of the largest free block.
    largest_free_block: |stats| stats.largest_free_block();
    /// Allocations served from reserved memory.
    hits: |stats| stats.hits;
    /// Allocations that needed the device.
    misses: |stats| stats.misses;
    /// Allocations retried after all cached memory was released.
    retries: |stats| stats.num_alloc_retries;
    /// Allocations refused because memory ran out.
    ooms: |stats| stats.num_ooms;
}

/// The size of the first version, the smallest that a caller can know.
const FIRST: usize = size_of::<usize>() + 18 * size_of::<u64>();

/// The caller's struct, and the number of bytes that both sides know.
pub(crate) struct Asked {
    to: NonNull<Statistics>,
    room: usize,
}

impl Out<Statistics> {
    pub(crate) fn asked(&self) -> Result<Asked, Failure> {
        let to = self.place("out")?;
        // SAFETY: the pointer is not null, so the caller guarantees that it points to the struct,
        // and has set this field, its first. The caller's struct may be shorter than ours, so no
        // reference to it may be made.
        let told = unsafe { to.cast::<usize>().read() };
        if told < FIRST {
            let text = format!(
                "`out->struct_size` is {told}: set it to sizeof(cushion_statistics), at least {FIRST}"
            );
            return Err(Failure::new(Status::InvalidArgument, text));
        }
        Ok(Asked { to, room: told.min(size_of::<Statistics>()) })
    }
}

impl Asked {
    /// Fills the part of the struct that both sides know, and stores its size in `struct_size`.
    pub(crate) fn fill(&self, stats: &Stats) {
        let figures = Statistics { struct_size: self.room, ..Statistics::from(stats) };
        let from = NonNull::from_ref(&figures).cast::<u8>();
        // SAFETY: both sides have `room` bytes: `room` exceeds neither our struct nor the size that
        // the caller gave. Ours is on this stack, so they do not overlap. The fields are numbers
        // without padding. Writing the whole struct could go past the end of a shorter one.
        unsafe { self.to.cast::<u8>().copy_from_nonoverlapping(from, self.room) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_versions_start_with_the_first() {
        assert!(size_of::<Statistics>() >= FIRST);
        assert_eq!(std::mem::offset_of!(Statistics, allocated_bytes), size_of::<usize>());
        assert_eq!(std::mem::offset_of!(Statistics, ooms) + size_of::<u64>(), FIRST);
    }
}
