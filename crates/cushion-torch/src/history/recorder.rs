//! The notes beside an allocation while history is recorded: the Python stack, and the metadata
//! that the program set. The engine's tag holds both as two numbers.
//!
//! A stack or a text is kept while an engine refers to it, while a request or a free that carries
//! it is on its way, or while a reader uses what an engine returned. A sweep removes the others
//! (`kept.rs`).

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use cushion::core::Tag;
use cushion::devices;
use pyo3::Python;
use rustc_hash::FxHashSet;

use crate::history::kept::{Kept, Numbered};
use crate::history::stacks::{self, Stack, StackId};
use crate::process::lock;

/// Which events get a stack: PyTorch's argument `context`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Level {
    /// No event.
    Never = 0,
    /// Live memory only.
    State = 1,
    /// Also the events of allocations.
    Alloc = 2,
    /// Also the events of frees.
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
/// Whether metadata is set.
static HAS_METADATA: AtomicBool = AtomicBool::new(false);
static TEXTS: Mutex<Texts> = Mutex::new(Texts { kept: Kept::new(), current: None });
/// How many readers use the tags that an engine returned. Sweeps remove nothing meanwhile.
static READERS: AtomicUsize = AtomicUsize::new(0);

/// The metadata texts that are still referred to.
#[derive(Debug)]
struct Texts {
    kept: Kept<str>,
    /// The text that is noted beside every allocation now.
    current: Option<Numbered<str>>,
}

/// Locks the texts while this process forks.
pub(crate) fn hold() -> impl Sized + 'static {
    lock(&TEXTS)
}

/// Returns the level in force.
pub(crate) fn level() -> Level {
    match LEVEL.load(Ordering::Relaxed) {
        0 => Level::Never,
        1 => Level::State,
        2 => Level::Alloc,
        _ => Level::All,
    }
}

/// Sets the level from which stacks are gathered.
pub(crate) fn set_level(level: Level) {
    LEVEL.store(level as u8, Ordering::Relaxed);
}

/// A tag with the values that it refers to, which keeps them alive. Drop it after the engine has
/// the tag.
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

/// Returns the tag for an event that gets a stack from level `least` on. Costs two loads if nothing
/// is recorded.
pub(crate) fn note(least: Level) -> Noted {
    let stack = if level() >= least { stacks::gather() } else { None };
    let text = if HAS_METADATA.load(Ordering::Relaxed) { current() } else { None };
    Noted { stack, text }
}

#[cold]
fn current() -> Option<Numbered<str>> {
    lock(&TEXTS).current.clone()
}

/// Returns the stack in a tag.
pub(crate) fn stack_of(tag: Tag) -> Option<StackId> {
    #[expect(clippy::cast_possible_truncation, reason = "the low half is the number of the stack")]
    NonZeroU32::new(tag.0 as u32).map(StackId)
}

fn text_of(tag: Tag) -> Option<NonZeroU32> {
    u32::try_from(tag.0 >> 32).ok().and_then(NonZeroU32::new)
}

/// Returns the metadata in a tag; empty if none was set.
pub(crate) fn metadata_of(tag: Tag) -> String {
    let text = text_of(tag).and_then(|number| lock(&TEXTS).kept.get(number));
    text.map(|text| text.to_string()).unwrap_or_default()
}

/// Notes `text` beside every later allocation; an empty text ends that.
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

/// Returns the metadata that is noted beside every allocation now.
pub(crate) fn metadata() -> String {
    current().map(|(_, text)| text.to_string()).unwrap_or_default()
}

/// Keeps sweeps from removing anything, until this is dropped.
#[derive(Debug)]
pub(crate) struct Reading(());

impl Reading {
    /// Begins to read. Call this before reading tags from an engine.
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

/// Returns the number of stacks and of texts that are kept.
pub(crate) fn kept() -> (usize, usize) {
    (stacks::kept(), lock(&TEXTS).kept.len())
}

/// Removes the stacks and texts that nothing refers to.
///
/// Takes the lock of every engine in turn, so the caller must not hold one. Dropping a code object
/// may run Python code.
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
            // Equal tags often follow each other.
            if std::mem::replace(&mut before, tag) != tag {
                stacks_used.extend(stack_of(tag).map(|stack| stack.0));
                texts_used.extend(text_of(tag));
            }
        });
    }
    // A reader that begins after this load finds in an engine only tags that were read above, or
    // that were on their way since.
    if READERS.load(Ordering::SeqCst) > 0 {
        stacks::give_up_sweep(of_stacks);
        lock(&TEXTS).kept.give_up_sweep(of_texts);
        return;
    }
    // Dropped after the lock is released.
    let _texts = lock(&TEXTS).kept.end_sweep(of_texts, &texts_used, looked_at);
    stacks::end_sweep(py, of_stacks, &stacks_used, looked_at);
}
