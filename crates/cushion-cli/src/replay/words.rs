//! What `cushion replay` says about a run, beside its figures.

use cushion_core::size::display;
use cushion_trace::{Difference, Origin, Outcome, Program, RecordedOom, Refusal};

use crate::args::PolicyArg;
use crate::trace_files::recorded;

/// Explains that the recorded run was refused memory, and that this replay cannot say whether it
/// fits.
pub(super) fn unanswered(oom: &RecordedOom, origin: Origin, with_smallest: bool) -> Vec<String> {
    let mut lines = vec![recorded::what_happened(oom, origin), recorded::NOTHING_SAID.to_owned()];
    lines.extend(recorded::what_to_do(oom));
    if with_smallest {
        lines.push("on the smallest device that request is served too".to_owned());
    }
    lines
}

/// Returns what a run cannot know.
pub(super) fn caveats(program: &Program, outcome: &Outcome) -> Vec<String> {
    let mut lines = Vec::new();
    if outcome.hurried_frees > 0 {
        lines.push(format!(
            "of {} frees that waited for another stream, the replay waited for {} earlier than \
             PyTorch, to reuse their memory; how long that takes is not known",
            outcome.pending_frees, outcome.hurried_frees
        ));
    }
    if program.begins_in_the_middle() && outcome.same_address.is_none() {
        lines.push(
            "the memory that this policy would have held before the trace is not known: its run \
             starts from the live blocks alone"
                .to_owned(),
        );
    }
    lines
}

/// Says why `--verify` compared nothing, and which argument would help.
pub(super) fn nothing_compared(program: &Program, asked: PolicyArg) -> String {
    let recorded = program.policy;
    let why = if program.origin != Origin::Torch {
        "the trace is not PyTorch's, and has no addresses to compare".to_owned()
    } else if program.allocs == 0 {
        "the trace has no allocation".to_owned()
    } else if !asked.policies().contains(&recorded) {
        format!(
            "the trace was recorded with {recorded}, and addresses can be compared only under that \
             policy; give --policy {recorded}"
        )
    } else {
        "memory ran out before the first allocation; give a larger --capacity, or none".to_owned()
    };
    format!("not verified: 0 of {} allocations were compared: {why}", program.allocs)
}

/// Says how far a run matches PyTorch.
pub(super) fn verify(same: u64, program: &Program, outcome: &Outcome) -> Vec<String> {
    let mut lines = vec![format!("{same} of {} allocations at PyTorch's address", program.allocs)];
    let left = program.allocs.saturating_sub(outcome.allocs);
    if left > 0 {
        lines.push(format!(
            "verified in part: {left} allocations after the replay ran out of memory were not \
             compared"
        ));
    }
    match outcome.refusals_passed_over {
        0 => {}
        1 => lines.push(
            "verified in part: a request that PyTorch refused was not compared; --capacity does so"
                .to_owned(),
        ),
        refused => lines.push(format!(
            "verified in part: {refused} requests that PyTorch refused were not compared; \
             --capacity does so"
        )),
    }
    if let Some(Difference { event, requested, pytorch, ours, .. }) = outcome.difference {
        let place = |address: Option<u64>| match address {
            Some(address) => format!("served it at {address:#x}"),
            None => "refused it".to_owned(),
        };
        lines.push(format!(
            "the first difference is at event {event}, a request of {requested} bytes: PyTorch {}, \
             the replay {}; from there on addresses are the simulator's own",
            place(pytorch),
            place(ours)
        ));
        let why = if program.begins_in_the_middle() {
            "the trace begins in the middle of a run: was the state before it rebuilt correctly?"
        } else {
            "do the capacity or the options differ from PyTorch's?"
        };
        lines.push(why.to_owned());
    }
    lines
}

/// Returns a sentence about a refused request.
pub(super) fn in_words(refusal: &Refusal) -> String {
    let &Refusal { event, requested, live, reserved, largest_free, .. } = refusal;
    let held = format!("{} live and {} reserved", display(live), display(reserved));
    if refusal.at_beginning {
        return format!("before the first event {held} were held, which does not fit.");
    }
    format!(
        "at event {event} a request of {} was refused, with {held}; the largest free range was {}.",
        display(requested),
        display(largest_free)
    )
}
