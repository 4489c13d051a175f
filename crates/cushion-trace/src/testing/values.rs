//! Strategies for events and snapshots.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use crate::model::event::{Action, Event};
use crate::model::settings::Settings;
use crate::model::snapshot::{Block, BlockState, Origin, Segment, Snapshot};
use crate::model::stacks::{Frame, StackId, StackTable, Stacks};

/// Generates events of every kind, with fields that are often equal to those of the event before.
pub(crate) fn any_event() -> impl Strategy<Value = Event> {
    let address = prop_oneof![
        Just(0_u64),
        (0..1_u64 << 30).prop_map(|n| 0x7f00_0000_0000 + n * 512),
        any::<u64>()
    ];
    let size = prop_oneof![Just(512_u64), 0..1_u64 << 40, any::<u64>()];
    let few = prop_oneof![Just(0_u64), 0..4_u64, any::<u64>()];
    let pool = prop_oneof![Just(None), Just(Some((0, 0))), any::<Option<(u64, u64)>>()];
    let stack = prop_oneof![Just(0_u32), 0..5_u32, any::<u32>()].prop_map(StackId::of_number);
    (0..11_u8, address, size, few.clone(), few, pool, stack).prop_map(
        |(code, addr, size, stream, time_us, pool, stack)| Event {
            action: Action::of_code(code).unwrap(),
            addr,
            size,
            stream,
            time_us,
            pool,
            stack,
        },
    )
}

/// Generates usual and unusual texts.
fn any_text() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z_./]{0,12}", "\\PC{0,8}", any::<String>()]
}

fn any_stacks() -> impl Strategy<Value = Stacks> {
    let frames = vec((any_text(), any_text(), any::<u32>()), 1..6);
    let stacks = vec(vec(0..6_usize, 1..5), 0..6);
    (frames, stacks).prop_map(|(frames, stacks)| {
        let mut table = StackTable::default();
        for stack in stacks {
            let mut caller = None;
            for place in stack {
                let (name, filename, line) = &frames[place % frames.len()];
                let (name, filename) = (name.as_str().into(), filename.as_str().into());
                let frame = table.intern(Frame { name, filename, line: *line }).unwrap();
                caller = table.link(caller, frame);
            }
        }
        table.finish()
    })
}

fn any_segment() -> impl Strategy<Value = Segment> {
    let size = prop_oneof![Just(512_u64), 0..1_u64 << 40, any::<u64>()];
    let state = prop::sample::select(vec![
        BlockState::Allocated,
        BlockState::PendingFree,
        BlockState::Inactive,
    ]);
    let stack = || (0..9_u32).prop_map(StackId::of_number);
    let blocks = vec((size.clone(), size.clone(), option::of(any::<u64>()), state, stack()), 0..5);
    let pool = prop_oneof![Just((0, 0)), any::<(u64, u64)>()];
    (any::<(u32, u64, u64, bool, bool)>(), size, pool, stack(), blocks).prop_map(
        |((device, address, stream, large, expandable), total_size, pool, stack, blocks)| {
            let mut next = address;
            let blocks = blocks.into_iter().map(|(size, requested_size, jump, state, stack)| {
                let address = jump.unwrap_or(next);
                next = address.wrapping_add(size);
                Block { address, size, requested_size, state, stack }
            });
            let blocks = blocks.collect();
            Segment { device, address, total_size, stream, large, pool, expandable, stack, blocks }
        },
    )
}

fn any_settings() -> impl Strategy<Value = Settings> {
    let divisions = prop::collection::btree_map(1..10_u64, any::<u64>(), 0..4);
    (
        option::of(any_text()),
        option::of((0..2048_u16).prop_map(|n| f64::from(n) / 1024.0)),
        option::of(divisions.prop_map(|divisions| divisions.into_iter().collect())),
        any::<[Option<i64>; 4]>(),
        any::<[Option<bool>; 4]>(),
    )
        .prop_map(|(conf, threshold, divisions, ints, flags)| Settings {
            conf,
            garbage_collection_threshold: threshold,
            roundup_power2_divisions: divisions,
            max_split_size: ints[0],
            pinned_num_register_threads: ints[1],
            max_round_threshold: ints[2],
            max_cached_size: ints[3],
            expandable_segments: flags[0],
            graph_capture_record_stream_reuse: flags[1],
            release_lock_on_cudamalloc: flags[2],
            pinned_use_cuda_host_register: flags[3],
        })
}

/// Generates any snapshot that a reader can make.
pub(crate) fn any_snapshot() -> impl Strategy<Value = Snapshot> {
    let devices = vec(vec(any_event(), 0..40), 0..3);
    let origin = prop::sample::select(vec![Origin::Torch, Origin::Rmm]);
    (any_stacks(), vec(any_segment(), 0..4), devices, any_settings(), origin).prop_map(
        |(stacks, mut segments, devices, settings, origin)| {
            let known = u32::try_from(stacks.counts().1).unwrap();
            let fit = |stack: &mut Option<StackId>| {
                *stack = stack.filter(|stack| stack.number() <= known);
            };
            for segment in &mut segments {
                fit(&mut segment.stack);
                segment.blocks.iter_mut().for_each(|block| fit(&mut block.stack));
            }
            let devices = devices.into_iter().map(|events| {
                events
                    .into_iter()
                    .map(|mut event: Event| {
                        fit(&mut event.stack);
                        event
                    })
                    .collect()
            });
            Snapshot { devices: devices.collect(), segments, settings, stacks, origin }
        },
    )
}
