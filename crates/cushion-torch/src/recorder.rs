//! What is noted beside an allocation while history is recorded: the Python stack and the metadata that
//! the program set. Both are put into the engine's opaque tag as two numbers.
//!
//! What the numbers stand for is kept while an engine refers to it, a request or a free is on its way with it, or somebody
//! reads what an engine said; the rest is swept out (`kept.rs`).

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use cushion::core::Tag;
use cushion::devices;
use pyo3::Python;
use rustc_hash::FxHashSet;

use crate::kept::{Kept, Numbered};
use crate::lock;
use crate::stacks::{self, Stack, StackId};

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
/// Whether there is a text to note.
static HAS_METADATA: AtomicBool = AtomicBool::new(false);
static TEXTS: Mutex<Texts> = Mutex::new(Texts { kept: Kept::new(), current: None });
/// How many read what tags stand for that an engine told them: nothing is swept meanwhile.
static READERS: AtomicUsize = AtomicUsize::new(0);

/// The texts set so far that are still referred to.
#[derive(Debug)]
struct Texts {
    kept: Kept<str>,
    /// What is noted beside every allocation now.
    current: Option<Numbered<str>>,
}

/// Holds the texts, while this process forks.
pub(crate) fn hold() -> impl Sized + 'static {
    lock(&TEXTS)
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

/// A tag, with what it stands for: that stays as long as this, so it is dropped when the engine has the tag.
#[derive(Debug, Default)]
pub(crate) struct Noted {
    stack: Option<Numbered<Stack>>,
    text: Option<Numbered<str>>,
}

impl Noted {
    pub(crate) fn tag(&self) -> Tag {
        let stack = self.stack.as_ref().map_or(0, |(number, _)| number.get());
        let text = self.text.as_ref().map_or(0, |(number, _)| number.get());
        Tag(u64::from(text) << 32 | u64::from(stack))
    }
}

/// The tag for an event that gets a stack from `least` on. With nothing recorded it costs two loads.
pub(crate) fn note(least: Level) -> Noted {
    let stack = if level() >= least { stacks::gather() } else { None };
    let text = if HAS_METADATA.load(Ordering::Relaxed) { current() } else { None };
    Noted { stack, text }
}

#[cold]
fn current() -> Option<Numbered<str>> {
    lock(&TEXTS).current.clone()
}

/// The stack in a tag.
pub(crate) fn stack_of(tag: Tag) -> Option<StackId> {
    #[expect(clippy::cast_possible_truncation, reason = "the low half is the stack's number")]
    NonZeroU32::new(tag.0 as u32).map(StackId)
}

fn text_of(tag: Tag) -> Option<NonZeroU32> {
    u32::try_from(tag.0 >> 32).ok().and_then(NonZeroU32::new)
}

/// The metadata in a tag; empty if there was none.
pub(crate) fn metadata_of(tag: Tag) -> String {
    let text = text_of(tag).and_then(|number| lock(&TEXTS).kept.get(number));
    text.map(|text| text.to_string()).unwrap_or_default()
}

/// Notes `text` beside every allocation from now on; an empty text ends that.
pub(crate) fn set_metadata(py: Python<'_>, text: &str) {
    let is_full = {
        let mut texts = lock(&TEXTS);
        let Texts { kept, current } = &mut *texts;
        *current = if text.is_empty() {
            None
        } else {
            kept.find(text).or_else(|| kept.add(Arc::from(text)))
        };
        HAS_METADATA.store(current.is_some(), Ordering::Relaxed);
        kept.is_full()
    };
    if is_full {
        sweep(py);
    }
}

/// What is noted beside every allocation now.
pub(crate) fn metadata() -> String {
    current().map(|(_, text)| text.to_string()).unwrap_or_default()
}

/// Somebody reads what tags stand for, until this is dropped: what was there when it began stays.
#[derive(Debug)]
pub(crate) struct Reading(());

impl Reading {
    /// To be called before an engine is asked.
    pub(crate) fn begin() -> Self {
        READERS.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        READERS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// How many stacks and texts are kept.
pub(crate) fn kept() -> (usize, usize) {
    (stacks::kept(), lock(&TEXTS).kept.len())
}

/// Forgets the stacks and texts that nobody refers to any more. Takes the lock of every engine in turn, so none may be
/// held; code that went with its last stack may have Python run something.
#[cold]
pub(crate) fn sweep(py: Python<'_>) {
    if kept() == (0, 0) {
        return;
    }
    let of_stacks = stacks::begin_sweep();
    let of_texts = lock(&TEXTS).kept.begin_sweep();
    let mut stacks_used = FxHashSet::default();
    let mut texts_used = FxHashSet::default();
    let mut looked_at = 0;
    for (_, engine) in devices().made() {
        let mut before = Tag::NONE;
        engine.tags_in_use(|tag| {
            looked_at += 1;
            // The same ones often come one after another.
            if std::mem::replace(&mut before, tag) != tag {
                stacks_used.extend(stack_of(tag).map(|stack| stack.0));
                texts_used.extend(text_of(tag));
            }
        });
    }
    // Who begins to read from here on finds in an engine only what was used above, or is on its way since.
    if READERS.load(Ordering::SeqCst) > 0 {
        stacks::give_up_sweep(of_stacks);
        lock(&TEXTS).kept.give_up_sweep(of_texts);
        return;
    }
    // Dropped with the lock let go.
    let _texts = lock(&TEXTS).kept.end_sweep(of_texts, &texts_used, looked_at);
    stacks::end_sweep(py, of_stacks, &stacks_used, looked_at);
}
