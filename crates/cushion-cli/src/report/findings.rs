//! The findings of a report, as sentences. Each is computed from the report's figures, and omitted
//! if the figures do not support it.

use cushion_core::Policy;
use cushion_core::size::{GIB, display};

use crate::trace_files::recorded as recorded_run;

use super::data::{Finding, Origin, PolicyRun, RefusalAt, Report, Tone};
use super::sites::telling;

/// Common cards, by their nominal GB.
const CARDS: [u64; 8] = [8, 12, 16, 24, 40, 48, 80, 141];

/// The percentage of a card that is left to the allocator. The CUDA context takes the rest, and
/// nominal sizes differ between GB and GiB.
pub(crate) const CARD_SHARE: u64 = 95;

/// Smaller savings, in percent, are not mentioned.
const WORTH_SAYING: f64 = 1.0;

/// From this share of equal addresses on, a replay is called close to PyTorch's run.
const CLOSE: f64 = 0.95;

/// Below this share, a replay is called far from PyTorch's run.
const HALF: f64 = 0.5;

/// Returns a short description of a policy.
pub(crate) fn about(policy: Policy) -> &'static str {
    match policy {
        Policy::Segments => "PyTorch's default",
        Policy::Expandable => "expandable_segments:True",
        Policy::Paged => "Cushion's own",
    }
}

/// Returns the setting that selects a policy.
fn setting(run: &PolicyRun) -> &'static str {
    match run.policy {
        Policy::Expandable => "expandable_segments:True",
        policy => policy.name(),
    }
}

/// Returns a text with a capital and a full stop.
pub(crate) fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    let first: String = chars.next().map(|c| c.to_uppercase().collect()).unwrap_or_default();
    let end = if text.ends_with('.') { "" } else { "." };
    format!("{first}{}{end}", chars.as_str())
}

/// Returns all findings, the most useful first.
pub(crate) fn findings(report: &Report) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut say = |tone, text: Option<String>| {
        found.extend(text.map(|text| Finding { tone, text }));
    };
    if let Some(capacity) = report.capacity {
        let (tone, text) = on_a_device(report, capacity);
        say(tone, Some(text));
        say(Tone::Bad, recorded_failure(report));
    } else {
        // A failure comes before a possible saving.
        say(Tone::Bad, recorded_failure(report));
        say(Tone::Plain, to_find_out(report));
        let (tone, text) = to_gain(report);
        say(if report.trace.oom.is_some() { Tone::Plain } else { tone }, Some(text));
    }
    for run in &report.policies {
        say(Tone::Bad, run.refusal.as_ref().map(|refusal| failure(run, refusal, report)));
    }
    if report.capacity.is_some() {
        say(Tone::Plain, saving(report).map(|(text, _)| text));
    }
    say(Tone::Plain, holes(report));
    say(Tone::Plain, largest_origin(report));
    say(Tone::Plain, kept(report));
    say(Tone::Plain, driver_time(report));
    say(Tone::Plain, retries(report));
    let (tone, text) = trust(report);
    say(tone, text);
    found
}

/// Says which policies run within the given capacity.
fn on_a_device(report: &Report, capacity: u64) -> (Tone, String) {
    let size = format!("a device of {}", device(capacity));
    let (fails, fits): (Vec<_>, Vec<_>) =
        report.policies.iter().partition(|run| run.refusal.is_some());
    let needed = report.policies.iter().filter_map(|run| Some((run.smallest?, run.policy.name())));
    let needs = match needed.min() {
        Some((least, name)) => format!("{name} needs the least, {}", display(least)),
        None => "no device is large enough".to_owned(),
    };
    if fails.is_empty() {
        return (Tone::Good, format!("On {size} the run fits under every policy; {needs}."));
    }
    if fits.is_empty() {
        let why = if report.floor_device > capacity {
            format!("no allocator could make it fit, its floor is {}", display(report.floor_device))
        } else {
            needs
        };
        return (Tone::Bad, format!("On {size} the run fails under every policy; {why}."));
    }
    let fail = list(fails.iter().map(|run| run.policy.name()));
    if fails.iter().any(|run| run.recorded) {
        let fit = list(fits.iter().map(|run| setting(run)));
        let lets = if fits.len() == 1 { "lets" } else { "let" };
        return (
            Tone::Good,
            format!("On {size} the run fails under {fail}; {fit} {lets} it finish."),
        );
    }
    let fit = list(fits.iter().map(|run| run.policy.name()));
    (Tone::Good, format!("On {size} the run fits under {fit}, and fails under {fail}."))
}

/// Says what another policy would save, without a given capacity.
fn to_gain(report: &Report) -> (Tone, String) {
    if let Some((text, tone)) = saving(report) {
        return (tone, text);
    }
    let Some(run) = recorded(report) else { return (Tone::Plain, "Nothing was replayed.".into()) };
    let over = run.reserved_peak.saturating_sub(report.floor);
    let card = run.smallest.and_then(card_for).map_or_else(String::new, |card| {
        format!("; the run fits {} {card} GB card", article(card))
    });
    let text = format!(
        "Little to gain: {} reserves {} at its peak, {} above the floor{card}.",
        run.policy.name(),
        display(run.reserved_peak),
        percent(over, report.floor)
    );
    (Tone::Good, text)
}

/// Says how much less the best policy reserves than the recorded one; or, if the recorded one is
/// best, how much it saved over PyTorch's default. Compares only runs that both finished.
fn saving(report: &Report) -> Option<(String, Tone)> {
    let finished = |run: &&PolicyRun| run.refusal.is_none();
    let recorded = recorded(report).filter(finished)?;
    let best = report.policies.iter().filter(finished).min_by_key(|run| run.reserved_peak)?;
    let first = report.policies.first().filter(finished);
    let (from, to, verb) = if best.policy == recorded.policy {
        (first.filter(|first| first.policy != recorded.policy)?, recorded, "saved")
    } else {
        (recorded, best, "would have saved")
    };
    let saved = from.reserved_peak.checked_sub(to.reserved_peak)?;
    if ratio(saved, from.reserved_peak) * 100.0 < WORTH_SAYING {
        return None;
    }
    let over =
        if verb == "saved" { format!(" over {}", from.policy.name()) } else { String::new() };
    let cards = match (to.smallest.and_then(card_for), from.smallest.and_then(card_for)) {
        (Some(small), Some(large)) if small == large => {
            format!("; either way the run fits {} {small} GB card", article(small))
        }
        (Some(small), _) if verb == "saved" => {
            format!("; the run fits {} {small} GB card", article(small))
        }
        (Some(small), _) => {
            format!("; the run would have fitted {} {small} GB card", article(small))
        }
        (None, _) => String::new(),
    };
    let doubt = if report.trace.begins_in_the_middle {
        " This assumes that it held only the live blocks when the trace began."
    } else {
        ""
    };
    let text = format!(
        "{} {verb} {} of reserved memory{over} ({}){}.{doubt}",
        setting(to),
        display(saved),
        percent(saved, from.reserved_peak),
        if report.capacity.is_some() { String::new() } else { cards }
    );
    Some((text, Tone::Good))
}

fn recorded_failure(report: &Report) -> Option<String> {
    let oom = report.trace.oom?;
    let run = recorded(report)?;
    if report.policies.iter().any(|run| run.refusal.as_ref().is_some_and(|r| r.recorded)) {
        return None; // `failure` describes it, with the figures of the replay.
    }
    let more = match oom.count {
        1 => String::new(),
        count => format!(", the first of {} such refusals", thousands(count)),
    };
    let need: Vec<String> = report
        .policies
        .iter()
        .filter_map(|run| Some(format!("{} under {}", display(run.smallest?), run.policy.name())))
        .collect();
    let need = if need.is_empty() {
        "No device is large enough to serve it.".to_owned()
    } else {
        format!("To serve it the run needs {}.", list(need.iter().map(String::as_str)))
    };
    let (at, size) = (thousands(oom.event), display(oom.requested));
    let held = recorded_run::held(oom.live, oom.reserved, oom.device_free);
    Some(if run.recorded {
        format!(
            "The recorded run itself ran out of memory under {}: at event {at} PyTorch refused a \
             request of {size}{more}, {held}. {need}",
            run.policy.name()
        )
    } else {
        format!(
            "The recorded run itself ran out of memory: at event {at} a request of {size} \
             failed{more}, {held}. {need}"
        )
    })
}

/// Says which capacity to give to find out whether the run fits its card, if the replays had no
/// limit.
fn to_find_out(report: &Report) -> Option<String> {
    if report.to_find_out.is_empty() {
        return None;
    }
    let lines = std::iter::once(recorded_run::NOTHING_SAID)
        .chain(report.to_find_out.iter().map(String::as_str));
    Some(lines.map(sentence).collect::<Vec<_>>().join(" "))
}

/// Says why a request was refused: too little memory, or fragmentation.
fn failure(run: &PolicyRun, refusal: &RefusalAt, report: &Report) -> String {
    let RefusalAt { event, requested, live, reserved, largest_free, recorded, .. } = *refusal;
    let too = if recorded { ", as it was by PyTorch" } else { "" };
    let start = format!(
        "Under {} a request of {} is refused at event {}{too}, with {} live and {} reserved",
        run.policy.name(),
        display(requested),
        thousands(event),
        display(live),
        display(reserved)
    );
    if refusal.at_beginning {
        return format!(
            "Under {} the memory held before the trace began already does not fit.",
            run.policy.name()
        );
    }
    let capacity = report.capacity.unwrap_or(reserved);
    let unused = capacity.saturating_sub(live);
    if unused < requested {
        let short = display(requested - unused);
        return format!("{start}: live bytes alone leave it {short} short, under any policy.");
    }
    if report.floor_device > capacity {
        let floor = display(report.floor_device);
        return format!(
            "{start}. No allocator could serve the whole trace here: its floor is {floor}."
        );
    }
    format!(
        "{start}: {} of the device is not live, but the largest free block is {}. That is \
         fragmentation, not a lack of memory.",
        display(unused),
        display(largest_free)
    )
}

/// Says how much of the reserved memory was free at the peak.
fn holes(report: &Report) -> Option<String> {
    let run = recorded(report)?;
    let map = &run.map;
    let largest = map.largest_holes.first()?.size;
    if ratio(map.free, map.reserved) * 100.0 < WORTH_SAYING {
        return None;
    }
    if run.refusal.is_some() {
        return None; // `failure` describes it.
    }
    Some(format!(
        "When {} held the most, {} was live of {} reserved; {} ({}) was free, {}.",
        run.policy.name(),
        display(map.live + map.pending),
        display(map.reserved),
        display(map.free),
        percent(map.free, map.reserved),
        match map.holes {
            1 => "in one hole".to_owned(),
            holes => format!("in {} holes, the largest {}", thousands(holes), display(largest)),
        }
    ))
}

/// Names the origin that holds most at the peak of live bytes.
fn largest_origin(report: &Report) -> Option<String> {
    let peak = &report.peak;
    let group = peak.groups.iter().find(|group| !matches!(group.origin, Origin::Before))?;
    let share = percent(group.bytes, peak.live);
    let (count, hold) = match group.count {
        1 => ("one allocation".to_owned(), "holds"),
        count => (format!("{} allocations", thousands(count)), "hold"),
    };
    let what = match &group.origin {
        Origin::Site(site) => {
            let frames = report.sites.get(*site as usize)?.iter();
            let frames = frames.filter_map(|&frame| report.frames.get(frame as usize));
            let place = telling(frames.map(String::as_str))?;
            format!("{count} made in {place} {hold} {}", display(group.bytes))
        }
        Origin::Size { size, stream } => {
            format!("{count} of {} on {stream} {hold} {}", display(*size), display(group.bytes))
        }
        Origin::Before => return None,
    };
    Some(format!("At the peak of live memory ({}), {what} ({share}).", display(peak.live)))
}

/// Says how much of the peak is never freed.
fn kept(report: &Report) -> Option<String> {
    let kept = report.lifetimes.to_the_end.at_peak;
    let share = ratio(kept, report.peak.live);
    if report.trace.begins_in_the_middle || kept == 0 || share > 1.0 {
        return None;
    }
    let rest = report.peak.live - kept;
    Some(format!(
        "Of the live bytes at the peak, {} ({}) are never freed; {} come and go.",
        display(kept),
        percent(kept, report.peak.live),
        display(rest)
    ))
}

/// Compares the cost of the policies' driver calls, if it differs.
fn driver_time(report: &Report) -> Option<String> {
    let recorded = recorded(report)?;
    let finished = report.policies.iter().filter(|run| run.refusal.is_none());
    let most = finished.max_by(|a, b| a.driver_us.total_cmp(&b.driver_us))?;
    // Memory from before the trace cost the recorded policy no calls, but another policy some.
    let unfair = report.trace.begins_in_the_middle || recorded.refusal.is_some();
    if unfair || recorded.driver_us <= 0.0 {
        return None;
    }
    let times = most.driver_us / recorded.driver_us;
    if most.policy == recorded.policy || times < 1.5 {
        return None;
    }
    Some(format!(
        "Driver calls cost {} under {} and {} under {} ({times:.1} times as much), over the whole \
         run.",
        milliseconds(recorded.driver_us),
        recorded.policy.name(),
        milliseconds(most.driver_us),
        most.policy.name()
    ))
}

/// Says how often cached memory had to be released.
fn retries(report: &Report) -> Option<String> {
    let runs = report.policies.iter().filter(|run| run.retries > 0);
    let runs: Vec<String> = runs
        .map(|run| match run.retries {
            1 => format!("once under {}", run.policy.name()),
            count => format!("{} times under {}", thousands(count), run.policy.name()),
        })
        .collect();
    (!runs.is_empty()).then(|| {
        format!(
            "Memory was short {}: all cached memory was released to the driver, and the request \
             retried.",
            list(runs.iter().map(String::as_str))
        )
    })
}

/// Says how far the replay of the recorded policy matches PyTorch's run, by the share of equal
/// addresses.
fn trust(report: &Report) -> (Tone, Option<String>) {
    let Some(run) = recorded(report) else { return (Tone::Plain, None) };
    let Some(same) = run.same_address else {
        let text = "How well the replay follows the recorded run is not known: the trace is not \
                    PyTorch's, and has no addresses to compare.";
        return (Tone::Plain, Some(text.to_owned()));
    };
    let (name, all) = (run.policy.name(), thousands(run.allocs));
    if run.allocs == 0 {
        let text = format!(
            "How well the replay under {name} follows PyTorch is not known: there was no \
             allocation to compare."
        );
        return (Tone::Plain, Some(text));
    }
    if run.left_early {
        return (Tone::Plain, None); // The replay diverged, and `failure` describes that.
    }
    let share = ratio(same, run.allocs);
    let (tone, grade) = if same == run.allocs {
        let text = format!(
            "The replay under {name} is what PyTorch did: all {all} allocations are at the address \
             PyTorch chose."
        );
        return (Tone::Plain, Some(text));
    } else if same == 0 {
        (Tone::Bad, "is not what PyTorch did")
    } else if share < HALF {
        (Tone::Bad, "is far from what PyTorch did")
    } else if share < CLOSE {
        (Tone::Plain, "is only in part what PyTorch did")
    } else {
        (Tone::Plain, "is close to what PyTorch did, but not equal")
    };
    let (count, are) = match same {
        0 => ("none".to_owned(), "is"),
        1 => ("one".to_owned(), "is"),
        same => (thousands(same), "are"),
    };
    let share = if same == 0 { String::new() } else { format!(" ({})", below_all(share)) };
    // On another device than the recorded one, differences are expected.
    let doubt = match (report.capacity, tone) {
        (Some(_), _) => " The given device may differ from the recorded one.",
        (None, Tone::Bad) => {
            " Reserved memory and addresses in this report are the simulator's own."
        }
        _ => "",
    };
    let text = format!(
        "The replay under {name} {grade}: {count} of {all} allocations{share} {are} at the address \
         PyTorch chose.{doubt}"
    );
    (tone, Some(text))
}

/// Formats a share below one, never rounded up to 100 %.
fn below_all(share: f64) -> String {
    let percent = share * 100.0;
    if percent > 99.9 { "over 99.9 %".to_owned() } else { format!("{percent:.1} %") }
}

fn recorded(report: &Report) -> Option<&PolicyRun> {
    let recorded = report.policies.iter().find(|run| run.recorded);
    // A trace of another allocator is compared with the first policy.
    recorded.or(report.policies.first())
}

/// Returns the smallest card, by its nominal GB, that leaves `bytes` to the allocator.
pub(crate) fn card_for(bytes: u64) -> Option<u64> {
    CARDS.into_iter().find(|card| card * GIB / 100 * CARD_SHARE >= bytes)
}

/// Formats a given size: `24 GiB` rather than `24.00 GiB`.
fn device(bytes: u64) -> String {
    display(bytes).replace(".00 ", " ")
}

fn article(number: u64) -> &'static str {
    if number == 8 || number == 80 { "an" } else { "a" }
}

fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    match &names[..] {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [most @ .., last] => format!("{} and {last}", most.join(", ")),
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio")]
fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

fn percent(part: u64, whole: u64) -> String {
    let percent = ratio(part, whole) * 100.0;
    if percent < 10.0 { format!("{percent:.1} %") } else { format!("{percent:.0} %") }
}

fn milliseconds(us: f64) -> String {
    format!("{:.1} ms", us / 1000.0)
}

/// Formats a count with thousands separators.
fn thousands(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::data::{AddressMap, Curve, Hole, Peak, PeakGroup, RecordedOom, Trace};
    use super::*;

    fn run(policy: Policy, recorded: bool, reserved: u64, smallest: u64) -> PolicyRun {
        PolicyRun {
            policy,
            about: about(policy),
            recorded,
            events: 0,
            live_peak: 0,
            live_peak_event: 0,
            reserved_peak: reserved,
            reserved_peak_event: 0,
            excess: None,
            smallest: Some(smallest),
            card: None,
            driver_us: 1000.0,
            retries: 0,
            allocs: 1234,
            same_address: recorded.then_some(1234),
            left_early: false,
            refusal: None,
            reserved: Curve::default(),
            map: AddressMap::default(),
        }
    }

    fn report(policies: Vec<PolicyRun>) -> Report {
        Report { policies, floor: 20 * GIB, floor_device: 20 * GIB, ..Report::default() }
    }

    fn lead(report: &Report) -> String {
        findings(report).swap_remove(0).text
    }

    fn says(report: &Report, part: &str) -> bool {
        findings(report).iter().any(|finding| finding.text.contains(part))
    }

    #[test]
    fn a_possible_saving_comes_first() {
        let segments = run(Policy::Segments, true, 36 * GIB, 27 * GIB);
        let expandable = run(Policy::Expandable, false, 25 * GIB, 21 * GIB);
        let report = report(vec![segments, expandable]);
        let expected = "expandable_segments:True would have saved 11.00 GiB of reserved memory \
                        (31 %); the run would have fitted a 24 GB card.";
        assert_eq!(lead(&report), expected);
        assert_eq!(findings(&report)[0].tone, Tone::Good);
        let trace = Trace { begins_in_the_middle: true, ..Trace::default() };
        let report = Report { trace, ..report };
        assert!(lead(&report).ends_with("held only the live blocks when the trace began."));
    }

    #[test]
    fn a_named_card_has_room_for_the_cuda_context() {
        assert_eq!(card_for(22 * GIB), Some(24));
        assert_eq!(card_for(23 * GIB), Some(40), "a CUDA context would not fit beside it");
        assert_eq!(card_for(200 * GIB), None);
        let large = report(vec![
            run(Policy::Segments, true, 300 * GIB, 300 * GIB),
            run(Policy::Expandable, false, 200 * GIB, 200 * GIB),
        ]);
        assert!(!lead(&large).contains("card"), "{}", lead(&large));
        let same = report(vec![
            run(Policy::Segments, true, 30 * GIB, 28 * GIB),
            run(Policy::Expandable, false, 26 * GIB, 26 * GIB),
        ]);
        assert!(lead(&same).ends_with("either way the run fits a 40 GB card."), "{}", lead(&same));
    }

    #[test]
    fn the_saving_of_expandable_segments_is_reported() {
        let report = report(vec![
            run(Policy::Segments, false, 36 * GIB, 27 * GIB),
            run(Policy::Expandable, true, 25 * GIB, 21 * GIB),
        ]);
        let expected = "expandable_segments:True saved 11.00 GiB of reserved memory over segments \
                        (31 %); the run fits a 24 GB card.";
        assert_eq!(lead(&report), expected);
    }

    #[test]
    fn no_saving_is_claimed_without_one() {
        let report = report(vec![
            run(Policy::Segments, true, 21 * GIB, 21 * GIB),
            run(Policy::Expandable, false, 21 * GIB - 1, 21 * GIB),
        ]);
        let expected = "Little to gain: segments reserves 21.00 GiB at its peak, 5.0 % above the \
                        floor; the run fits a 24 GB card.";
        assert_eq!(lead(&report), expected);
    }

    fn refused(mut run: PolicyRun, requested: u64, live: u64, largest_free: u64) -> PolicyRun {
        let reserved = run.reserved_peak;
        run.refusal = Some(RefusalAt {
            event: 278_444,
            requested,
            live,
            reserved,
            largest_free,
            ..RefusalAt::default()
        });
        run
    }

    #[test]
    fn a_failure_on_a_card_has_its_policy_and_reason() {
        let segments = run(Policy::Segments, true, 23 * GIB, 27 * GIB);
        let segments = refused(segments, 4 * GIB, 17 * GIB, 3 * GIB);
        let expandable = run(Policy::Expandable, false, 21 * GIB, 21 * GIB);
        let report = Report { capacity: Some(24 * GIB), ..report(vec![segments, expandable]) };
        let expected = "On a device of 24 GiB the run fails under segments; \
                        expandable_segments:True lets it finish.";
        assert_eq!(lead(&report), expected);
        let why = &findings(&report)[1];
        assert_eq!(why.tone, Tone::Bad);
        assert!(why.text.contains("at event 278,444"), "{}", why.text);
        assert!(why.text.contains("7.00 GiB of the device is not live"), "{}", why.text);
        assert!(why.text.contains("fragmentation"), "{}", why.text);
        // A run that did not finish has no peak to compare.
        assert!(!says(&report, "saved"));
    }

    #[test]
    fn too_little_memory_is_not_called_fragmentation() {
        let segments =
            refused(run(Policy::Segments, true, 9 * GIB, 27 * GIB), 4 * GIB, 8 * GIB, GIB);
        let report = Report { capacity: Some(10 * GIB), ..report(vec![segments]) };
        assert!(!says(&report, "fragmentation"));
        assert!(says(&report, "leave it 2.00 GiB short, under any policy"));
        assert!(lead(&report).contains("no allocator could make it fit, its floor is 20.00 GiB"));
    }

    #[test]
    fn a_run_that_fits_under_every_policy_is_reported() {
        let all = vec![
            run(Policy::Segments, true, 27 * GIB, 27 * GIB),
            run(Policy::Expandable, false, 21 * GIB, 21 * GIB),
        ];
        let report = Report { capacity: Some(40 * GIB), ..report(all) };
        let expected = "On a device of 40 GiB the run fits under every policy; expandable needs \
                        the least, 21.00 GiB.";
        assert_eq!(lead(&report), expected);
        assert!(says(&report, "would have saved 6.00 GiB"));
    }

    #[test]
    fn a_recorded_failure_is_reported_once() {
        let oom = Some(RecordedOom {
            event: 5000,
            requested: GIB,
            count: 2,
            live: 18 * GIB,
            reserved: Some(21 * GIB),
            device_free: Some(GIB / 2),
        });
        let trace = Trace { oom, ..Trace::default() };
        let segments = run(Policy::Segments, true, 21 * GIB, 27 * GIB);
        let mut report = Report { trace, ..report(vec![segments]) };
        assert!(says(&report, "at event 5,000 PyTorch refused a request of 1024.00 MiB"));
        assert!(says(&report, "the first of 2 such refusals"));
        assert!(says(
            &report,
            "with 18.00 GiB live and 21.00 GiB reserved; 512.00 MiB of the device"
        ));
        assert!(says(&report, "needs 27.00 GiB under segments"));
        let mut segments = refused(run(Policy::Segments, true, 21 * GIB, 27 * GIB), GIB, GIB, GIB);
        segments.refusal.as_mut().unwrap().recorded = true;
        report.policies = vec![segments];
        assert!(!says(&report, "The recorded run itself"));
    }

    #[test]
    fn holes_and_origins_are_reported_with_their_share() {
        let mut segments = run(Policy::Segments, true, 24 * GIB, 27 * GIB);
        segments.map = AddressMap {
            reserved: 24 * GIB,
            free: 6 * GIB,
            holes: 57,
            largest_holes: vec![Hole { size: 3 * GIB, address: String::new(), group: 0 }],
            ..AddressMap::default()
        };
        let group = |bytes, origin| PeakGroup { bytes, count: 2, origin, ..PeakGroup::default() };
        let mut report = Report {
            peak: Peak {
                live: 10 * GIB,
                groups: vec![group(5 * GIB, Origin::Before), group(4 * GIB, Origin::Site(0))],
                ..Peak::default()
            },
            sites: vec![vec![1, 0]],
            frames: vec!["forward (net.py:7)".to_owned(), "_call_impl (module.py:1)".to_owned()],
            ..report(vec![segments])
        };
        assert!(says(&report, "6.00 GiB (25 %) was free, in 57 holes, the largest 3.00 GiB"));
        assert!(says(&report, "2 allocations made in forward (net.py:7) hold 4.00 GiB (40 %)"));
        report.lifetimes.to_the_end.at_peak = 3 * GIB;
        assert!(says(&report, "3.00 GiB (30 %) are never freed"));
        // Memory from before the trace might be kept as well, so the share is unknown.
        report.trace.begins_in_the_middle = true;
        assert!(!says(&report, "never freed"));
    }

    #[test]
    fn agreement_with_pytorch_is_graded() {
        let mut report = report(vec![run(Policy::Segments, true, 21 * GIB, 21 * GIB)]);
        assert!(says(&report, "is what PyTorch did: all 1,234 allocations"));
        for (same, tone, expected) in [
            (
                1233,
                Tone::Plain,
                "is close to what PyTorch did, but not equal: 1,233 of 1,234 allocations",
            ),
            (
                1000,
                Tone::Plain,
                "only in part what PyTorch did: 1,000 of 1,234 allocations (81.0 %) are at the",
            ),
            (
                400,
                Tone::Bad,
                "is far from what PyTorch did: 400 of 1,234 allocations (32.4 %) are at",
            ),
            (1, Tone::Bad, "is far from what PyTorch did: one of 1,234 allocations (0.1 %) is at"),
            (0, Tone::Bad, "is not what PyTorch did: none of 1,234 allocations is at the address"),
        ] {
            report.policies[0].same_address = Some(same);
            let last = findings(&report).pop().unwrap();
            assert!(last.text.contains(expected), "{}", last.text);
            assert_eq!(last.tone, tone, "{same}");
            assert_eq!(last.text.contains("close"), same == 1233, "{}", last.text);
        }
        report.capacity = Some(30 * GIB);
        assert!(says(&report, "The given device may differ from the recorded one"));
    }

    #[test]
    fn a_missing_comparison_is_reported() {
        let mut report = report(vec![run(Policy::Segments, true, 21 * GIB, 21 * GIB)]);
        (report.policies[0].allocs, report.policies[0].same_address) = (0, Some(0));
        assert!(says(&report, "is not known: there was no allocation to compare"));
        report.policies[0].same_address = None;
        assert!(says(&report, "is not known: the trace is not PyTorch's"));
        // If a replay failed earlier than PyTorch, the findings say that instead.
        let mut early = run(Policy::Segments, true, 21 * GIB, 21 * GIB);
        early.left_early = true;
        report.policies = vec![early];
        assert!(!says(&report, "what PyTorch did"));
    }

    #[test]
    fn shares_are_never_rounded_up_to_all() {
        assert_eq!(below_all(0.999_99), "over 99.9 %");
        assert_eq!(below_all(0.5), "50.0 %");
    }

    #[test]
    fn driver_time_is_compared_with_the_recorded_policys() {
        let mut report = report(vec![
            run(Policy::Segments, true, 36 * GIB, 27 * GIB),
            run(Policy::Expandable, false, 25 * GIB, 21 * GIB),
        ]);
        assert!(!says(&report, "Driver calls"));
        report.policies[1].driver_us = 3500.0;
        assert!(says(&report, "cost 1.0 ms under segments and 3.5 ms under expandable (3.5 times"));
        report.trace.begins_in_the_middle = true;
        assert!(!says(&report, "Driver calls"));
        report.policies[1].retries = 1;
        report.policies[0].retries = 2;
        assert!(says(&report, "short 2 times under segments and once under expandable"));
    }

    #[test]
    fn words() {
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(999), "999");
        assert_eq!(thousands(1_234_567), "1,234,567");
        assert_eq!(list(["a", "b", "c"].into_iter()), "a, b and c");
        assert_eq!(sentence("a b"), "A b.");
        assert_eq!(percent(1, 0), "0.0 %");
        assert_eq!(article(80), "an");
    }
}
