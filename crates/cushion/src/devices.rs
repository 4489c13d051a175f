//! One engine per GPU of this process, made at first use.
//!
//! A device that nobody asks for costs nothing: no context is created on it. Settings for all
//! devices (options, history) apply to the existing engines and to those made later.
//!
//! CUDA does not survive a fork, and a thread that does not exist in the child may have held a
//! lock. After [`Devices::after_fork`] the child cannot reach any engine of its parent.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cushion_core::options::{Asked, NotOurs, OptionsError, Settings, SettingsError};
use cushion_core::{
    Action, Clock, Engine, EngineConfig, Injection, Ladder, LastingStreams, Options, StreamId,
    Waited,
};
use cushion_cuda::CudaError;

use crate::clock::SystemClock;
use crate::driver::DeviceDriver;
use crate::fork;
use crate::receipts::{open_receipts, stop_receipts, write_receipts};
use crate::shortage::inject;
use crate::trim;

/// The engine of a device, a GPU or a simulated one.
pub type DeviceEngine = Engine<DeviceDriver>;

/// The largest number of devices; PyTorch's limit is 120.
pub const MAX_DEVICES: usize = 128;

/// The engines of this process.
#[derive(Debug)]
pub struct Devices {
    engines: [OnceLock<DeviceEngine>; MAX_DEVICES],
    /// Set before the first engine is made.
    used: AtomicBool,
    abandoned: AtomicBool,
    plan: Mutex<Plan>,
}

/// What a new engine starts with.
#[derive(Debug)]
struct Plan {
    /// The options; read from the environment at first use if not set before.
    options: Option<Options>,
    history: HistoryPlan,
    clock: Option<Arc<dyn Clock>>,
    /// How long requests have waited, on all devices.
    waited: Option<Waited>,
    /// The capacity of each device, if devices are simulated.
    simulated: Option<u64>,
    /// The file that receipts are appended to.
    receipts: Option<PathBuf>,
    injection: Rules,
    /// Functions to call with every engine.
    for_each: Vec<ForEach>,
    /// Streams that are never destroyed.
    lasting: BTreeSet<StreamId>,
}

/// Rules for failures to inject, and where they come from.
#[derive(Debug)]
enum Rules {
    None,
    /// Settings without rules remove them.
    FromSettings(Injection),
    /// [`Devices::inject`] gave them. Settings without rules leave them in force.
    FromCaller(Injection),
}

impl Rules {
    fn from_settings(injection: Option<Injection>) -> Self {
        injection.map_or(Self::None, Self::FromSettings)
    }

    fn from_caller(injection: Option<Injection>) -> Self {
        injection.map_or(Self::None, Self::FromCaller)
    }

    fn get(&self) -> Option<&Injection> {
        match self {
            Self::None => None,
            Self::FromSettings(injection) | Self::FromCaller(injection) => Some(injection),
        }
    }

    fn into_inner(self) -> Option<Injection> {
        match self {
            Self::None => None,
            Self::FromSettings(injection) | Self::FromCaller(injection) => Some(injection),
        }
    }
}

/// A function to call with every engine.
struct ForEach(Box<dyn Fn(&DeviceEngine) + Send + Sync>);

impl fmt::Debug for ForEach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ForEach")
    }
}

/// What an engine's history records.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HistoryPlan {
    /// The number of events kept; zero for none.
    pub entries: usize,
    /// Actions that are not recorded.
    pub skip: Vec<Action>,
}

/// Why a device cannot be used.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The index is negative, or above the largest device index.
    #[error("no device {0}: Cushion serves devices 0 to {last}", last = MAX_DEVICES - 1)]
    OutOfRange(i64),
    /// This process is a child made by fork, and its parent used CUDA.
    #[error(
        "CUDA cannot be used in a process made by fork: start it with the method `spawn` or \
         `forkserver`"
    )]
    Forked,
    /// A call to CUDA failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// An option is not valid.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// An environment variable is not valid.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The file for receipts cannot be opened.
    #[error("receipts cannot be written to {}: {source}", path.display())]
    Receipts {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: Arc<io::Error>,
    },
    /// A device is in use, so it is too late to simulate devices.
    #[error("devices are in use already; simulate them before their first use")]
    InUse,
}

/// Returns the engines of this process.
pub fn devices() -> &'static Devices {
    static DEVICES: Devices = Devices::new();
    &DEVICES
}

impl Devices {
    const fn new() -> Self {
        let plan = Plan {
            options: None,
            history: HistoryPlan { entries: 0, skip: Vec::new() },
            clock: None,
            waited: None,
            simulated: None,
            receipts: None,
            injection: Rules::None,
            for_each: Vec::new(),
            lasting: BTreeSet::new(),
        };
        Self {
            engines: [const { OnceLock::new() }; MAX_DEVICES],
            used: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            plan: Mutex::new(plan),
        }
    }

    /// Returns the engine of a device, if it has been made.
    #[must_use]
    pub fn get(&self, device: i64) -> Option<&DeviceEngine> {
        if self.is_abandoned() {
            return None;
        }
        usize::try_from(device).ok().and_then(|device| self.engines.get(device))?.get()
    }

    /// Returns the engine of a device. The first call makes it, and creates the device's primary
    /// context.
    pub fn get_or_make(&self, device: i64) -> Result<&DeviceEngine, DeviceError> {
        match self.get(device) {
            Some(engine) => Ok(engine),
            None => self.make(device),
        }
    }

    #[cold]
    fn make(&self, device: i64) -> Result<&DeviceEngine, DeviceError> {
        let place = usize::try_from(device).ok().and_then(|device| self.engines.get(device));
        let (Some(place), Ok(index)) = (place, u32::try_from(device)) else {
            return Err(DeviceError::OutOfRange(device));
        };
        // The lock is held while the engine is made, so that two threads cannot both make one.
        let mut plan = self.plan().ok_or(DeviceError::Forked)?;
        if let Some(engine) = place.get() {
            return Ok(engine);
        }
        fork::watch();
        let options = plan.begin()?.clone();
        plan.simulated = plan.simulated.or(Settings::simulate_of(variable)?);
        self.used.store(true, Ordering::Relaxed);
        let driver = match plan.simulated {
            Some(capacity) => DeviceDriver::simulated(index, capacity),
            None => DeviceDriver::cuda(index)?,
        };
        let clock = plan.clock.get_or_insert_with(|| Arc::new(SystemClock::new()));
        let clock = Arc::clone(clock);
        let waited = plan.waited.get_or_insert_default().clone();
        let ladder = Ladder::Graceful;
        let seed = u64::from(std::process::id());
        let engine =
            Engine::with_config(driver, EngineConfig { options, ladder, clock, waited, seed });
        if plan.history.entries > 0 {
            engine.record_history(plan.history.entries);
            engine.skip_in_history(&plan.history.skip);
        }
        if let Some(path) = &plan.receipts {
            write_receipts(&engine, path)?;
        }
        if let Some(injection) = plan.injection.get() {
            inject(&engine, Some(injection));
        }
        for ForEach(act) in &plan.for_each {
            act(&engine);
        }
        engine.set_lasting_streams(LastingStreams::These(plan.lasting.clone()));
        if plan.simulated.is_none() {
            trim::begin();
        }
        Ok(place.get_or_init(|| engine))
    }

    /// Declares a stream that is never destroyed. Its free memory can serve other streams as soon
    /// as its work is done.
    pub fn add_lasting_stream(&self, stream: StreamId) {
        let Some(mut plan) = self.plan() else { return };
        if plan.lasting.insert(stream) {
            for (_, engine) in self.made() {
                engine.set_lasting_streams(LastingStreams::These(plan.lasting.clone()));
            }
        }
    }

    /// Simulates all devices from now on, each with `capacity` bytes, for tests and for machines
    /// without a GPU. Their addresses can be passed around but not dereferenced. Returns an error
    /// if a device is in use.
    pub fn simulate(&self, capacity: u64) -> Result<(), DeviceError> {
        let mut plan = self.plan().ok_or(DeviceError::Forked)?;
        if self.made().next().is_some() && plan.simulated != Some(capacity) {
            return Err(DeviceError::InUse);
        }
        plan.simulated = Some(capacity);
        Ok(())
    }

    /// Returns whether devices are simulated.
    #[must_use]
    pub fn are_simulated(&self) -> bool {
        self.plan().is_some_and(|plan| plan.simulated.is_some())
    }

    /// Returns the engines made so far, each with its device index.
    pub fn made(&self) -> impl Iterator<Item = (usize, &DeviceEngine)> {
        let abandoned = self.is_abandoned();
        let engines = self.engines.iter().enumerate().filter(move |_| !abandoned);
        engines.filter_map(|(device, engine)| Some((device, engine.get()?)))
    }

    /// Sets the options of every engine, the file for receipts, and the failures to inject.
    pub fn set(&self, settings: &Settings) -> Result<(), DeviceError> {
        let Some(mut plan) = self.plan() else { return Ok(()) };
        fork::watch();
        let receipts = settings.receipts.as_ref().map(PathBuf::from);
        if let Some(path) = &receipts {
            // Report a bad path here, and not at the first allocation.
            open_receipts(path)?;
        }
        let changes_injection = match (&plan.injection, &settings.inject) {
            (Rules::None | Rules::FromCaller(_), None) => false,
            (rules, inject) => rules.get() != inject.as_ref(),
        };
        for (_, engine) in self.made() {
            engine.set_options(settings.options.clone());
            match &receipts {
                Some(path) if plan.receipts != receipts => write_receipts(engine, path)?,
                Some(_) => {}
                None => stop_receipts(engine),
            }
            // Unchanged rules keep their counts.
            if changes_injection {
                inject(engine, settings.inject.as_ref());
            }
        }
        plan.options = Some(settings.options.clone());
        plan.receipts = receipts;
        if changes_injection {
            plan.injection = Rules::from_settings(settings.inject.clone());
        }
        Ok(())
    }

    /// Injects failures on every engine, existing and future; `None` stops it. Returns the rules
    /// that were in force.
    pub fn inject(&self, injection: Option<Injection>) -> Result<Option<Injection>, DeviceError> {
        let Some(mut plan) = self.plan() else { return Ok(None) };
        // Until now the rules of the environment were in force.
        plan.begin()?;
        for (_, engine) in self.made() {
            inject(engine, injection.as_ref());
        }
        Ok(std::mem::replace(&mut plan.injection, Rules::from_caller(injection)).into_inner())
    }

    /// Calls `act` with every existing engine now, and with every other engine when it is made.
    /// `act` must not ask for a device.
    pub fn for_each(&self, act: impl Fn(&DeviceEngine) + Send + Sync + 'static) {
        let Some(mut plan) = self.plan() else { return };
        for (_, engine) in self.made() {
            act(engine);
        }
        plan.for_each.push(ForEach(Box::new(act)));
    }

    /// Applies a conf string to every engine. Returns the pairs that are not options of Cushion.
    /// On an error nothing changes.
    pub fn configure(&self, conf: &str) -> Result<Vec<NotOurs>, DeviceError> {
        let Some(mut plan) = self.plan() else { return Ok(Vec::new()) };
        let mut options = plan.begin()?.clone();
        let not_ours = options.apply(conf)?;
        plan.options = Some(options);
        for (_, engine) in self.made() {
            engine.configure(conf)?;
        }
        Ok(not_ours)
    }

    /// Returns the options of engines made from now on.
    #[must_use]
    pub fn options(&self) -> Options {
        self.plan().and_then(|plan| plan.options.clone()).unwrap_or(Options::DEFAULT)
    }

    /// Records the history of every engine from now on. `clear` drops the events recorded so far.
    pub fn record_history(&self, history: &HistoryPlan, clear: bool) {
        let Some(mut plan) = self.plan() else { return };
        plan.history = history.clone();
        for (_, engine) in self.made() {
            if clear || history.entries == 0 {
                engine.record_history(history.entries);
            } else {
                engine.resize_history(history.entries);
            }
            engine.skip_in_history(&history.skip);
        }
    }

    /// Notes that this process is a child made by fork. If the parent used CUDA, no engine can be
    /// reached from now on. The function takes no lock that is held and allocates nothing, so that
    /// it is safe in a fork handler.
    pub fn after_fork(&self) {
        if self.used.load(Ordering::Relaxed) || self.plan.try_lock().is_err() {
            self.abandoned.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether this process is a child, made by fork, of a process that used CUDA.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Returns the plan, or `None` in a child made by fork, where a missing thread may hold the
    /// lock.
    fn plan(&self) -> Option<MutexGuard<'_, Plan>> {
        (!self.is_abandoned()).then(|| self.plan.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Plan {
    /// Returns the options of engines made from now on. If none are set, reads them from the
    /// environment.
    fn begin(&mut self) -> Result<&Options, SettingsError> {
        let options = match self.options.take() {
            Some(options) => options,
            None => {
                let settings = Settings::gather(&Asked::default(), variable)?;
                self.receipts = self.receipts.take().or(settings.receipts.map(PathBuf::from));
                if matches!(self.injection, Rules::None) {
                    self.injection = Rules::from_settings(settings.inject);
                }
                settings.options
            }
        };
        Ok(self.options.insert(options))
    }
}

#[expect(clippy::disallowed_methods, reason = "Rust programs get their options here")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

#[cfg(test)]
mod tests {
    use cushion_core::StreamId;

    use super::*;

    #[test]
    fn simulated_devices_serve_requests() {
        let devices = Devices::new();
        devices.simulate(1 << 30).unwrap();
        assert!(devices.are_simulated());
        devices.configure("paged:False").unwrap();
        let gpu = devices.get_or_make(1).unwrap();
        let address = gpu.alloc(3 << 20, StreamId(0)).unwrap();
        assert_eq!(gpu.stats().reserved_bytes.all.current, 20 << 20);
        let other = devices.get_or_make(127).unwrap();
        assert_ne!(
            other.alloc(3 << 20, StreamId(0)).unwrap(),
            address,
            "addresses of two devices differ"
        );
        assert!(gpu.holds(address) && !other.holds(address));
        gpu.free(address).unwrap();
        assert_eq!(devices.made().map(|(device, _)| device).collect::<Vec<_>>(), [1, 127]);
        assert!(devices.simulate(1 << 30).is_ok(), "nothing changes");
        assert!(matches!(devices.simulate(2 << 30), Err(DeviceError::InUse)));
    }

    #[test]
    fn settings_apply_to_devices_made_before_and_after() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("receipts.jsonl");
        let variable = |name: &str| match name {
            "CUSHION_RECEIPTS" => path.to_str().map(str::to_owned),
            "CUSHION_INJECT" => Some("nth=1".to_owned()),
            _ => None,
        };
        let devices = Devices::new();
        devices.simulate(1 << 30).unwrap();
        let before = devices.get_or_make(0).unwrap();
        let settings = Settings::gather(&Asked::default(), variable).unwrap();
        devices.set(&settings).unwrap();
        let after = devices.get_or_make(1).unwrap();
        for gpu in [before, after] {
            assert!(gpu.alloc(1 << 20, StreamId(0)).is_err());
            assert!(gpu.alloc(1 << 20, StreamId(0)).is_ok());
        }
        let lines = || std::fs::read_to_string(&path).unwrap().lines().count();
        assert_eq!(lines(), 2);
        // Setting the same rules again keeps their counts, and receipts are not written twice.
        devices.set(&settings).unwrap();
        assert!(before.alloc(1 << 20, StreamId(0)).is_ok());
        assert!(before.alloc(2 << 30, StreamId(0)).is_err());
        assert_eq!(lines(), 3);
        // Settings without rules and receipts stop both.
        let none = Settings::gather(&Asked::default(), |_| None).unwrap();
        devices.set(&none).unwrap();
        assert!(before.alloc(2 << 30, StreamId(0)).is_err());
        assert_eq!(lines(), 3);
        let nowhere = Settings { receipts: Some("/nowhere/at/all".to_owned()), ..none };
        let error = devices.set(&nowhere).unwrap_err().to_string();
        assert!(error.starts_with("receipts cannot be written to /nowhere/at/all: "), "{error}");
    }

    #[test]
    fn for_each_visits_every_device_once() {
        use std::sync::atomic::AtomicU32;

        static SEEN: AtomicU32 = AtomicU32::new(0);
        let devices = Devices::new();
        devices.simulate(1 << 30).unwrap();
        devices.get_or_make(0).unwrap();
        devices.for_each(|engine| {
            use cushion_core::Driver as _;
            SEEN.fetch_add(1 << (8 * engine.driver().properties().device), Ordering::Relaxed);
        });
        devices.get_or_make(2).unwrap();
        devices.get_or_make(2).unwrap();
        assert_eq!(SEEN.load(Ordering::Relaxed), 0x1_0001);
    }
}
