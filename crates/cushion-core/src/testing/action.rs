//! What a program, or its surroundings, may do, and how it is made of bytes: of chance, or of a fuzzer's.

use super::CAPACITY;

/// One thing a program, or its surroundings, may do. Numbers are taken modulo what there is; what would not be legal
/// for a program to do at that moment is left out.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the variants say it")]
pub enum Action {
    Alloc {
        size: u64,
        stream: u8,
    },
    /// As PyTorch asks: at once if that can be, else by the ladder.
    AllocAtOnce {
        size: u64,
        stream: u8,
    },
    /// Asks by a future, which is polled once, and kept if it has to wait.
    Future {
        size: u64,
        stream: u8,
    },
    /// Polls a future that is kept.
    PollFuture {
        index: u8,
    },
    /// Drops a future that is kept.
    DropFuture {
        index: u8,
    },
    Free {
        index: u16,
    },
    /// The same allocations and frees several times over.
    Repeat {
        kind: u8,
        stream: u8,
        times: u8,
    },
    /// Work on another stream that uses a live block, noted with the engine.
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
    /// Makes another stream follow the captured one, and so join its capture.
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
    /// Replays what was captured into a pool, on any stream; it runs until it is finished.
    Replay {
        pool: u8,
        stream: u8,
    },
    /// A library captures a stream without a word to the engine.
    BeginSilentCapture {
        stream: u8,
    },
    EndSilentCapture,
    /// When an action next waits for the device, another thread replays a graph for the last time and releases its
    /// pool.
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
    /// Says which streams last.
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
    /// Asks what the engine knows of a block.
    Ask {
        index: u16,
    },
    Snapshot,
    ResetStats,
    /// Makes allocations fail.
    Inject {
        rules: u8,
    },
    /// Time passes, and what is not needed is given back.
    Trim,
    /// As much time as this passes, and what is not needed is given back.
    TrimAfter {
        ms: u16,
    },
    /// Prepares memory ahead.
    Prefetch {
        size: u64,
        stream: u8,
    },
}

/// Bytes that a program is made of. After the last come zeros.
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

    /// From `from` to `to`, in steps of what 16 bits tell apart.
    fn between(&mut self, from: u64, to: u64) -> u64 {
        from + u64::from(self.pair()) * (to - from) / u64::from(u16::MAX)
    }

    /// What is asked for: small, large, and what lies on the edge of something.
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

    /// Of whole and half pages.
    fn large(&mut self) -> u64 {
        (1 + u64::from(self.byte() % 40)) << 20
    }
}

/// What a program does most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flavour {
    /// Everything.
    General,
    /// Captures and replays of large blocks.
    Graphs,
    /// Streams that come and go, with little memory.
    Streams,
    /// The same again and again, with time passing.
    Steady,
}

impl Flavour {
    pub(super) const ALL: [Self; 4] = [Self::General, Self::Graphs, Self::Streams, Self::Steady];
}

type Make = fn(&mut Reader<'_>) -> Action;

/// How often each action is in a program of each flavour, and how it is read.
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
    /// The next action of a program.
    pub(super) fn read(from: &mut Reader<'_>, flavour: Flavour) -> Self {
        let weight = |(weights, _): &([u16; 4], Make)| weights[flavour as usize];
        let all: u16 = KINDS.iter().map(weight).sum();
        // Two bytes, so that all are met about as often as they should be.
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
