//! Recorded call stacks. Each distinct stack is stored once, in a trie that shares common callers.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::num::NonZeroU32;
use std::sync::Arc;

/// One frame of a call stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The function.
    pub name: Arc<str>,
    /// The file.
    pub filename: Arc<str>,
    /// The line; zero if unknown.
    pub line: u32,
}

/// The number of a stack in [`Stacks`]. Equal stacks have equal numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StackId(NonZeroU32);

impl StackId {
    /// Returns the number, from 1 on.
    pub(crate) fn number(self) -> u32 {
        self.0.get()
    }

    /// Returns the stack with this number; `None` for 0.
    pub(crate) fn of_number(number: u32) -> Option<Self> {
        NonZeroU32::new(number).map(Self)
    }
}

/// The distinct stacks of a snapshot. Stacks share their common callers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stacks {
    frames: Vec<Frame>,
    nodes: Vec<Node>,
}

/// A frame and the stack that called it. `StackId(n)` is `nodes[n - 1]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Node {
    caller: Option<StackId>,
    frame: FrameId,
}

impl Hash for Node {
    /// Hashes one number instead of two fields, because every frame of every event is looked up.
    fn hash<H: Hasher>(&self, state: &mut H) {
        let caller = self.caller.map_or(0, StackId::number);
        state.write_u64(u64::from(caller) << 32 | u64::from(self.frame.0));
    }
}

/// The number of a frame in [`Stacks::frames`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FrameId(pub(crate) u32);

impl Stacks {
    /// Iterates over the frames of a stack, innermost first. The number of another snapshot's stack
    /// gives unrelated frames or none.
    pub fn frames(&self, id: StackId) -> impl Iterator<Item = &Frame> {
        self.numbered_frames(id).map(|(_, frame)| frame)
    }

    /// Iterates over the frames of a stack, each with its number among all frames.
    pub(crate) fn numbered_frames(&self, id: StackId) -> impl Iterator<Item = (usize, &Frame)> {
        let mut next = Some(id);
        std::iter::from_fn(move || {
            let node = self.nodes.get(next?.0.get() as usize - 1)?;
            next = node.caller;
            let number = node.frame.0 as usize;
            Some((number, self.frames.get(number)?))
        })
    }

    /// Returns the distinct frames.
    pub(crate) fn all_frames(&self) -> &[Frame] {
        &self.frames
    }

    /// Iterates over all stacks by number, from 1 on: the innermost frame and the calling stack.
    pub(crate) fn nodes(&self) -> impl ExactSizeIterator<Item = (usize, Option<StackId>)> {
        self.nodes.iter().map(|node| (node.frame.0 as usize, node.caller))
    }

    /// Returns the counts of distinct frames and of distinct stacks, callers included.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.frames.len(), self.nodes.len())
    }

    /// Returns whether the snapshot has no stacks.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }
}

/// Builds [`Stacks`].
#[derive(Debug, Default)]
pub(crate) struct StackTable {
    stacks: Stacks,
    frame_ids: HashMap<Frame, FrameId>,
    stack_ids: HashMap<Node, StackId>,
    /// The stack looked up last, outermost frame first. The next stack usually has the same
    /// callers.
    last: Vec<(FrameId, StackId)>,
}

impl StackTable {
    /// Returns the number of a frame; `None` if numbers run out.
    pub(crate) fn intern(&mut self, frame: Frame) -> Option<FrameId> {
        if let Some(&id) = self.frame_ids.get(&frame) {
            return Some(id);
        }
        let id = FrameId(u32::try_from(self.stacks.frames.len()).ok()?);
        self.stacks.frames.push(frame.clone());
        self.frame_ids.insert(frame, id);
        Some(id)
    }

    /// Returns the number of the stack of `frame` called from `caller`, which has `depth` frames;
    /// `None` if numbers run out. The caller pushes each stack frame by frame, outermost first.
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

    /// Like [`Self::push`], for callers that do not push stacks frame by frame.
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

    /// Returns the frame with this number, if it exists.
    pub(crate) fn frame_of_number(&self, number: u64) -> Option<FrameId> {
        let id = u32::try_from(number).ok()?;
        ((id as usize) < self.stacks.frames.len()).then_some(FrameId(id))
    }

    /// Returns the counts of distinct frames and stacks so far.
    pub(crate) fn counts(&self) -> (usize, usize) {
        self.stacks.counts()
    }

    /// Returns the stacks.
    pub(crate) fn finish(self) -> Stacks {
        self.stacks
    }

    /// Estimates the memory in use, in bytes.
    pub(crate) fn held(&self) -> usize {
        self.stacks.frames.len() * 120 + self.stacks.nodes.len() * 32 + self.last.len() * 8
    }
}
