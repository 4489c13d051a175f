//! The actions of a program and of its environment, and how they are read from random bytes or from
//! the bytes of a fuzzer.

use super::CAPACITY;

/// One action of a program or of its environment. Numbers are taken modulo the number of choices.
/// An action that a program may not do at that moment is skipped.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the names of the variants say it")]
pub enum Action {
    Alloc {
        size: u64,
        stream: u8,
    },
    /// Allocates as PyTorch does: first only from memory that is available at once, then by the
    /// ladder.
    AllocAtOnce {
        size: u64,
        stream: u8,
    },
    /// Requests memory by a future, which is polled once and kept if it has to wait.
    Future {
        size: u64,
        stream: u8,
    },
    /// Polls a waiting future.
    PollFuture {
        index: u8,
    },
    /// Drops a waiting future.
    DropFuture {
        index: u8,
    },
    Free {
        index: u16,
    },
    /// Repeats the same allocations and frees several times.
    Repeat {
        kind: u8,
        stream: u8,
        times: u8,
    },
    /// Uses a live block on another stream, which is recorded with the engine.
    UseOn {
        index: u16,
        stream: u8,
    },
    Finish {
        stream: u8,
    },
    /// The device makes one step.
    FinishOldest,
    FinishAll,
    ProcessEvents,
    EmptyCache,
    EmptyPool {
        pool: u8,
    },
    BeginPool {
        pool: u8,
        stream: Option<u8>,
    },
    EndPool {
        pool: u8,
    },
    ReleasePool {
        pool: u8,
    },
    UseOnOom {
        pool: u8,
        allow: bool,
    },
    NoSplit {
        pool: u8,
    },
    /// Captures a stream into a private pool.
    BeginCapture {
        pool: u8,
        stream: u8,
    },
    /// Makes another stream follow the captured one; the stream joins the capture.
    JoinCapture {
        stream: u8,
    },
    /// Makes the captured stream follow another.
    FollowStream {
        stream: u8,
    },
    EndCapture,
    /// Captures a whole graph.
    Graph {
        pool: u8,
        stream: u8,
        kind: u8,
    },
    /// Replays the graphs of a pool on any stream. The replay runs until its work is finished.
    Replay {
        pool: u8,
        stream: u8,
    },
    /// Begins a capture that the engine is not told of, as a library may.
    BeginSilentCapture {
        stream: u8,
    },
    EndSilentCapture,
    /// When an action next waits for the device, another thread replays a graph for the last time
    /// and releases its pool.
    ReplayMeanwhile {
        pool: u8,
        stream: u8,
    },
    /// When an action next waits for the device, another thread frees a block.
    FreeMeanwhile {
        index: u16,
    },
    /// Destroys a stream; a new one takes its place.
    DestroyStream {
        stream: u8,
    },
    /// Promises that some streams are never destroyed.
    Lasting {
        which: u8,
    },
    SetTenant {
        tenant: u8,
        bytes: u64,
    },
    SetLimit {
        bytes: Option<u64>,
    },
    SetFraction {
        percent: u8,
    },
    SetPolicy {
        policy: u8,
    },
    Configure {
        conf: u8,
    },
    Fail {
        call: u8,
        nth: u8,
        out_of_memory: bool,
    },
    FreeUnknown {
        address: u64,
    },
    RecordUnknown {
        address: u64,
    },
    /// Checks what the engine reports about a live block.
    Ask {
        index: u16,
    },
    Snapshot,
    ResetStats,
    /// Injects failures of allocations.
    Inject {
        rules: u8,
    },
    /// Trims after one second.
    Trim,
    /// Trims after this time.
    TrimAfter {
        ms: u16,
    },
    /// Obtains memory ahead of a request.
    Prefetch {
        size: u64,
        stream: u8,
    },
}

/// The bytes that a program is read from. After the last byte, zeros follow.
#[derive(Debug)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl Reader<'_> {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn pair(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn coin(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// Reads a number from `from` to `to`, with a resolution of 16 bits.
    fn between(&mut self, from: u64, to: u64) -> u64 {
        from + u64::from(self.pair()) * (to - from) / u64::from(u16::MAX)
    }

    /// Reads the size of a request: small, large, or at a boundary.
    fn size(&mut self) -> u64 {
        const MIB: u64 = 1 << 20;
        const EDGES: [u64; 17] = [
            0,
            1,
            511,
            512,
            513,
            MIB - 1,
            MIB,
            MIB + 1,
            10 * MIB - 1,
            10 * MIB,
            20 * MIB,
            CAPACITY - 1,
            CAPACITY,
            CAPACITY + 1,
            u64::MAX / 2,
            u64::MAX - 512,
            u64::MAX,
        ];
        match self.byte() % 32 {
            0..4 => self.between(1, 4096),
            4..9 => self.between(1, 2 * MIB),
            9..20 => self.between(MIB, 24 * MIB),
            20..28 => self.large(),
            28..31 => self.between(10 * MIB, 96 * MIB),
            _ => EDGES[usize::from(self.byte()) % EDGES.len()],
        }
    }

    /// Reads a size in whole mebibytes.
    fn large(&mut self) -> u64 {
        (1 + u64::from(self.byte() % 40)) << 20
    }
}

/// The actions that a program favours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flavour {
    /// All actions.
    General,
    /// Captures and replays of large blocks.
    Graphs,
    /// Creation and destruction of streams.
    Streams,
    /// Repetition of the same steps, with trims between them.
    Steady,
}

impl Flavour {
    pub(super) const ALL: [Self; 4] = [Self::General, Self::Graphs, Self::Streams, Self::Steady];
}

type Make = fn(&mut Reader<'_>) -> Action;

/// The weight of each action in a program of each flavour, and how the action is read.
const KINDS: &[([u16; 4], Make)] = &[
    ([24, 20, 30, 10], |r| Action::Alloc { size: r.size(), stream: r.byte() }),
    ([4, 16, 10, 4], |r| Action::Alloc { size: r.large(), stream: r.byte() }),
    ([8, 4, 6, 6], |r| Action::AllocAtOnce { size: r.size(), stream: r.byte() }),
    ([3, 1, 3, 1], |r| Action::Future { size: r.size(), stream: r.byte() }),
    ([4, 1, 3, 1], |r| Action::PollFuture { index: r.byte() }),
    ([1, 1, 1, 1], |r| Action::DropFuture { index: r.byte() }),
    ([24, 26, 28, 12], |r| Action::Free { index: r.pair() }),
    ([2, 6, 2, 30], |r| Action::Repeat { kind: r.byte(), stream: r.byte(), times: r.byte() }),
    ([8, 4, 6, 3], |r| Action::UseOn { index: r.pair(), stream: r.byte() }),
    ([4, 3, 4, 3], |r| Action::Finish { stream: r.byte() }),
    ([3, 3, 3, 3], |_| Action::FinishOldest),
    ([2, 1, 1, 1], |_| Action::FinishAll),
    ([2, 1, 2, 1], |_| Action::ProcessEvents),
    ([2, 2, 3, 1], |_| Action::EmptyCache),
    ([1, 1, 0, 0], |r| Action::EmptyPool { pool: r.byte() }),
    ([1, 0, 1, 0], |r| Action::BeginPool {
        pool: r.byte(),
        stream: Some(r.byte()).filter(|it| it % 2 == 0),
    }),
    ([3, 1, 2, 1], |r| Action::EndPool { pool: r.byte() }),
    ([2, 5, 1, 1], |r| Action::ReleasePool { pool: r.byte() }),
    ([1, 0, 0, 0], |r| Action::UseOnOom { pool: r.byte(), allow: r.coin() }),
    ([1, 0, 0, 0], |r| Action::NoSplit { pool: r.byte() }),
    ([3, 8, 1, 1], |r| Action::BeginCapture { pool: r.byte(), stream: r.byte() }),
    ([2, 2, 0, 0], |r| Action::JoinCapture { stream: r.byte() }),
    ([2, 1, 0, 0], |r| Action::FollowStream { stream: r.byte() }),
    ([4, 9, 3, 3], |_| Action::EndCapture),
    ([2, 9, 1, 2], |r| Action::Graph { pool: r.byte(), stream: r.byte(), kind: r.byte() }),
    ([4, 10, 1, 1], |r| Action::Replay { pool: r.byte(), stream: r.byte() }),
    ([2, 1, 2, 2], |r| Action::BeginSilentCapture { stream: r.byte() }),
    ([4, 2, 4, 4], |_| Action::EndSilentCapture),
    ([2, 6, 0, 1], |r| Action::ReplayMeanwhile { pool: r.byte(), stream: r.byte() }),
    ([2, 1, 2, 0], |r| Action::FreeMeanwhile { index: r.pair() }),
    ([2, 1, 10, 1], |r| Action::DestroyStream { stream: r.byte() }),
    ([2, 2, 2, 2], |r| Action::Lasting { which: r.byte() }),
    ([3, 1, 3, 1], |r| Action::SetTenant { tenant: r.byte(), bytes: r.between(0, CAPACITY) }),
    ([2, 2, 2, 1], |r| {
        let bytes = r.between(CAPACITY / 4, CAPACITY);
        Action::SetLimit { bytes: Some(bytes).filter(|it| it % 3 > 0) }
    }),
    ([1, 1, 1, 0], |r| Action::SetFraction { percent: r.byte() }),
    ([1, 0, 1, 0], |r| Action::SetPolicy { policy: r.byte() }),
    ([3, 1, 3, 2], |r| Action::Configure { conf: r.byte() }),
    ([3, 1, 2, 1], |r| Action::Fail { call: r.byte(), nth: r.byte(), out_of_memory: r.coin() }),
    ([1, 0, 0, 0], |r| Action::FreeUnknown { address: (1 << 48) + r.between(0, CAPACITY) }),
    ([1, 0, 0, 0], |r| Action::RecordUnknown { address: (1 << 48) + r.between(0, CAPACITY) }),
    ([2, 1, 1, 1], |r| Action::Ask { index: r.pair() }),
    ([1, 1, 1, 1], |_| Action::Snapshot),
    ([1, 0, 0, 0], |_| Action::ResetStats),
    ([1, 0, 1, 0], |r| Action::Inject { rules: r.byte() }),
    ([4, 2, 2, 8], |_| Action::Trim),
    ([4, 2, 2, 10], |r| Action::TrimAfter { ms: r.pair() % 1500 }),
    ([2, 1, 1, 1], |r| Action::Prefetch { size: r.size(), stream: r.byte() }),
];

impl Action {
    /// Reads the next action of a program.
    pub(super) fn read(from: &mut Reader<'_>, flavour: Flavour) -> Self {
        let weight = |(weights, _): &([u16; 4], Make)| weights[flavour as usize];
        let all: u16 = KINDS.iter().map(weight).sum();
        // Two bytes, so that the frequencies are close to the weights.
        let mut at = from.pair() % all;
        for kind in KINDS {
            match at.checked_sub(weight(kind)) {
                None => return (kind.1)(from),
                Some(rest) => at = rest,
            }
        }
        Self::FinishAll
    }
}
