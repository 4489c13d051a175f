//! The address map: every segment and block at one moment, in no more rectangles than a screen can
//! show.
//!
//! Segments are grouped by pool and stream, in address order within each group. If there are more
//! blocks than rectangles, the smallest neighbours of the same use are merged; if that is not
//! enough, the smallest neighbours of any use, and finally neighbours of several segments.

use std::collections::BTreeMap;

use cushion_core::{BlockUse, PoolId, SegmentFigures, Snapshot, StreamId};

use super::data::{AddressMap, Hole, MapGroup, Rects, Strip};

/// The number of rectangles in all maps of a page.
pub(crate) const MOST_RECTS: usize = 20_000;
/// The number of groups in a map; smaller groups share the last.
const MOST_GROUPS: usize = 24;
/// The number of holes listed.
const MOST_HOLES: usize = 10;

/// What is known about the allocation at an address.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Source {
    /// The event that made it; `None` if it was made before the trace began.
    pub(crate) event: Option<u64>,
    /// Whether it is still live when the trace ends.
    pub(crate) kept: bool,
}

/// Draws a snapshot in at most `most` rectangles, but at least one per group. `site` returns the
/// index of the stack of an event.
pub(crate) fn draw(
    snapshot: &Snapshot,
    event: u64,
    most: usize,
    source: impl Fn(u64) -> Source,
    mut site: impl FnMut(u64) -> Option<u32>,
) -> AddressMap {
    let mut map = AddressMap { event, reserved: snapshot.reserved, ..AddressMap::default() };
    let mut tapes = tapes(snapshot);
    let mut holes = Vec::new();
    for (group, tape) in tapes.iter_mut().enumerate() {
        for &segment in &tape.segments {
            tape.size += segment.size;
            for block in &segment.blocks {
                map.blocks += 1;
                match block.use_ {
                    BlockUse::Live => {
                        let live = block.requested.min(block.size);
                        map.live += live;
                        map.rounding += block.size - live;
                    }
                    BlockUse::Pending => map.pending += block.size,
                    BlockUse::Free => {
                        map.free += block.size;
                        tape.free += block.size;
                        holes.push((block.size, block.address, group));
                    }
                }
            }
            tape.pieces.extend(pieces(segment, &source));
        }
    }
    map.holes = holes.len() as u64;
    holes.sort_unstable_by_key(|&(size, address, _)| (std::cmp::Reverse(size), address));
    map.largest_holes = holes
        .iter()
        .take(MOST_HOLES)
        .map(|&(size, address, group)| Hole { size, address: hex(address), group })
        .collect();
    thin(&mut tapes, most);
    for tape in tapes {
        map.groups.push(tape.finish(&mut map.rects, &mut site));
    }
    map.merged = map.rects.merged.iter().map(|&(_, count, _)| u64::from(count) - 1).sum();
    map
}

/// A group under construction.
#[derive(Default)]
struct Tape<'a> {
    label: String,
    segments: Vec<&'a SegmentFigures>,
    size: u64,
    free: u64,
    pieces: Vec<Piece>,
}

/// The content of a rectangle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Live, and still live when the trace ends.
    Kept,
    /// Live, from before the trace began.
    Before,
    Live,
    Pending,
    Free,
    Mixed,
}

impl Kind {
    fn letter(self) -> char {
        match self {
            Self::Kept => 'K',
            Self::Before => 'B',
            Self::Live => 'L',
            Self::Pending => 'P',
            Self::Free => 'F',
            Self::Mixed => 'M',
        }
    }
}

/// One rectangle: a block, or several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    address: u64,
    size: u64,
    kind: Kind,
    free: u64,
    /// The event that allocated it, if it is one allocation and the event is known.
    event: Option<u64>,
    blocks: u32,
    /// The number of segments that begin in it.
    segments: u32,
}

/// Returns the segments in groups, the largest first.
fn tapes(snapshot: &Snapshot) -> Vec<Tape<'_>> {
    let mut groups: BTreeMap<(PoolId, StreamId, bool), Vec<&SegmentFigures>> = BTreeMap::new();
    for segment in &snapshot.segments {
        groups.entry((segment.pool, segment.stream, segment.small)).or_default().push(segment);
    }
    let size = |segments: &[&SegmentFigures]| segments.iter().map(|s| s.size).sum::<u64>();
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, segments)| std::cmp::Reverse(size(segments)));
    let rest = groups.split_off(groups.len().min(MOST_GROUPS));
    let mut tapes: Vec<Tape<'_>> = groups
        .into_iter()
        .map(|((pool, stream, small), segments)| {
            let label = label(pool, stream, small);
            Tape { label, segments, ..Tape::default() }
        })
        .collect();
    if !rest.is_empty() {
        let label = format!("{} smaller groups", rest.len());
        let segments = rest.into_iter().flat_map(|(_, segments)| segments).collect();
        tapes.push(Tape { label, segments, ..Tape::default() });
    }
    tapes
}

fn label(pool: PoolId, stream: StreamId, small: bool) -> String {
    let pool = if pool == PoolId::DEFAULT {
        String::new()
    } else {
        // Pools that the trace does not name are numbered from the end.
        let kind = if pool.0 == u64::MAX { "inferred " } else { "" };
        let first = if pool.0 == u64::MAX { String::new() } else { format!("{}.", pool.0) };
        format!("private pool {kind}{first}{}, ", pool.1)
    };
    let kind = if small { "small" } else { "large" };
    format!("{pool}{}, {kind} blocks", name_of(stream))
}

/// Formats a stream: the default stream is 0, others are handles.
pub(crate) fn name_of(stream: StreamId) -> String {
    if stream.0 < 1 << 16 {
        format!("stream {}", stream.0)
    } else {
        format!("stream {:#x}", stream.0)
    }
}

fn hex(address: u64) -> String {
    format!("{address:#x}")
}

fn pieces(
    segment: &SegmentFigures,
    source: &impl Fn(u64) -> Source,
) -> impl Iterator<Item = Piece> {
    segment.blocks.iter().enumerate().map(move |(index, block)| {
        let free = block.use_ == BlockUse::Free;
        let Source { event, kept } = if free { Source::default() } else { source(block.address) };
        Piece {
            address: block.address,
            size: block.size,
            kind: match block.use_ {
                BlockUse::Live if kept => Kind::Kept,
                BlockUse::Live if event.is_none() => Kind::Before,
                BlockUse::Live => Kind::Live,
                BlockUse::Pending => Kind::Pending,
                BlockUse::Free => Kind::Free,
            },
            free: if free { block.size } else { 0 },
            event,
            blocks: 1,
            segments: u32::from(index == 0),
        }
    })
}

/// Whether two neighbours may be merged.
type May = fn(&Piece, &Piece) -> bool;

/// Merges the smallest neighbours until at most `most` rectangles are left.
fn thin(tapes: &mut [Tape<'_>], most: usize) {
    let count = |tapes: &[Tape<'_>]| tapes.iter().map(|tape| tape.pieces.len()).sum::<usize>();
    let ways: [May; 3] =
        [|a, b| b.segments == 0 && a.kind == b.kind, |_, b| b.segments == 0, |_, _| true];
    for way in ways {
        for bits in 10..64 {
            if count(tapes) <= most {
                return;
            }
            for tape in tapes.iter_mut() {
                merge(&mut tape.pieces, 1 << bits, way);
            }
        }
    }
}

/// Merges neighbours that may be merged and are together at most `limit` large.
fn merge(pieces: &mut Vec<Piece>, limit: u64, may: May) {
    pieces.dedup_by(|next, kept| {
        let fits = kept.size.saturating_add(next.size) <= limit && may(kept, next);
        if fits {
            kept.size += next.size;
            kept.free += next.free;
            kept.blocks += next.blocks;
            kept.segments += next.segments;
            kept.kind = if kept.kind == next.kind { kept.kind } else { Kind::Mixed };
            kept.event = None;
        }
        fits
    });
}

impl Tape<'_> {
    /// Adds the rectangles, and the segments they belong to.
    fn finish(self, rects: &mut Rects, site: &mut impl FnMut(u64) -> Option<u32>) -> MapGroup {
        let mut strips: Vec<Strip> = Vec::new();
        let paged: BTreeMap<u64, u64> = self
            .segments
            .iter()
            .filter(|segment| segment.paged)
            .map(|segment| (segment.address, segment.size))
            .collect();
        for piece in &self.pieces {
            if piece.segments > 0 || strips.is_empty() {
                let before = paged.range(..piece.address).next_back();
                let unmapped = before
                    .filter(|_| paged.contains_key(&piece.address))
                    .map_or(0, |(address, size)| piece.address.saturating_sub(address + size));
                let address = hex(piece.address);
                strips.push(Strip { address, segments: piece.segments, unmapped, rects: 0 });
            }
            if let Some(strip) = strips.last_mut() {
                strip.rects += 1;
            }
            rects.add(piece, piece.event.and_then(&mut *site));
        }
        let Self { label, size, free, segments, .. } = self;
        MapGroup { label, size, free, segments: segments.len() as u64, strips }
    }
}

impl Rects {
    fn add(&mut self, piece: &Piece, site: Option<u32>) {
        if piece.blocks > 1 {
            let index = u32::try_from(self.size.len()).unwrap_or(u32::MAX);
            self.merged.push((index, piece.blocks, piece.free));
        }
        self.size.push(piece.size);
        self.kind.push(piece.kind.letter());
        self.event.push(piece.event.and_then(|event| i64::try_from(event).ok()).unwrap_or(-1));
        self.site.push(site.map_or(-1, i64::from));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cushion_core::{Engine, SimConfig, SimDriver};

    use super::*;

    /// Returns `count` blocks of 512 bytes, every other one free.
    fn comb(count: usize, stream: StreamId) -> Snapshot {
        let driver = Arc::new(SimDriver::new(SimConfig::with_capacity(1 << 40)));
        let engine = Engine::new(driver);
        let blocks: Vec<u64> = (0..count).map(|_| engine.alloc(100, stream).unwrap()).collect();
        for address in blocks.iter().step_by(2) {
            engine.free(*address).unwrap();
        }
        engine.snapshot()
    }

    fn drawn(map: &AddressMap) -> (u64, u64) {
        let Rects { size, kind, merged, .. } = &map.rects;
        let merged: BTreeMap<u32, u64> = merged.iter().map(|&(at, _, free)| (at, free)).collect();
        let free = (0..).zip(size.iter().zip(kind.chars())).map(|(at, (&size, kind))| {
            merged.get(&at).copied().unwrap_or(if kind == 'F' { size } else { 0 })
        });
        (size.iter().sum(), free.sum())
    }

    #[test]
    fn every_block_is_a_rectangle_if_there_is_room() {
        let snapshot = comb(100, StreamId(0));
        let made = Source { event: Some(3), kept: true };
        let map = draw(&snapshot, 7, 1000, |_| made, |event| u32::try_from(event).ok());
        assert_eq!((map.event, map.blocks, map.merged), (7, 101, 0), "and the rest of the segment");
        assert_eq!(map.rects.size.len(), 101);
        assert_eq!(map.live, 50 * 100);
        assert_eq!(map.rounding, 50 * 412);
        assert_eq!(map.live + map.rounding + map.pending + map.free, map.reserved);
        assert_eq!(drawn(&map), (map.reserved, map.free));
        assert_eq!(map.groups.len(), 1);
        assert_eq!(map.groups[0].label, "stream 0, small blocks");
        assert_eq!(map.largest_holes[0].size, map.reserved - 100 * 512);
        for (kind, event) in map.rects.kind.chars().zip(&map.rects.event) {
            assert_eq!(*event, if kind == 'K' { 3 } else { -1 });
        }
        assert_eq!(map.rects.site, map.rects.event);
    }

    #[test]
    fn a_large_map_is_bounded_and_loses_no_byte() {
        let snapshot = comb(50_000, StreamId(0));
        for most in [10_000, 100, 1] {
            let map = draw(&snapshot, 0, most, |_| Source::default(), |_| None);
            assert!(map.rects.size.len() <= most, "{}", map.rects.size.len());
            assert_eq!(map.rects.size.len() as u64 + map.merged, map.blocks);
            assert_eq!(drawn(&map), (map.reserved, map.free));
            let strips = map.groups.iter().flat_map(|group| &group.strips);
            let rects: u32 = strips.clone().map(|strip| strip.rects).sum();
            assert_eq!(rects as usize, map.rects.size.len());
            let segments: u32 = strips.map(|strip| strip.segments).sum();
            assert_eq!(u64::from(segments), map.groups[0].segments);
        }
    }

    #[test]
    fn neighbours_of_the_same_use_are_merged_first() {
        let driver = Arc::new(SimDriver::new(SimConfig::with_capacity(1 << 40)));
        let engine = Engine::new(driver);
        for _ in 0..100 {
            engine.alloc(512, StreamId(0)).unwrap();
        }
        let map = draw(&engine.snapshot(), 0, 20, |_| Source::default(), |_| None);
        assert!(!map.rects.kind.contains('M'), "{}", map.rects.kind);
        assert!(map.rects.size.len() <= 20);
    }

    #[test]
    fn many_streams_share_the_last_group() {
        let driver = Arc::new(SimDriver::new(SimConfig::with_capacity(1 << 40)));
        let engine = Engine::new(driver);
        for stream in 0..100 {
            engine.alloc(512, StreamId(stream)).unwrap();
        }
        let map = draw(&engine.snapshot(), 0, 1000, |_| Source::default(), |_| None);
        assert_eq!(map.groups.len(), MOST_GROUPS + 1);
        assert_eq!(map.groups[MOST_GROUPS].label, "76 smaller groups");
        assert_eq!(map.groups.iter().map(|group| group.size).sum::<u64>(), map.reserved);
    }
}
