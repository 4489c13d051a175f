//! The message of a refused allocation: the request, the steps that Cushion tried, the owners of
//! the memory, and the remedies.
//!
//! The message begins in PyTorch's own form, which programs match against. It ends with the number
//! of the receipt, which makes every message of a process different. Each sentence is there only if
//! it is true for this refusal.

use std::fmt::Write as _;

use cushion::core::size::display;
use cushion::core::{AllocError, Receipt, Shortage};
use cushion::{GpuProcess, GpuProcesses, devices};

use crate::shortage::remedies::{Program, remedies};

/// PyTorch has another message for requests of this size and more.
const EXBIBYTE: u64 = 1 << 60;
const MIB: u64 = 1 << 20;

/// The most groups of allocations, processes and remedies in a message.
const NAMED: usize = 3;

/// Other processes are named if at least this much memory is not in Cushion's allocations.
pub(super) const WORTH_TELLING: u64 = 64 * MIB;

/// Returns the message of a refusal. `processes` are those that use the device.
pub(super) fn message(
    device: i64,
    error: &AllocError,
    shortage: &Shortage,
    receipt: Option<&Receipt>,
    processes: &GpuProcesses,
) -> String {
    let (number, process) = (shortage.receipt, std::process::id());
    let number = format!("Cushion's receipt: {number} on GPU {device} of process {process}.");
    if shortage.requested >= EXBIBYTE {
        return format!("CUDA out of memory. Tried to allocate more than 1EB memory. {number}");
    }
    let program = Program::of(device);
    let mut text = as_pytorch(device, shortage);
    add_what_was_tried(&mut text, shortage);
    add_verdict(&mut text, error);
    if let Some(receipt) = receipt {
        add_answers(&mut text, receipt);
        add_holders(&mut text, receipt, program);
    }
    add_processes(&mut text, shortage, processes);
    add_remedies(&mut text, &remedies(shortage, &devices().options(), program));
    let _ = write!(text, "\n{number}");
    text
}

// Writing to a string cannot fail, so this file ignores the results.

fn as_pytorch(device: i64, shortage: &Shortage) -> String {
    let Shortage { device_total, allowed, reserved, allocated, private_free, .. } = *shortage;
    let mut text = format!(
        "CUDA out of memory. Tried to allocate {}. GPU {device} has a total capacity of {} of \
         which {} is free. ",
        display(shortage.wanted),
        display(device_total),
        shortage
            .device_free
            .map_or("an unknown amount".to_owned(), |free| display(free).to_string()),
    );
    if let Some(allowed) = allowed {
        let _ = write!(text, "{} allowed; ", display(allowed));
    }
    let in_pools = allocated + private_free;
    let _ = write!(text, "Of the allocated memory {} is allocated by PyTorch, ", display(in_pools));
    if private_free > 0 {
        let private = display(private_free);
        let _ = write!(text, "with {private} allocated in private pools (e.g., CUDA Graphs), ");
    }
    let cached = reserved.saturating_sub(in_pools);
    let _ = write!(text, "and {} is reserved by PyTorch but unallocated.", display(cached));
    text
}

fn add_what_was_tried(text: &mut String, shortage: &Shortage) {
    if shortage.wanted > shortage.device_total {
        text.push_str(
            " Cushion released nothing: the request is larger than the memory of this GPU.",
        );
        return;
    }
    let deeds: Vec<_> = shortage.deeds().map(ToString::to_string).collect();
    if deeds.is_empty() {
        text.push_str(" Cushion tried nothing.");
    } else {
        let _ = write!(text, " Cushion {}; it was not enough.", deeds.join(", then "));
    }
    if shortage.allowed.is_some_and(|allowed| shortage.wanted > allowed) {
        text.push_str(" The request is larger than the limit of this process.");
    }
    if shortage.recording {
        text.push_str(
            " Allocations go to a private pool, and a graph capture may be running: cached memory \
             cannot be released during a capture.",
        );
    }
    let _ = write!(text, " The largest free block is {}", display(shortage.largest_free));
    if shortage.pending > 0 {
        let _ = write!(
            text,
            "; {} are freed but still used by other streams",
            display(shortage.pending)
        );
    }
    if shortage.spilled > 0 {
        let _ = write!(text, "; {} are in host memory", display(shortage.spilled));
    }
    text.push('.');
}

fn add_verdict(text: &mut String, error: &AllocError) {
    match error {
        AllocError::GiveWay(_) => text.push_str(
            " All tasks that hold memory wait for each other, and this task is the least valuable: \
             free its memory and run it again.",
        ),
        AllocError::Split(_) => {
            text.push_str(
                " No other task holds memory that this task could wait for: allocate less at a \
                 time.",
            );
        }
        _ => {}
    }
}

/// Adds the failures of the program's callbacks, which nothing else reports.
fn add_answers(text: &mut String, receipt: &Receipt) {
    for answer in &receipt.answers {
        if answer.failed.is_some() || answer.switched_off {
            let _ = write!(text, " The callback {answer}.");
        }
    }
}

/// Adds the largest groups of live allocations, with the lines that made them if history is
/// recorded.
fn add_holders(text: &mut String, receipt: &Receipt, program: Program) {
    if receipt.groups.is_empty() {
        return;
    }
    text.push_str("\nThe most memory is held by:");
    for group in receipt.groups.iter().take(NAMED) {
        let _ = write!(text, "\n  {} in {} of ", display(group.bytes), count(group.count));
        let _ = write!(text, "{}", display(group.each));
        let frames: Vec<&str> = of_the_program(&group.stack).take(2).collect();
        if !frames.is_empty() {
            let _ = write!(text, ", made at {}", frames.join(" from "));
        }
    }
    if program.is_pytorch && receipt.groups.iter().all(|group| group.stack.is_empty()) {
        text.push_str(
            "\n  (Call torch.cuda.memory._record_memory_history() first to see which lines made \
             them.)",
        );
    }
}

fn count(allocations: u64) -> String {
    if allocations == 1 { "1 allocation".to_owned() } else { format!("{allocations} allocations") }
}

/// Returns the frames of a stack from the innermost one that is not PyTorch's; all frames if every
/// frame is.
fn of_the_program(stack: &[String]) -> impl Iterator<Item = &str> {
    let is_torch = |frame: &String| frame.contains("/torch/");
    let inner = stack.iter().position(|frame| !is_torch(frame)).unwrap_or(0);
    stack[inner..].iter().map(String::as_str)
}

fn add_processes(text: &mut String, shortage: &Shortage, processes: &GpuProcesses) {
    if shortage.others < WORTH_TELLING {
        return;
    }
    let named: Vec<_> = processes.all.iter().take(NAMED).map(in_words).collect();
    let others = display(shortage.others);
    match (named.is_empty(), processes.is_self_known) {
        (true, _) => {
            let _ = write!(
                text,
                "\n{others} of this GPU are held by other processes, or by this process outside of \
                 its allocator."
            );
        }
        (false, true) => {
            let _ = write!(text, "\nOther processes on this GPU: {}.", named.join(", "));
        }
        // In a container the process ids are those of the host, so the own one is not known.
        (false, false) => {
            let _ = write!(
                text,
                "\n{others} of this GPU are not allocations of this process. Processes on this \
                 GPU, including this one: {}.",
                named.join(", ")
            );
        }
    }
}

fn in_words(process: &GpuProcess) -> String {
    let name = process.name.as_deref().unwrap_or("process");
    match process.bytes {
        Some(bytes) => format!("{name} (pid {}) with {}", process.pid, display(bytes)),
        None => format!("{name} (pid {})", process.pid),
    }
}

fn add_remedies(text: &mut String, remedies: &[String]) {
    if remedies.is_empty() {
        return;
    }
    text.push_str("\nWhat would help:");
    for (index, remedy) in remedies.iter().take(NAMED).enumerate() {
        let _ = write!(text, "\n  {}. {remedy}", index + 1);
    }
}
