//! Recorded stacks, each kept once: a trie of frames, so that common callers are kept once too.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::snapshot::Name;
use crate::value::Value;

/// A line of the program that was running, one of several in a stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The function.
    pub name: Arc<str>,
    /// The file.
    pub filename: Arc<str>,
    /// The line; zero where it is not known.
    pub line: u32,
}

/// The number of a stack in [`Stacks`]; equal stacks have equal numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StackId(NonZeroU32);

impl StackId {
    /// Its number, from 1 on.
    pub(crate) fn number(self) -> u32 {
        self.0.get()
    }

    /// The stack with this number; none has 0.
    pub(crate) fn of_number(number: u32) -> Option<Self> {
        NonZeroU32::new(number).map(Self)
    }
}

/// Every distinct stack of a snapshot, kept once, common callers kept once between them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stacks {
    frames: Vec<Frame>,
    nodes: Vec<Node>,
}

/// A frame and the stack it was called from. `StackId(n)` is `nodes[n - 1]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Node {
    caller: Option<StackId>,
    frame: FrameId,
}

impl Hash for Node {
    /// One number instead of several: every frame of every event is looked up.
    fn hash<H: Hasher>(&self, state: &mut H) {
        let caller = self.caller.map_or(0, StackId::number);
        state.write_u64(u64::from(caller) << 32 | u64::from(self.frame.0));
    }
}

/// The number of a frame in [`Stacks::frames`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FrameId(pub(crate) u32);

impl Stacks {
    /// The frames of a stack, innermost first. A number from another snapshot gives other frames
    /// or none.
    pub fn frames(&self, id: StackId) -> impl Iterator<Item = &Frame> {
        self.numbered_frames(id).map(|(_, frame)| frame)
    }

    /// The frames of a stack, each with its number among all frames.
    pub(crate) fn numbered_frames(&self, id: StackId) -> impl Iterator<Item = (usize, &Frame)> {
        let mut next = Some(id);
        std::iter::from_fn(move || {
            let node = self.nodes.get(next?.0.get() as usize - 1)?;
            next = node.caller;
            let number = node.frame.0 as usize;
            Some((number, self.frames.get(number)?))
        })
    }

    /// Every distinct frame.
    pub(crate) fn all_frames(&self) -> &[Frame] {
        &self.frames
    }

    /// Every stack by its number, from 1 on: its innermost frame, and the stack that called it.
    pub(crate) fn nodes(&self) -> impl ExactSizeIterator<Item = (usize, Option<StackId>)> {
        self.nodes.iter().map(|node| (node.frame.0 as usize, node.caller))
    }

    /// Distinct frames, and distinct stacks with all their callers.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.frames.len(), self.nodes.len())
    }

    /// Whether the snapshot has no stacks at all.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }
}

/// [`Stacks`] in the making.
#[derive(Debug, Default)]
pub(crate) struct StackTable {
    stacks: Stacks,
    frame_ids: HashMap<Frame, FrameId>,
    stack_ids: HashMap<Node, StackId>,
    /// The stack asked for last, outermost frame first: the next one has mostly the same callers.
    last: Vec<(FrameId, StackId)>,
}

impl StackTable {
    /// The number of the frame in a frame's dict; `None` when numbers run out.
    pub(crate) fn frame(&mut self, items: &[[Value; 2]], arena: &[Arc<str>]) -> Option<FrameId> {
        let mut frame = Frame { name: Arc::from(""), filename: Arc::from(""), line: 0 };
        for &[key, value] in items {
            match (Name::of(key), value) {
                (Some(Name::Function), Value::Str(id)) => frame.name = arena[id.0 as usize].clone(),
                (Some(Name::Filename), Value::Str(id)) => {
                    frame.filename = arena[id.0 as usize].clone();
                }
                (Some(Name::Line), Value::Int(line)) => {
                    frame.line = u32::try_from(line).unwrap_or(0);
                }
                _ => {}
            }
        }
        self.intern(frame)
    }

    /// The number of a frame; `None` when numbers run out.
    pub(crate) fn intern(&mut self, frame: Frame) -> Option<FrameId> {
        if let Some(&id) = self.frame_ids.get(&frame) {
            return Some(id);
        }
        let id = FrameId(u32::try_from(self.stacks.frames.len()).ok()?);
        self.stacks.frames.push(frame.clone());
        self.frame_ids.insert(frame, id);
        Some(id)
    }

    /// The number of the stack of a frame and its callers, of which there are `depth`; `None` when
    /// numbers run out.
    #[inline]
    pub(crate) fn push(
        &mut self,
        depth: usize,
        caller: Option<StackId>,
        frame: FrameId,
    ) -> Option<StackId> {
        let same_callers = caller == depth.checked_sub(1).map(|outer| self.last[outer].1);
        match self.last.get(depth) {
            Some(&(same, id)) if same == frame && same_callers => Some(id),
            _ => {
                let id = self.find(Node { caller, frame })?;
                self.last.truncate(depth);
                self.last.push((frame, id));
                Some(id)
            }
        }
    }

    /// The same, for a reader that does not go frame by frame from the outermost on.
    pub(crate) fn link(&mut self, caller: Option<StackId>, frame: FrameId) -> Option<StackId> {
        self.find(Node { caller, frame })
    }

    fn find(&mut self, node: Node) -> Option<StackId> {
        if let Some(&id) = self.stack_ids.get(&node) {
            return Some(id);
        }
        let place = u32::try_from(self.stacks.nodes.len()).ok()?;
        let id = StackId(NonZeroU32::MIN.checked_add(place)?);
        self.stacks.nodes.push(node);
        self.stack_ids.insert(node, id);
        Some(id)
    }

    /// The frame with this number, if there is one.
    pub(crate) fn frame_of_number(&self, number: u64) -> Option<FrameId> {
        let id = u32::try_from(number).ok()?;
        ((id as usize) < self.stacks.frames.len()).then_some(FrameId(id))
    }

    /// Distinct frames, and distinct stacks with all their callers, so far.
    pub(crate) fn counts(&self) -> (usize, usize) {
        self.stacks.counts()
    }

    /// The stacks, complete.
    pub(crate) fn finish(self) -> Stacks {
        self.stacks
    }

    /// About how many bytes it holds.
    pub(crate) fn held(&self) -> usize {
        self.stacks.frames.len() * 120 + self.stacks.nodes.len() * 32 + self.last.len() * 8
    }
}
