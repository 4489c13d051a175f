//! What is noted beside an allocation while history is recorded: the Python stack and the metadata that
//! the program set. Both are put into the engine's opaque tag as two numbers.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use cushion::core::Context;
use rustc_hash::FxHashMap;

use crate::stacks::{self, StackId};

/// Which events get a stack, as PyTorch's `context` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Level {
    /// None.
    Never = 0,
    /// Memory that is live.
    State = 1,
    /// Events of allocation too.
    Alloc = 2,
    /// Frees too.
    All = 3,
}

impl Level {
    pub(crate) fn named(name: Option<&str>) -> Option<Self> {
        match name {
            None => Some(Self::Never),
            Some("state") => Some(Self::State),
            Some("alloc") => Some(Self::Alloc),
            Some("all") => Some(Self::All),
            Some(_) => None,
        }
    }
}

static LEVEL: AtomicU8 = AtomicU8::new(Level::Never as u8);
static METADATA: AtomicU32 = AtomicU32::new(0);
static TEXTS: Mutex<Option<Texts>> = Mutex::new(None);

/// Every text set so far, each once; numbers begin at one.
#[derive(Debug, Default)]
struct Texts {
    numbers: FxHashMap<String, u32>,
    texts: Vec<String>,
}

/// The level in force.
pub(crate) fn level() -> Level {
    match LEVEL.load(Ordering::Relaxed) {
        0 => Level::Never,
        1 => Level::State,
        2 => Level::Alloc,
        _ => Level::All,
    }
}

/// Gathers stacks at this level from now on.
pub(crate) fn set_level(level: Level) {
    LEVEL.store(level as u8, Ordering::Relaxed);
}

/// The tag for an event that gets a stack from `least` on. With nothing recorded it costs two loads.
pub(crate) fn context(least: Level) -> Context {
    let stack = if level() >= least { stacks::gather() } else { None };
    let stack = stack.map_or(0, |id| id.0.get());
    Context(u64::from(METADATA.load(Ordering::Relaxed)) << 32 | u64::from(stack))
}

/// The stack in a tag.
pub(crate) fn stack_of(context: Context) -> Option<StackId> {
    #[expect(clippy::cast_possible_truncation, reason = "the low half is the stack's number")]
    NonZeroU32::new(context.0 as u32).map(StackId)
}

/// The metadata in a tag; empty if there was none.
pub(crate) fn metadata_of(context: Context) -> String {
    metadata_text(u32::try_from(context.0 >> 32).unwrap_or(0))
}

/// Notes `text` beside every allocation from now on; an empty text ends that.
pub(crate) fn set_metadata(text: &str) {
    if text.is_empty() {
        METADATA.store(0, Ordering::Relaxed);
        return;
    }
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    let Texts { numbers, texts } = texts.get_or_insert_default();
    let number = numbers.get(text).copied().unwrap_or_else(|| {
        texts.push(text.to_owned());
        let number = u32::try_from(texts.len()).unwrap_or(0);
        numbers.insert(text.to_owned(), number);
        number
    });
    METADATA.store(number, Ordering::Relaxed);
}

/// What is noted beside every allocation now.
pub(crate) fn metadata() -> String {
    metadata_text(METADATA.load(Ordering::Relaxed))
}

fn metadata_text(number: u32) -> String {
    if number == 0 {
        return String::new();
    }
    let texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    let texts = texts.as_ref().map(|texts| &texts.texts);
    texts.and_then(|texts| texts.get(number as usize - 1)).cloned().unwrap_or_default()
}
