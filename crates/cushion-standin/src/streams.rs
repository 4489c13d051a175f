//! Streams, events and captures.

use std::cell::RefCell;
use std::ffi::{c_int, c_uint};
use std::ptr::{null, null_mut, without_provenance_mut};

use cushion_core::Driver;
use cushion_core::driver::{EventId, NodeId};

use crate::out::Out;
use crate::world::{World, code_of, tagged};
use crate::{CAPTURE_IMPLICIT, INVALID_HANDLE, INVALID_VALUE, NOT_READY, driver_calls};

type Stream = *mut ();
type Event = *mut ();
type Node = *mut ();

/// Streams made here start at this number, far from the numbers that tests use.
const FIRST_STREAM: u64 = 0x57_0000;

thread_local! {
    /// The nodes that the last capture query returned; they stay until the next query.
    static NODES: RefCell<Vec<Node>> = const { RefCell::new(Vec::new()) };
}

fn pointer(handle: u64) -> *mut () {
    without_provenance_mut(usize::try_from(handle).unwrap_or(0))
}

fn event(world: &World, event: Event) -> Result<(usize, EventId), c_int> {
    let (device, number) = world.untag(event.addr() as u64)?;
    Ok((device, EventId(number)))
}

driver_calls! {
    fn cuStreamCreate(out: Out<Stream>, _flags: c_uint) |world| {
        let device = world.current()?;
        let made = world.streams.made.len() + world.streams.destroyed.len();
        let stream = FIRST_STREAM + 16 * made as u64;
        out.give(pointer(stream))?;
        world.streams.made.insert(stream, device);
        Ok(())
    }

    fn cuStreamDestroy_v2(stream: Stream) |world| {
        let (_, stream) = world.stream(stream)?;
        world.streams.made.remove(&stream.0).ok_or(INVALID_HANDLE)?;
        world.streams.destroyed.insert(stream.0);
        Ok(())
    }

    fn cuStreamSynchronize(stream: Stream) |world| {
        world.current_outside_capture()?;
        let (device, stream) = world.stream(stream)?;
        code_of(world.devices[device].sim.stream_synchronize(stream))
    }

    fn cuStreamGetCaptureInfo_v2(
        stream: Stream,
        status: Out<c_int>,
        id: Out<u64>,
        graph: Out<*mut ()>,
        nodes: Out<*const Node>,
        length: Out<usize>,
    ) |world| {
        const ACTIVE: c_int = 1;
        const INVALIDATED: c_int = 2;
        let (device, stream) = world.stream(stream)?;
        graph.give_if_asked(null_mut());
        match world.streams.odd_captures.get(&stream.0) {
            Some(&INVALIDATED) => return status.give(INVALIDATED),
            Some(_) => return Err(CAPTURE_IMPLICIT),
            None => {}
        }
        let Some(capture) = code_of(world.devices[device].sim.capture(stream))? else {
            return status.give(0);
        };
        status.give(ACTIVE)?;
        id.give_if_asked(tagged(device, capture.id));
        NODES.with_borrow_mut(|kept| {
            let terminals = capture.terminals.iter();
            *kept = terminals.map(|node| pointer(tagged(device, node.0))).collect();
            nodes.give_if_asked(if kept.is_empty() { null() } else { kept.as_ptr() });
            length.give_if_asked(kept.len());
        });
        Ok(())
    }

    fn cuGraphNodeGetDependencies(node: Node, nodes: Out<Node>, length: Out<usize>) |world| {
        let (device, node) = world.untag(node.addr() as u64)?;
        let follows = code_of(world.devices[device].sim.dependencies(NodeId(node)))?;
        let mut follows: Vec<Node> =
            follows.iter().map(|node| pointer(tagged(device, node.0))).collect();
        if !nodes.is_null() {
            follows.truncate(length.get()?);
            nodes.give_all(&follows)?;
        }
        length.give(follows.len())
    }

    fn cuEventCreate(out: Out<Event>, _flags: c_uint) |world| {
        let device = world.current()?;
        if out.is_null() {
            return Err(INVALID_VALUE);
        }
        let event = code_of(world.devices[device].sim.event_create())?;
        out.give(pointer(tagged(device, event.0)))
    }

    fn cuEventDestroy_v2(event: Event) |world| {
        let (device, event) = self::event(world, event)?;
        code_of(world.devices[device].sim.event_destroy(event))
    }

    fn cuEventRecord(event: Event, stream: Stream) |world| {
        let (device, event) = self::event(world, event)?;
        let (owner, stream) = world.stream(stream)?;
        if owner != device {
            return Err(INVALID_HANDLE);
        }
        code_of(world.devices[device].sim.event_record(event, stream))
    }

    fn cuEventQuery(event: Event) |world| {
        world.current_outside_capture()?;
        let (device, event) = self::event(world, event)?;
        match code_of(world.devices[device].sim.event_query(event))? {
            true => Ok(()),
            false => Err(NOT_READY),
        }
    }

    fn cuEventSynchronize(event: Event) |world| {
        world.current_outside_capture()?;
        let (device, event) = self::event(world, event)?;
        code_of(world.devices[device].sim.event_synchronize(event))
    }
}
