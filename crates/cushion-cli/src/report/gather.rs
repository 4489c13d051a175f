//! Builds a report: replays the trace under each policy and collects what the page shows.

use std::collections::HashMap;
use std::io::Write;

use anyhow::Context as _;
use cushion_core::size::display;
use cushion_core::{BlockUse, DriverError, Ladder, Policy, StreamId};
use cushion_trace::{
    Action, BlockState, CAPACITY_STEP, Event, Origin as TraceOrigin, Outcome, Program,
    ReplayConfig, Snapshot, StackId, min_capacity, replay_watched, state_at,
};

use crate::output::Streams;
use crate::trace_files::recorded;

use super::data::{
    AddressMap, Curve, Origin, Peak, PeakGroup, PolicyRun, RecordedOom, RefusalAt, Report,
    Shortages, Timeline, Trace,
};
use super::findings::{self, CARD_SHARE};
use super::life::{self, Lives};
use super::map::{self, MOST_RECTS, Source};
use super::series::{self, Recorder};
use super::shortages;
use super::sites::Sites;

/// The number of origins listed at the peak.
const MOST_GROUPS: usize = 30;

/// The parameters of a report.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) name: String,
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) device: usize,
    pub(crate) program: &'a Program,
    pub(crate) ladder: Ladder,
    pub(crate) capacity: Option<u64>,
}

/// Replays the trace and collects all data of the page.
pub(crate) fn gather<O: Write, T: Write>(
    request: &Request<'_>,
    streams: &mut Streams<O, T>,
) -> anyhow::Result<Report> {
    let Request { snapshot, program, capacity, .. } = *request;
    let bug = "the simulated device refused a call, which is a bug in Cushion";
    let mut runs = Vec::new();
    for policy in Policy::ALL {
        runs.push(request.run(policy, streams).context(bug)?);
    }
    // Live allocations do not depend on the policy, except for refusals and where a run ended: use
    // the run that served most, and among equals the recorded one.
    let mut longest = runs
        .iter()
        .max_by_key(|run| (run.shown.events, run.shown.live_peak, run.shown.recorded))
        .context("no policy was replayed")?;
    // The recorded run goes on after every replay has failed.
    let whole;
    let unlimited = Request { capacity: None, name: request.name.clone(), ..*request };
    let mut at_peak = request;
    if longest.shown.events < program.events {
        whole = unlimited.replay(longest.policy).context(bug)?;
        (longest, at_peak) = (&whole, &unlimited);
    }
    let (peak_event, policy) = (longest.shown.live_peak_event, longest.policy);
    let (times, duration_us) =
        series::times(request.events().map(|event| event.time_us), program.events).unzip();
    let timeline = Timeline {
        buckets: series::buckets(program.events),
        times,
        live: longest.live.clone(),
        live_peak: longest.shown.live_peak,
        live_peak_event: peak_event,
    };
    let has_times = duration_us.is_some();
    let (lives, mut lifetimes) = life::follow(request.events(), peak_event, has_times);
    // The number of stacks on a page is limited: the listed ones come before those of a map.
    let mut sites = Sites::new(&snapshot.stacks);
    let peak = at_peak.peak(peak_event, policy, &lives, &mut sites).context(bug)?;
    for run in &mut runs {
        request.map(run, &lives, &mut sites).context(bug)?;
    }
    lifetimes.from_before = peak.from_before;
    let notes = request.notes(&runs);
    let shortages = runs.iter_mut().filter_map(|run| run.shortages.take()).collect();
    let (sites, frames) = sites.finish();
    // With a limit, requests that PyTorch refused are retried; the smallest device serves them.
    let (floor, device) = (program.floor_bytes(capacity.is_some()), program.floor_bytes(true));
    let unanswered = program.oom.filter(|_| capacity.is_none());
    let mut report = Report {
        version: env!("CARGO_PKG_VERSION"),
        trace: request.trace(duration_us),
        capacity,
        floor,
        floor_device: device,
        floor_card: findings::card_for(device),
        to_find_out: unanswered.map(|oom| recorded::what_to_do(&oom)).unwrap_or_default(),
        findings: Vec::new(),
        policies: runs.into_iter().map(|run| run.shown).collect(),
        timeline,
        peak,
        lifetimes,
        shortages,
        sites,
        frames,
        notes,
    };
    report.findings = findings::findings(&report);
    Ok(report)
}

/// The replay under one policy, for the page and for other parts.
struct Run {
    policy: Policy,
    shown: PolicyRun,
    live: Curve,
    refusals_passed_over: u64,
    pending_frees: u64,
    hurried_frees: u64,
    shortages: Option<Shortages>,
}

impl Request<'_> {
    fn events(&self) -> impl Iterator<Item = Event> {
        self.snapshot.devices[self.device].iter()
    }

    fn event(&self, at: u64) -> Option<Event> {
        self.snapshot.devices[self.device].get(usize::try_from(at).ok()?)
    }

    /// Returns whether the allocation of `event` is live to the end. A request that PyTorch refused
    /// is not.
    fn is_kept(&self, event: u64, lives: &Lives) -> bool {
        lives.end(event).is_none() && self.event(event).is_some_and(|e| e.action == Action::Alloc)
    }

    fn stack_of(&self, event: u64) -> Option<StackId> {
        self.event(event)?.stack
    }

    fn config(&self, policy: Policy) -> ReplayConfig {
        ReplayConfig { policy, ladder: self.ladder, capacity: self.capacity, options: None }
    }

    fn run<O: Write, T: Write>(
        &self,
        policy: Policy,
        streams: &mut Streams<O, T>,
    ) -> Result<Run, DriverError> {
        streams.begin(format!("replaying {} under {policy}", self.name));
        let mut run = self.replay(policy)?;
        let config = ReplayConfig { capacity: None, ..self.config(policy) };
        run.shown.smallest = min_capacity(self.program, &config, |runs, of| {
            streams.update(u64::from(runs), Some(u64::from(of)));
        })?;
        run.shown.card = run.shown.smallest.and_then(findings::card_for);
        streams.end();
        Ok(run)
    }

    fn replay(&self, policy: Policy) -> Result<Run, DriverError> {
        let (program, config) = (self.program, self.config(policy));
        let mut recorder = Recorder::new(program.events, program.begins_in_the_middle());
        let outcome = replay_watched(program, &config, &mut recorder)?;
        let Outcome { live_peak, reserved_peak, .. } = outcome;
        let (live, reserved) = recorder.finish(
            outcome.events,
            (outcome.live_peak_event, live_peak),
            (outcome.reserved_peak_event, reserved_peak),
        );
        let shortages = shortages::of_replay(policy, &outcome);
        let refusal = outcome.oom.map(|refusal| RefusalAt {
            event: refusal.event,
            requested: refusal.requested,
            live: refusal.live,
            reserved: refusal.reserved,
            largest_free: refusal.largest_free,
            recorded: refusal.recorded,
            at_beginning: refusal.at_beginning,
            site: None,
        });
        let shown = PolicyRun {
            policy,
            about: findings::about(policy),
            recorded: policy == program.policy && program.origin == TraceOrigin::Torch,
            events: outcome.events,
            live_peak,
            live_peak_event: live.peak_event,
            reserved_peak,
            reserved_peak_event: reserved.peak_event,
            excess: outcome.excess(),
            smallest: None,
            card: None,
            driver_us: crate::replay::microseconds(outcome.driver.nanos),
            retries: outcome.retries,
            allocs: outcome.allocs,
            same_address: outcome.same_address,
            left_early: outcome.oom.is_some_and(|refusal| !refusal.recorded),
            refusal,
            reserved: reserved.curve,
            map: AddressMap::default(),
        };
        let Outcome { refusals_passed_over, pending_frees, hurried_frees, .. } = outcome;
        let live = live.curve;
        Ok(Run {
            policy,
            shown,
            live,
            refusals_passed_over,
            pending_frees,
            hurried_frees,
            shortages,
        })
    }

    /// Draws the address map of a run: at its failure, whose holes matter, else at its peak.
    fn map(&self, run: &mut Run, lives: &Lives, sites: &mut Sites<'_>) -> Result<(), DriverError> {
        let mut site = |event| sites.index(self.stack_of(event)?);
        let mut moment = run.shown.reserved_peak_event;
        if let Some(refusal) = &mut run.shown.refusal {
            moment = refusal.event;
            if !refusal.at_beginning {
                refusal.site = site(refusal.event);
            }
        }
        let state = state_at(self.program, &self.config(run.policy), moment)?;
        let source = |address| {
            let event = state.allocated_by.get(&address).copied().flatten();
            Source { event, kept: event.is_some_and(|event| self.is_kept(event, lives)) }
        };
        let most = MOST_RECTS / Policy::ALL.len();
        run.shown.map = map::draw(&state.snapshot, moment, most, source, site);
        Ok(())
    }

    fn trace(&self, duration_us: Option<u64>) -> Trace {
        let oom = self.program.oom.map(|oom| RecordedOom {
            event: oom.event,
            requested: oom.requested,
            count: oom.count,
            live: oom.live,
            reserved: oom.reserved,
            device_free: oom.device_free,
        });
        Trace {
            name: self.name.clone(),
            device: self.device,
            devices: self.snapshot.devices.iter().filter(|events| !events.is_empty()).count(),
            events: self.program.events,
            allocs: self.program.allocs,
            conf: self.snapshot.settings.conf.clone().filter(|conf| !conf.is_empty()),
            policy: (self.program.origin == TraceOrigin::Torch).then(|| self.program.policy.name()),
            ladder: self.ladder.name(),
            begins_in_the_middle: self.program.begins_in_the_middle(),
            duration_us,
            oom,
        }
    }

    /// Groups the live allocations at the peak by origin.
    fn peak(
        &self,
        event: u64,
        policy: Policy,
        lives: &Lives,
        sites: &mut Sites<'_>,
    ) -> Result<Peak, DriverError> {
        let state = state_at(self.program, &self.config(policy), event)?;
        let old_stacks =
            if policy == self.program.policy { self.old_stacks() } else { HashMap::new() };
        let mut groups: HashMap<Key, PeakGroup> = HashMap::new();
        let has_stacks = !self.snapshot.stacks.is_empty();
        let mut peak = Peak { event, policy: policy.name(), has_stacks, ..Peak::default() };
        for segment in &state.snapshot.segments {
            for block in segment.blocks.iter().filter(|block| block.use_ != BlockUse::Free) {
                let made = state.allocated_by.get(&block.address).copied().flatten();
                let key = match made.map(|made| self.stack_of(made)) {
                    None => old_stacks.get(&block.address).map_or(Key::Before, |&s| Key::Stack(s)),
                    Some(Some(stack)) => Key::Stack(stack),
                    Some(None) => Key::Size(block.requested, segment.stream),
                };
                peak.live += block.requested;
                peak.allocations += 1;
                let group = groups.entry(key).or_default();
                group.bytes += block.requested;
                group.count += 1;
                group.largest = group.largest.max(block.requested);
                if made.is_none() {
                    peak.from_before.count += 1;
                    peak.from_before.at_peak += block.requested;
                }
                if made.is_some_and(|made| self.is_kept(made, lives)) {
                    group.kept += block.requested;
                }
            }
        }
        let mut groups: Vec<(Key, PeakGroup)> = groups.into_iter().collect();
        groups.sort_by_key(|(key, group)| (std::cmp::Reverse(group.bytes), *key));
        for (index, (key, group)) in groups.into_iter().enumerate() {
            let origin = match key {
                Key::Stack(stack) => sites.index(stack).map(Origin::Site),
                Key::Size(size, stream) => {
                    Some(Origin::Size { size, stream: map::name_of(stream) })
                }
                Key::Before => Some(Origin::Before),
            };
            match origin {
                Some(origin) if index < MOST_GROUPS || matches!(origin, Origin::Before) => {
                    peak.groups.push(PeakGroup { origin, ..group });
                }
                _ => {
                    peak.other_groups += 1;
                    peak.other_bytes += group.bytes;
                }
            }
        }
        Ok(peak)
    }

    /// Returns the stacks of blocks that existed before the first event and still exist after the
    /// last: the file has them with the blocks, by PyTorch's addresses.
    fn old_stacks(&self) -> HashMap<u64, StackId> {
        if !self.program.begins_in_the_middle() {
            return HashMap::new();
        }
        let segments = &self.snapshot.segments;
        let here = segments.iter().filter(|s| usize::try_from(s.device) == Ok(self.device));
        let blocks = here.flat_map(|segment| &segment.blocks);
        let mut stacks: HashMap<u64, StackId> = blocks
            .filter(|block| block.state != BlockState::Inactive)
            .filter_map(|block| Some((block.address, block.stack?)))
            .collect();
        for event in self.events().filter(|event| event.action == Action::Alloc) {
            stacks.remove(&event.addr);
        }
        stacks
    }

    /// Returns what is not known, and what is assumed.
    fn notes(&self, runs: &[Run]) -> Vec<String> {
        let mut notes = vec![
            "Recorded: the requests and frees, and so the live memory. Simulated: the policies, and \
             so the reserved memory and the addresses. A replay assumes that the program would have \
             made the same requests under another policy."
                .to_owned(),
        ];
        notes.extend(self.program.notes.iter().map(|note| findings::sentence(note)));
        if self.program.begins_in_the_middle() {
            notes.push(
                "The origin of memory from before the trace is known only if the memory is still \
                 live at the end, with a recorded stack."
                    .to_owned(),
            );
            notes.push(
                "The memory that another policy would have held before the trace is not known: its \
                 replay starts from the live blocks alone."
                    .to_owned(),
            );
        }
        if self.program.origin != TraceOrigin::Torch {
            notes.push(
                "The trace is not PyTorch's: it has requests and frees, but not the layout that \
                 its allocator chose."
                    .to_owned(),
            );
        } else if self.snapshot.stacks.is_empty() {
            notes.push(
                "No stacks were recorded, so allocations are grouped by size and stream. \
                 torch.cuda.memory._record_memory_history(stacks=\"python\") records stacks."
                    .to_owned(),
            );
        }
        let floor = self.program.floor_bytes(true);
        if runs.iter().any(|run| run.shown.smallest.is_some_and(|bytes| bytes < floor)) {
            notes.push(
                "The smallest device can be below the floor: with less memory an allocator waits \
                 for pending frees earlier than PyTorch did, and then less is live at once."
                    .to_owned(),
            );
        }
        let passed_over = runs.iter().map(|run| run.refusals_passed_over).max().unwrap_or(0);
        if passed_over > 0 {
            notes.push(format!(
                "Requests that were refused when recorded ({passed_over}) are not in the curves, \
                 which have no limit; the smallest device serves them."
            ));
        }
        for run in runs.iter().filter(|run| run.hurried_frees > 0) {
            notes.push(format!(
                "Under {} the replay waits for the work of {} of {} pending frees earlier than \
                 PyTorch saw it done; how long that would take is not known.",
                run.policy, run.hurried_frees, run.pending_frees
            ));
        }
        notes.push(format!(
            "The smallest device is exact to {}: with that much less the trace does not pass. A \
             much smaller device may still pass by chance.",
            display(CAPACITY_STEP).replace(".00 ", " ")
        ));
        notes.push(format!(
            "A device here is the memory that the allocator may reserve. The CUDA context and other \
             processes are not part of it: a card sold as N GB is taken to leave {CARD_SHARE} % of N GiB."
        ));
        notes.push(
            "Driver time is the cost of a replay's driver calls, at the cost of each call \
             measured on an NVIDIA H200."
                .to_owned(),
        );
        notes
    }
}

/// The property by which allocations at the peak are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Key {
    Stack(StackId),
    /// Size and stream.
    Size(u64, StreamId),
    Before,
}
