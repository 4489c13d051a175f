//! `cushion_statistics`: figures in a struct that can grow, because its owner says how much of it it knows.

use std::ptr::NonNull;

use cushion::Stats;

use crate::pointers::Out;
use crate::status::{Failure, Status};

/// Declares the struct, and where each figure comes from.
macro_rules! statistics {
    ($($(#[doc = $doc:literal])* $field:ident: |$stats:ident| $value:expr;)*) => {
        /// As in the header, field by field. New ones go to the end.
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
    /// Bytes of blocks handed out.
    allocated_bytes: |stats| stats.allocated_bytes.all.current;
    /// The most there was.
    allocated_bytes_peak: |stats| stats.allocated_bytes.all.peak;
    /// Bytes held from the device.
    reserved_bytes: |stats| stats.reserved_bytes.all.current;
    /// The most there was.
    reserved_bytes_peak: |stats| stats.reserved_bytes.all.peak;
    /// Bytes asked for.
    requested_bytes: |stats| stats.requested_bytes.all.current;
    /// The most there was.
    requested_bytes_peak: |stats| stats.requested_bytes.all.peak;
    /// Bytes of blocks live or pending.
    active_bytes: |stats| stats.active_bytes.all.current;
    /// The most there was.
    active_bytes_peak: |stats| stats.active_bytes.all.peak;
    /// Allocations so far.
    allocations: |stats| stats.allocation.all.allocated;
    /// Frees so far.
    frees: |stats| stats.allocation.all.freed;
    /// Blocks, in use and free.
    blocks: |stats| stats.blocks();
    /// Free blocks.
    free_blocks: |stats| stats.free_blocks();
    /// Bytes held and in nobody's use.
    cached_bytes: |stats| stats.cached_bytes();
    /// The largest free block.
    largest_free_block: |stats| stats.largest_free_block();
    /// Allocations served from memory already held.
    hits: |stats| stats.hits;
    /// Allocations that needed the device.
    misses: |stats| stats.misses;
    /// Allocations tried again after everything cached was given back.
    retries: |stats| stats.num_alloc_retries;
    /// Allocations refused for want of memory.
    ooms: |stats| stats.num_ooms;
}

/// The size of the first version: nobody can know less.
const FIRST: usize = size_of::<usize>() + 18 * size_of::<u64>();

/// A struct of the caller's, and how much of it both sides know.
pub(crate) struct Asked {
    to: NonNull<Statistics>,
    room: usize,
}

impl Out<Statistics> {
    pub(crate) fn asked(&self) -> Result<Asked, Failure> {
        let to = self.place("out")?;
        // SAFETY: not null, so the caller has made it point to the struct, whose first field this is, and has set
        // it. The struct as a whole may be shorter than ours, so that no reference to it can be made.
        let told = unsafe { to.cast::<usize>().read() };
        if told < FIRST {
            let text = format!(
                "`out->struct_size` is {told}: set it to sizeof(cushion_statistics), {FIRST} at least"
            );
            return Err(Failure::new(Status::InvalidArgument, text));
        }
        Ok(Asked { to, room: told.min(size_of::<Statistics>()) })
    }
}

impl Asked {
    /// Fills as much of the struct as both sides know, and says how much that is.
    pub(crate) fn fill(&self, stats: &Stats) {
        let figures = Statistics { struct_size: self.room, ..Statistics::from(stats) };
        let from = NonNull::from_ref(&figures).cast::<u8>();
        // SAFETY: both have `room` bytes: it is no more than our struct, and no more than the caller said that its own
        // has. Ours is on this stack, so they do not overlap. The fields are numbers without gaps. A write of the
        // whole would go past the end of a shorter struct.
        unsafe { self.to.cast::<u8>().copy_from_nonoverlapping(from, self.room) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_version_is_the_beginning_of_every_other() {
        assert!(size_of::<Statistics>() >= FIRST);
        assert_eq!(std::mem::offset_of!(Statistics, allocated_bytes), size_of::<usize>());
        assert_eq!(std::mem::offset_of!(Statistics, ooms) + size_of::<u64>(), FIRST);
    }
}
