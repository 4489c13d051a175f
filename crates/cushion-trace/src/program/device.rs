//! The size of the recorded device.

use super::UNLIMITED;
use super::holdings::Holdings;
use crate::model::event::Action;
use crate::model::events::Events;

/// Infers the size of the device from the distance between reserved ranges: PyTorch makes each of
/// them 9/8 of the device.
pub(super) fn device_total(events: &Events, start: &Holdings) -> Option<u64> {
    // Ranges of small and large pools differ by less than a page, and a range can reuse the
    // addresses of an earlier one: starts closer together than this belong to different times.
    let apart = cushion_core::size::GIB;
    let mut holdings = start.clone();
    let between: Vec<u64> = start.paged_starts().collect();
    let apart_from = |start: u64| holdings.gaps(start).filter(|&gap| gap > apart).min();
    let mut nearest: Option<u64> = between.into_iter().filter_map(apart_from).min();
    for event in events {
        let before = holdings.count();
        holdings.take(&event);
        if holdings.count() > before && event.action == Action::SegmentMap {
            let gaps = holdings.gaps(event.addr);
            nearest = gaps.filter(|&gap| gap > apart).chain(nearest).min();
        }
    }
    // No device is larger: the events are not those of PyTorch.
    Some((nearest? - apart / 4) / 9 * 8).filter(|&total| total <= UNLIMITED)
}
