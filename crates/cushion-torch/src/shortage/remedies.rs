//! The remedies in the message of a refused allocation: what makes the request fit, in terms of a
//! Python program.
//!
//! Each remedy is printed as the program has to write it, so each has to run there.

use cushion::core::size::display;
use cushion::core::{Ended, Options, Policy, Remedy, Rung, Shortage, is_in_callback};
use cushion::devices;

use crate::process::symbols::Loaded;

const MIB: u64 = 1 << 20;

/// Runs a step again in smaller parts, with the gradients of the whole batch.
const IN_PARTS: &str = "@cushion.retry(split=cushion.split_batch, loss=\"mean\", grads=model)";

/// The program whose request was refused.
#[derive(Debug, Clone, Copy)]
pub(super) struct Program {
    device: i64,
    /// Whether PyTorch uses Cushion. It does not use simulated devices.
    pub(super) is_pytorch: bool,
    /// Whether a callback made the request. Such a request never waits.
    is_in_callback: bool,
}

impl Program {
    pub(super) fn of(device: i64) -> Self {
        let is_simulated =
            devices().get(device).is_some_and(|engine| engine.driver().is_simulated());
        let is_pytorch = !is_simulated && Loaded::find("libc10_cuda.so").is_some();
        Self { device, is_pytorch, is_in_callback: is_in_callback() }
    }
}

/// Returns the remedies for a shortage, the smallest change first.
pub(super) fn remedies(shortage: &Shortage, options: &Options, program: Program) -> Vec<String> {
    if shortage.injected {
        return vec![
            "This failure was injected by CUSHION_INJECT or cushion.inject: cushion.inject(None) \
             ends that."
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
                "Enough memory is cached, but not in one block: {}CUSHION_POLICY=expandable can \
                 use it.",
                if program.is_pytorch { "cushion.install(policy=\"expandable\") or " } else { "" },
            )),
            Remedy::Pending(bytes) => {
                let time = more_time(&[Rung::Events, Rung::Wait]);
                let time = time.map(|time| format!(": allow more time with {time}"));
                all.push(format!(
                    "{} wait for work on other streams{}.",
                    display(bytes),
                    time.unwrap_or_default(),
                ));
            }
            Remedy::Others(bytes) => {
                let time = more_time(&[Rung::Wait]);
                let time = time.map(|time| format!(", or wait longer with {time}"));
                all.push(format!(
                    "{} are held by other processes, or by this process outside of its allocator: \
                     end one of them{}.",
                    display(bytes),
                    time.unwrap_or_default(),
                ));
            }
            Remedy::OutsideCapture => all.push(
                "Run the captured work once before the capture: cached memory can be released only \
                 outside of a capture."
                    .to_owned(),
            ),
            Remedy::More(missing) if shortage.size > most => all.push(format!(
                "This request alone exceeds {} by {}: make it smaller, for instance by {}.",
                if most < shortage.device_total {
                    "the limit of this process"
                } else {
                    "the memory of this GPU"
                },
                display(missing),
                in_parts(program, "running the step"),
            )),
            Remedy::More(missing) => all.push(format!(
                "{} more would be enough: use a smaller batch, or {}.",
                display(missing),
                in_parts(program, "run the step"),
            )),
            _ => {}
        }
    }
    all.extend(skipped_rungs(shortage).filter(|_| shortage.size <= most));
    all.extend(host_memory(shortage, options));
    all
}

/// Describes how to run a step in parts; the description begins with `step`.
fn in_parts(program: Program, step: &str) -> String {
    if program.is_pytorch {
        format!(
            "{step} in smaller parts with the same gradients: {IN_PARTS}, for a loss that is a \
             mean (docs/retry.md)"
        )
    } else {
        format!("{step} in smaller parts (docs/retry.md)")
    }
}

/// Returns how to give a request more time on one of these rungs: four times as much, at least a
/// minute. Returns none if the request may not wait there, so that more time would not help.
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
    // The limit for all requests together also applies inside of `cushion.budget`.
    let total =
        if options.wait_total_ms.is_some() { "CUSHION_WAIT_TOTAL_MS=unlimited and " } else { "" };
    Some(format!(
        "{total}CUSHION_WAIT_MS={longer} or `with cushion.budget(ms={longer}):`; this request had \
         {now} ms"
    ))
}

/// Returns the larger limit that is enough, if only the limit stands in the way.
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

/// Returns `part / whole`, rounded up to two digits.
#[expect(clippy::cast_precision_loss, reason = "only two digits are shown")]
fn rounded_up(part: u64, whole: u64) -> f64 {
    ((part as f64 / whole as f64) * 100.0).ceil().min(100.0) / 100.0
}

/// Returns the rungs that the options or the thread skipped.
fn skipped_rungs(shortage: &Shortage) -> Option<String> {
    let off = |tried: &&cushion::core::Tried| tried.ended == Ended::Off;
    let names: Vec<_> = shortage.tried.iter().filter(off).map(|tried| tried.rung.name()).collect();
    (!names.is_empty()).then(|| {
        format!(
            "These rungs were skipped by skip_rungs or by skip of cushion.budget, and may be \
             enough: {}.",
            names.join(", ")
        )
    })
}

/// Returns the limit for host memory that is enough, if host memory was not tried.
fn host_memory(shortage: &Shortage, options: &Options) -> Option<String> {
    let tried = shortage.tried.iter().any(|tried| tried.rung == Rung::Spill);
    let is_wanted = (options.spill_over..=shortage.device_total).contains(&shortage.requested);
    if tried || shortage.ahead || shortage.recording || !is_wanted {
        return None;
    }
    let limit = shortage.spilled.saturating_add(shortage.size).div_ceil(MIB).next_multiple_of(1024);
    Some(format!(
        "Host memory can serve this request, at the speed of the bus: set \
         CUSHION_SPILL_LIMIT_MB={limit}, if the host has that much."
    ))
}
