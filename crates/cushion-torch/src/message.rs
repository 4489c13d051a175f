//! The message of a refused allocation: what was asked for, what was tried and what it won, who holds the memory, and
//! what is most likely to help.
//!
//! It begins in PyTorch's own form, which programs match against, and ends with the number of the receipt, by which
//! Python finds that. Nothing in it is advice for every case: each sentence is there because it is true for this one.

use std::fmt::Write as _;

use cushion::core::size::display;
use cushion::core::{
    AllocError, Ended, Options, Policy, Receipt, Remedy, Rung, Shortage, is_in_callback,
};
use cushion::{GpuProcess, GpuProcesses, devices};

use crate::symbols::Loaded;

/// PyTorch refuses requests of this size and more in other words.
const EXBIBYTE: u64 = 1 << 60;
const MIB: u64 = 1 << 20;

/// How many groups of allocations, of processes and of remedies are named.
const NAMED: usize = 3;

/// What runs a step again in smaller parts. It is printed as it is to be written, so it has to run: whoever copies it
/// gets the gradients of the whole batch.
const IN_PARTS: &str = "@cushion.retry(split=cushion.split_batch, loss=\"mean\", grads=model)";

/// Less than this past our own allocations is no reason to look for other processes.
pub(crate) const WORTH_TELLING: u64 = 64 * MIB;

pub(crate) fn message(
    device: i64,
    error: &AllocError,
    shortage: &Shortage,
    receipt: Option<&Receipt>,
    processes: &GpuProcesses,
) -> String {
    // Python's `.receipt` looks for this.
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

/// The program whose request was refused: what it is told to write has to run there.
#[derive(Debug, Clone, Copy)]
struct Program {
    device: i64,
    /// Whether its memory is PyTorch's. Simulated memory never is.
    is_pytorch: bool,
    /// Whether the request came from a callback for a shortage. Such a request never waits.
    is_in_callback: bool,
}

impl Program {
    fn of(device: i64) -> Self {
        let is_simulated =
            devices().get(device).is_some_and(|engine| engine.driver().is_simulated());
        let is_pytorch = !is_simulated && Loaded::find("libc10_cuda.so").is_some();
        Self { device, is_pytorch, is_in_callback: is_in_callback() }
    }
}

// Writing to a string cannot fail, here and below.

fn as_pytorch(device: i64, shortage: &Shortage) -> String {
    let Shortage { device_total, allowed, reserved, allocated, private_free, .. } = *shortage;
    let mut text = format!(
        "CUDA out of memory. Tried to allocate {}. GPU {device} has a total capacity of {} of which {} \
         is free. ",
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
            " Cushion gave nothing back: this can never fit on this GPU, whatever is freed.",
        );
        return;
    }
    let deeds: Vec<_> = shortage.deeds().map(ToString::to_string).collect();
    if deeds.is_empty() {
        text.push_str(" Nothing was tried.");
    } else {
        let _ = write!(text, " Cushion {}; it was not enough.", deeds.join(", then "));
    }
    if shortage.allowed.is_some_and(|allowed| shortage.wanted > allowed) {
        text.push_str(" It can never fit into what this process is allowed, whatever is freed.");
    }
    if shortage.recording {
        text.push_str(
            " Allocations go to a private pool, where a graph capture may be under way: nothing can be \
             given back then.",
        );
    }
    let _ = write!(text, " The largest free block is {}", display(shortage.largest_free));
    if shortage.pending > 0 {
        let _ = write!(text, "; {} wait for other streams", display(shortage.pending));
    }
    if shortage.spilled > 0 {
        let _ = write!(text, "; {} more are in host memory", display(shortage.spilled));
    }
    text.push('.');
}

fn add_verdict(text: &mut String, error: &AllocError) {
    match error {
        AllocError::GiveWay(_) => text.push_str(
            " All tasks that hold memory wait for each other, and this is the least valuable one: give \
             back what it holds, and begin again.",
        ),
        AllocError::Split(_) => {
            text.push_str(" No other task holds memory that could be waited for: ask for less at a time.");
        }
        _ => {}
    }
}

/// What went wrong in the program's own callbacks: nobody else would tell.
fn add_answers(text: &mut String, receipt: &Receipt) {
    for answer in &receipt.answers {
        if answer.failed.is_some() || answer.switched_off {
            let _ = write!(text, " The callback {answer}.");
        }
    }
}

/// The largest groups of live allocations, by where they were made if that is known.
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
            "\n  (torch.cuda.memory._record_memory_history() at the start names the lines.)",
        );
    }
}

fn count(allocations: u64) -> String {
    if allocations == 1 { "1 allocation".to_owned() } else { format!("{allocations} allocations") }
}

/// The frames of a stack without PyTorch's own at its inner end, unless there are no others.
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
                "\n{others} of this GPU are held by other processes, or by this one past its allocator."
            );
        }
        (false, true) => {
            let _ = write!(text, "\nOther processes on this GPU: {}.", named.join(", "));
        }
        // In a container, numbers are those of the host, and nobody can tell which is ours.
        (false, false) => {
            let _ = write!(
                text,
                "\n{others} of this GPU are not this process's allocations. Processes on it, this one among them: {}.",
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

/// What would make the request fit, in a Python program's terms, the least change first.
fn remedies(shortage: &Shortage, options: &Options, program: Program) -> Vec<String> {
    if shortage.injected {
        return vec![
            "This failure was made up, by CUSHION_INJECT or cushion.inject: cushion.inject(None) ends that."
                .to_owned(),
        ];
    }
    let mut all = Vec::new();
    let most = shortage.allowed.unwrap_or(u64::MAX).min(shortage.device_total);
    let more_time = |rungs: &[Rung]| more_time(shortage, options, program, rungs);
    all.extend(more_allowed(shortage, program));
    for remedy in shortage.remedies() {
        match remedy {
            Remedy::Policy(Policy::Expandable) => all.push(format!(
                "Memory enough is cached, in pieces: {}CUSHION_POLICY=expandable lets it be used.",
                if program.is_pytorch { "cushion.install(policy=\"expandable\") or " } else { "" },
            )),
            Remedy::Pending(bytes) => {
                let time = more_time(&[Rung::Events, Rung::Wait]);
                let time = time.map(|time| format!(": give it more time, by {time}"));
                all.push(format!(
                    "{} wait for work on other streams{}.",
                    display(bytes),
                    time.unwrap_or_default(),
                ));
            }
            Remedy::Others(bytes) => {
                let time = more_time(&[Rung::Wait]);
                let time = time.map(|time| format!(", or wait longer for it to end, by {time}"));
                all.push(format!(
                    "{} are held by other processes, or by this one past its allocator: end one{}.",
                    display(bytes),
                    time.unwrap_or_default(),
                ));
            }
            Remedy::OutsideCapture => all.push(
                "Run what is captured once before the capture: outside of it, cached memory can be given back."
                    .to_owned(),
            ),
            Remedy::More(missing) if shortage.size > most => all.push(format!(
                "This one request is {} more than {}: make it smaller, for instance by {}.",
                display(missing),
                if most < shortage.device_total { "this process is allowed" } else { "this GPU has" },
                in_parts(program, "running the step"),
            )),
            Remedy::More(missing) => all.push(format!(
                "{} more would be enough: a smaller batch, or {}.",
                display(missing),
                in_parts(program, "the step"),
            )),
            _ => {}
        }
    }
    all.extend(rungs_left_out(shortage).filter(|_| shortage.size <= most));
    all.extend(host_memory(shortage, options));
    all
}

/// How a step is run in parts.
fn in_parts(program: Program, step: &str) -> String {
    if program.is_pytorch {
        format!(
            "{step} in smaller parts with the same gradients: {IN_PARTS}, for a loss that is a mean \
             (docs/retry.md)"
        )
    } else {
        format!("{step} in smaller parts (docs/retry.md)")
    }
}

/// How a request gets more time to wait on one of these rungs: four times as much, and a minute at least. Nothing where
/// more time would not help, because it may not wait there.
fn more_time(
    shortage: &Shortage,
    options: &Options,
    program: Program,
    rungs: &[Rung],
) -> Option<String> {
    let may_wait = |rung: &Rung| {
        let mut tried = shortage.tried.iter().filter(|tried| tried.rung == *rung);
        !tried.any(|tried| matches!(tried.ended, Ended::Off | Ended::Illegal))
    };
    if program.is_in_callback || !rungs.iter().any(may_wait) {
        return None;
    }
    let now = shortage.budget.as_millis();
    let longer = now.saturating_mul(4).max(60_000);
    // The limit of all requests together holds for a block with a budget of its own, too.
    let total =
        if options.wait_total_ms.is_some() { "CUSHION_WAIT_TOTAL_MS=unlimited and " } else { "" };
    Some(format!(
        "{total}CUSHION_WAIT_MS={longer} or `with cushion.budget(ms={longer}):`; this one had {now} ms"
    ))
}

/// The limit is what is in the way, and the device has more.
fn more_allowed(shortage: &Shortage, program: Program) -> Option<String> {
    let allowed = shortage.allowed?;
    let needed = shortage.reserved.saturating_add(shortage.wanted);
    let on_device = shortage.device_free.unwrap_or(0).saturating_add(shortage.reserved);
    if shortage.wanted <= allowed.saturating_sub(shortage.reserved) || needed > on_device {
        return None;
    }
    let fraction = rounded_up(needed, shortage.device_total);
    let device = program.device;
    let set = if program.is_pytorch {
        format!("torch.cuda.set_per_process_memory_fraction({fraction:.2}, {device})")
    } else {
        format!("CUSHION_PER_PROCESS_MEMORY_FRACTION={fraction:.2}")
    };
    Some(format!(
        "This process is allowed {} of {}: {set} would be enough.",
        display(allowed),
        display(shortage.device_total),
    ))
}

/// A fraction with two digits, not below the true one.
#[expect(clippy::cast_precision_loss, reason = "two digits are shown")]
fn rounded_up(part: u64, whole: u64) -> f64 {
    ((part as f64 / whole as f64) * 100.0).ceil().min(100.0) / 100.0
}

fn rungs_left_out(shortage: &Shortage) -> Option<String> {
    let off = |tried: &&cushion::core::Tried| tried.ended == Ended::Off;
    let names: Vec<_> = shortage.tried.iter().filter(off).map(|tried| tried.rung.name()).collect();
    (!names.is_empty()).then(|| {
        format!(
            "Left out by skip_rungs or by skip of cushion.budget, and maybe enough: {}.",
            names.join(", ")
        )
    })
}

/// Host memory was not tried, and may serve it.
fn host_memory(shortage: &Shortage, options: &Options) -> Option<String> {
    let tried = shortage.tried.iter().any(|tried| tried.rung == Rung::Spill);
    let is_wanted = (options.spill_over..=shortage.device_total).contains(&shortage.requested);
    if tried || shortage.ahead || shortage.recording || !is_wanted {
        return None;
    }
    let limit = shortage.spilled.saturating_add(shortage.size).div_ceil(MIB).next_multiple_of(1024);
    Some(format!(
        "Host memory may serve it, at the speed of the bus: CUSHION_SPILL_LIMIT_MB={limit}, if the host has that."
    ))
}
