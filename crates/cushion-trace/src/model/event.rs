//! One recorded event.

use super::names::Name;
use super::stacks::StackId;

/// One action of the recorded allocator.
///
/// A trace has millions of events and far fewer stacks, so an event is a small `Copy` value that
/// refers to its stack by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The action.
    pub action: Action,
    /// The address of the block or segment; for [`Action::Oom`], the free bytes of the device.
    pub addr: u64,
    /// The size in bytes. For an allocation this is the requested size.
    pub size: u64,
    /// The stream, as the bits of its handle.
    pub stream: u64,
    /// The time in microseconds since 1970; zero if the file has none.
    pub time_us: u64,
    /// The memory pool, if the file has it. Files of PyTorch 2.11 do not, newer ones do.
    pub pool: Option<(u64, u64)>,
    /// The call stack, if stacks were recorded.
    pub stack: Option<StackId>,
}

impl Event {
    /// An event with every field zero. Packing and reading start from it.
    pub(crate) const EMPTY: Self = Self {
        action: Action::Other,
        addr: 0,
        size: 0,
        stream: 0,
        time_us: 0,
        pool: None,
        stack: None,
    };
}

macro_rules! actions {
    ($($action:ident: $doc:literal,)*) => {
        /// What the allocator did.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Action {
            $(#[doc = $doc] $action,)*
            /// An action that this version of the reader does not know.
            Other,
        }

        impl Action {
            /// Returns the action's name in the file; `other` for an unknown action.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$action => Name::$action.text(),)*
                    Self::Other => "other",
                }
            }

            /// Returns the action's number in packed events and in Cushion's own traces.
            pub(crate) fn code(self) -> u8 {
                self as u8
            }

            pub(crate) fn of_code(code: u8) -> Option<Self> {
                [$(Self::$action,)* Self::Other].get(usize::from(code)).copied()
            }

            /// Returns the action that a file names; [`Self::Other`] for an unknown name.
            #[inline]
            pub(crate) fn of_name(name: Option<Name>) -> Self {
                match name {
                    $(Some(Name::$action) => Self::$action,)*
                    _ => Self::Other,
                }
            }
        }
    };
}

actions! {
    Alloc: "The allocator handed out a block.",
    FreeRequested: "The program freed a block.",
    FreeCompleted: "The block is in the cache again: no stream uses it any more.",
    SegmentAlloc: "The allocator got a segment from the driver.",
    SegmentFree: "The allocator returned a segment to the driver.",
    SegmentMap: "The allocator mapped memory into an expandable segment.",
    SegmentUnmap: "The allocator unmapped memory from an expandable segment.",
    Snapshot: "A snapshot was taken; the size is that of the memory in use.",
    Oom: "The allocator refused a request because memory ran out.",
    Annotate: "The program left a note.",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_has_64_bytes() {
        assert_eq!(size_of::<Event>(), 64);
    }
}
