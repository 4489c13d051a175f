//! The settings of this process: given whole when Cushion is installed, and changed in part later.
//!
//! A change leaves what it does not name as it is in force, however it came to be: by the first `install()`, by
//! PyTorch's `_set_allocator_settings`, by `cushion.inject()`. The engines tell their options, and nothing else; so the
//! file for receipts and the rules for failures that settings have set are noted here.

use std::path::absolute;
use std::sync::{Mutex, MutexGuard};

use cushion::core::options::{Asked, NotOurs, Settings};
use cushion::core::{Injection, Policy};
use cushion::{DeviceError, devices};

use crate::lock;

struct InForce {
    receipts: Option<String>,
    /// Rules that settings have set; none if `cushion.inject()` came later. Given to the engines again, either
    /// leaves them as they are.
    inject: Option<Injection>,
}

/// Held while settings change, so that no other change comes between the reading and the setting.
static IN_FORCE: Mutex<InForce> = Mutex::new(InForce { receipts: None, inject: None });

/// Holds the settings, while this process forks.
pub(crate) fn hold() -> MutexGuard<'static, impl Sized> {
    lock(&IN_FORCE)
}

/// Makes `settings` those of every device.
pub(crate) fn start(settings: &Settings) -> Result<(), DeviceError> {
    set(&mut lock(&IN_FORCE), settings.clone()).map(drop)
}

/// Changes what is asked for, on every device; the rest stays as it is. Returns the settings in force.
pub(crate) fn change(asked: &Asked) -> Result<Settings, DeviceError> {
    let mut in_force = lock(&IN_FORCE);
    let options = devices().options();
    // What is in force takes the place of the environment: what is asked for wins over it in the same way.
    let before = |name: &str| match name {
        "CUSHION_CONF" => Some(options.to_conf()),
        "CUSHION_POLICY" => Some(Policy::of(&options).name().to_owned()),
        _ => None,
    };
    let mut settings = Settings::gather(asked, before)?;
    if asked.receipts.is_none() {
        settings.receipts.clone_from(&in_force.receipts);
    }
    if asked.inject.is_none() {
        settings.inject.clone_from(&in_force.inject);
    }
    let Asked { policy, conf, log: _, receipts, inject } = asked;
    // Not even the file for receipts is touched for nothing.
    let changes = [policy, conf, receipts, inject].into_iter().any(Option::is_some);
    if changes { set(&mut in_force, settings) } else { Ok(settings) }
}

fn set(in_force: &mut InForce, mut settings: Settings) -> Result<Settings, DeviceError> {
    // The program may change its folder: devices that are made later write to the same file.
    if let Some(path) = &mut settings.receipts
        && let Some(whole) =
            absolute(&*path).ok().and_then(|whole| whole.into_os_string().into_string().ok())
    {
        *path = whole;
    }
    devices().set(&settings)?;
    in_force.receipts.clone_from(&settings.receipts);
    in_force.inject.clone_from(&settings.inject);
    Ok(settings)
}

/// Applies a conf string to every device; returns the pairs that are PyTorch's alone.
pub(crate) fn configure(conf: &str) -> Result<Vec<NotOurs>, DeviceError> {
    let _in_force = lock(&IN_FORCE);
    devices().configure(conf)
}

/// Allocations are made to fail by these rules from now on, on every device. Returns those before.
pub(crate) fn inject(rules: Option<Injection>) -> Result<Option<Injection>, DeviceError> {
    let mut in_force = lock(&IN_FORCE);
    let before = devices().inject(rules)?;
    in_force.inject = None;
    Ok(before)
}
