//! The options of the recorded run.

use cushion_core::{Options, Policy};

use crate::model::settings::Settings;

/// Returns the recorded options: those of the conf string, corrected by the settings in force.
pub(super) fn options_of(settings: &Settings, notes: &mut Vec<String>) -> Options {
    let mut options = Options::default();
    // PyTorch's default.
    options.ask_for(Policy::Segments);
    if let Some(conf) = &settings.conf
        && let Err(error) = options.apply(conf)
    {
        notes.push(format!("the recorded options are not all understood: {error}"));
    }
    if options.per_process_memory_fraction < 1.0 {
        notes.push(format!(
            "the run was limited to {} of its device, whose size is not recorded: --capacity sets \
             a limit",
            options.per_process_memory_fraction
        ));
    }
    if let Some(bytes) = settings.max_split_size {
        options.max_split_size = u64::try_from(bytes).ok();
    }
    if let Some(threshold) = settings.garbage_collection_threshold {
        options.garbage_collection_threshold = threshold;
    }
    match settings.expandable_segments {
        Some(true) => options.policy = Policy::Expandable,
        Some(false) if options.policy == Policy::Expandable => options.policy = Policy::Segments,
        _ => {}
    }
    if let Some(reuse) = settings.graph_capture_record_stream_reuse {
        options.graph_capture_record_stream_reuse = reuse;
    }
    for &(interval, divisions) in settings.roundup_power2_divisions.iter().flatten() {
        let index = interval.checked_ilog2().map_or(0, |index| index as usize);
        if let Some(slot) = options.roundup_power2_divisions.get_mut(index) {
            *slot = divisions;
        }
    }
    options
}
