//! The stacks of a page: each stored once, with shared lines, and limited to what a person would
//! read.

use std::collections::HashMap;

use cushion_trace::{Frame, StackId, Stacks};

/// Stacks on one page; later ones are left out.
const MOST_SITES: usize = 400;
/// Lines of one stack; the outermost are left out.
const MOST_FRAMES: usize = 32;
/// Characters of one line.
const LONGEST_FRAME: usize = 200;

/// The stacks of a page under construction.
#[derive(Debug)]
pub(crate) struct Sites<'a> {
    stacks: &'a Stacks,
    known: HashMap<StackId, u32>,
    sites: Vec<Vec<u32>>,
    frame_ids: HashMap<String, u32>,
    frames: Vec<String>,
}

impl<'a> Sites<'a> {
    pub(crate) fn new(stacks: &'a Stacks) -> Self {
        let (known, frame_ids) = (HashMap::new(), HashMap::new());
        Self { stacks, known, sites: Vec::new(), frame_ids, frames: Vec::new() }
    }

    /// Returns the index of a stack on the page; `None` if the page is full.
    pub(crate) fn index(&mut self, stack: StackId) -> Option<u32> {
        if let Some(&site) = self.known.get(&stack) {
            return Some(site);
        }
        if self.sites.len() == MOST_SITES {
            return None;
        }
        let frames: Vec<String> =
            self.stacks.frames(stack).take(MOST_FRAMES).map(describe).collect();
        let frames = frames.into_iter().map(|frame| self.frame(frame)).collect();
        let site = u32::try_from(self.sites.len()).ok()?;
        self.sites.push(frames);
        self.known.insert(stack, site);
        Some(site)
    }

    fn frame(&mut self, frame: String) -> u32 {
        let next = u32::try_from(self.frames.len()).unwrap_or(u32::MAX);
        *self.frame_ids.entry(frame).or_insert_with_key(|frame| {
            self.frames.push(frame.clone());
            next
        })
    }

    /// Returns the stacks as indices into the list of lines, and that list.
    pub(crate) fn finish(self) -> (Vec<Vec<u32>>, Vec<String>) {
        (self.sites, self.frames)
    }
}

/// Returns the line of a stack that best shows the origin: the innermost that is not PyTorch's
/// module call.
pub(crate) fn telling<'s>(frames: impl Iterator<Item = &'s str>) -> Option<&'s str> {
    let mut frames = frames.peekable();
    let innermost = frames.peek().copied();
    frames
        .find(|frame| {
            !frame.starts_with("_call_impl ") && !frame.starts_with("_wrapped_call_impl ")
        })
        .or(innermost)
}

fn describe(frame: &Frame) -> String {
    let Frame { name, filename, line } = frame;
    let text = match (filename.is_empty(), *line) {
        (true, _) => name.to_string(),
        (false, 0) => format!("{name} ({filename})"),
        (false, line) => format!("{name} ({filename}:{line})"),
    };
    match text.char_indices().nth(LONGEST_FRAME) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_telling_line_is_not_a_module_call() {
        let stack = ["_call_impl (module.py:1790)", "forward (resnet.py:151)", "main (a.py:1)"];
        assert_eq!(telling(stack.into_iter()), Some("forward (resnet.py:151)"));
        assert_eq!(telling(stack[..1].iter().copied()), Some(stack[0]));
        assert_eq!(telling(std::iter::empty()), None);
    }

    #[test]
    fn lines_are_of_bounded_length() {
        let frame = |name: &str, filename: &str, line| Frame {
            name: name.into(),
            filename: filename.into(),
            line,
        };
        assert_eq!(describe(&frame("f", "a.py", 3)), "f (a.py:3)");
        assert_eq!(describe(&frame("f", "a.so", 0)), "f (a.so)");
        assert_eq!(describe(&frame("f", "", 0)), "f");
        let long = describe(&frame(&"é".repeat(1000), "a.py", 3));
        assert_eq!(long.chars().count(), LONGEST_FRAME + 1);
    }
}
