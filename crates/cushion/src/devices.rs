//! One engine per GPU of this process, made at first use.
//!
//! A device that nobody asked for costs nothing: no context is made on it. What is set for all devices
//! (options, history) reaches the engines there are and those made later.
//!
//! CUDA does not survive a fork, and a lock may have been held by a thread that does not exist in the child: after
//! [`Devices::after_fork`] no engine of the parent's can be reached in it.

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

/// The most devices that are served; PyTorch knows 120.
pub const MAX_DEVICES: usize = 128;

/// The engines of this process.
#[derive(Debug)]
pub struct Devices {
    engines: [OnceLock<DeviceEngine>; MAX_DEVICES],
    /// Whether an engine was made, or begun to be made.
    used: AtomicBool,
    abandoned: AtomicBool,
    plan: Mutex<Plan>,
}

/// What an engine that is made later begins with.
#[derive(Debug)]
struct Plan {
    /// Those of the environment, if nobody says.
    options: Option<Options>,
    history: HistoryPlan,
    clock: Option<Arc<dyn Clock>>,
    /// How long requests have waited, on all devices.
    waited: Option<Waited>,
    /// Devices are simulated, with this capacity each.
    simulated: Option<u64>,
    /// Where receipts go.
    receipts: Option<PathBuf>,
    /// Failures that are made up, and whether the settings say so.
    injection: Option<Injection>,
    injection_is_set: bool,
    /// What is done with every engine.
    for_each: Vec<ForEach>,
    /// Streams that are never destroyed.
    lasting: BTreeSet<StreamId>,
}

/// Something that is done with every engine.
struct ForEach(Box<dyn Fn(&DeviceEngine) + Send + Sync>);

impl fmt::Debug for ForEach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ForEach")
    }
}

/// What is kept of what happens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HistoryPlan {
    /// How many events; zero for none.
    pub entries: usize,
    /// Actions that are left out.
    pub skip: Vec<Action>,
}

/// Why a device cannot be used.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// No process has so many devices.
    #[error("no device {0}: Cushion serves devices 0 to {last}", last = MAX_DEVICES - 1)]
    OutOfRange(i64),
    /// This process is a child made by fork.
    #[error(
        "CUDA cannot be used in a process made by fork: start it with the method `spawn` or \
         `forkserver`"
    )]
    Forked,
    /// The driver would not have it.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// An option is no good.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// A variable of the environment is no good.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The file for receipts cannot be opened.
    #[error("receipts cannot be written to {}: {source}", path.display())]
    Receipts {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: Arc<io::Error>,
    },
    /// Too late to simulate devices.
    #[error("devices are in use already, and can be simulated only before that")]
    InUse,
}

/// The engines of this process.
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
            injection: None,
            injection_is_set: false,
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

    /// The engine of a device, if there is one yet.
    #[must_use]
    pub fn get(&self, device: i64) -> Option<&DeviceEngine> {
        if self.is_abandoned() {
            return None;
        }
        usize::try_from(device).ok().and_then(|device| self.engines.get(device))?.get()
    }

    /// The engine of a device; the first call makes it, and the device's primary context.
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
        // Held while the engine is made, so that two threads do not make two.
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
        if let Some(injection) = &plan.injection {
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

    /// A stream that is never destroyed: free memory of it can serve other streams as soon as its work is done.
    pub fn add_lasting_stream(&self, stream: StreamId) {
        let Some(mut plan) = self.plan() else { return };
        if plan.lasting.insert(stream) {
            for (_, engine) in self.made() {
                engine.set_lasting_streams(LastingStreams::These(plan.lasting.clone()));
            }
        }
    }

    /// Devices are simulated from now on, each with `capacity` bytes: for tests, and for trying things out where
    /// there is no GPU. Their addresses can be handed around, and not followed. An error if a device is in use.
    pub fn simulate(&self, capacity: u64) -> Result<(), DeviceError> {
        let mut plan = self.plan().ok_or(DeviceError::Forked)?;
        if self.made().next().is_some() && plan.simulated != Some(capacity) {
            return Err(DeviceError::InUse);
        }
        plan.simulated = Some(capacity);
        Ok(())
    }

    /// Whether devices are simulated.
    #[must_use]
    pub fn are_simulated(&self) -> bool {
        self.plan().is_some_and(|plan| plan.simulated.is_some())
    }

    /// The engines there are, each with its device.
    pub fn made(&self) -> impl Iterator<Item = (usize, &DeviceEngine)> {
        let abandoned = self.is_abandoned();
        let engines = self.engines.iter().enumerate().filter(move |_| !abandoned);
        engines.filter_map(|(device, engine)| Some((device, engine.get()?)))
    }

    /// Sets the options of every engine, where its receipts go, and which failures are made up.
    pub fn set(&self, settings: &Settings) -> Result<(), DeviceError> {
        let Some(mut plan) = self.plan() else { return Ok(()) };
        fork::watch();
        let receipts = settings.receipts.as_ref().map(PathBuf::from);
        if let Some(path) = &receipts {
            // Here, rather than at the first allocation.
            open_receipts(path)?;
        }
        // What was asked for by name stays, if the settings say nothing.
        let changes_injection = plan.injection != settings.inject
            && (settings.inject.is_some() || plan.injection_is_set);
        for (_, engine) in self.made() {
            engine.set_options(settings.options.clone());
            match &receipts {
                Some(path) if plan.receipts != receipts => write_receipts(engine, path)?,
                Some(_) => {}
                None => stop_receipts(engine),
            }
            // Rules that stay the same go on counting.
            if changes_injection {
                inject(engine, settings.inject.as_ref());
            }
        }
        plan.options = Some(settings.options.clone());
        plan.receipts = receipts;
        if changes_injection {
            plan.injection.clone_from(&settings.inject);
            plan.injection_is_set = settings.inject.is_some();
        }
        Ok(())
    }

    /// Makes failures up on every engine, there is or will be; `None` ends it. Returns what was in force.
    pub fn inject(&self, injection: Option<Injection>) -> Result<Option<Injection>, DeviceError> {
        let Some(mut plan) = self.plan() else { return Ok(None) };
        // What the environment says is in force until now.
        plan.begin()?;
        for (_, engine) in self.made() {
            inject(engine, injection.as_ref());
        }
        plan.injection_is_set = false;
        Ok(std::mem::replace(&mut plan.injection, injection))
    }

    /// Does something with every engine: with those there are now, and with others when they are made. It must not ask
    /// for a device.
    pub fn for_each(&self, act: impl Fn(&DeviceEngine) + Send + Sync + 'static) {
        let Some(mut plan) = self.plan() else { return };
        for (_, engine) in self.made() {
            act(engine);
        }
        plan.for_each.push(ForEach(Box::new(act)));
    }

    /// Applies a conf string to every engine; on an error nothing changes. Returns the pairs that are
    /// not ours.
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

    /// The options of engines made from now on.
    #[must_use]
    pub fn options(&self) -> Options {
        self.plan().and_then(|plan| plan.options.clone()).unwrap_or(Options::DEFAULT)
    }

    /// Keeps what happens on every engine from now on: after what was kept so far, or from nothing.
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

    /// This is a child made by fork: unless nothing was used yet, no engine can be reached from now on. Takes no
    /// lock that is held and allocates nothing, so that it may be called where little else may.
    pub fn after_fork(&self) {
        if self.used.load(Ordering::Relaxed) || self.plan.try_lock().is_err() {
            self.abandoned.store(true, Ordering::Relaxed);
        }
    }

    /// Whether this is a child, made by fork, of a process that used CUDA.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// The plan; none in a child made by fork, where a thread that is gone may hold its lock.
    fn plan(&self) -> Option<MutexGuard<'_, Plan>> {
        (!self.is_abandoned()).then(|| self.plan.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Plan {
    /// The options of engines made from now on. Where nobody has set any, they are those of the environment.
    fn begin(&mut self) -> Result<&Options, SettingsError> {
        let options = match self.options.take() {
            Some(options) => options,
            None => {
                let settings = Settings::gather(&Asked::default(), variable)?;
                self.receipts = self.receipts.take().or(settings.receipts.map(PathBuf::from));
                if self.injection.is_none() {
                    self.injection_is_set = settings.inject.is_some();
                    self.injection = settings.inject;
                }
                settings.options
            }
        };
        Ok(self.options.insert(options))
    }
}

#[expect(clippy::disallowed_methods, reason = "this is where Rust programs get their options from")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

#[cfg(test)]
mod tests {
    use cushion_core::StreamId;

    use super::*;

    #[test]
    fn simulated_devices_serve_as_others_do() {
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
            "an address tells its device"
        );
        assert!(gpu.holds(address) && !other.holds(address));
        gpu.free(address).unwrap();
        assert_eq!(devices.made().map(|(device, _)| device).collect::<Vec<_>>(), [1, 127]);
        assert!(devices.simulate(1 << 30).is_ok(), "nothing changes");
        assert!(matches!(devices.simulate(2 << 30), Err(DeviceError::InUse)));
    }

    #[test]
    fn settings_reach_devices_made_before_and_after() {
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
        // Given again, rules that stay the same go on counting, and receipts are not written twice.
        devices.set(&settings).unwrap();
        assert!(before.alloc(1 << 20, StreamId(0)).is_ok());
        assert!(before.alloc(2 << 30, StreamId(0)).is_err());
        assert_eq!(lines(), 3);
        // Without them, neither is done any more.
        let none = Settings::gather(&Asked::default(), |_| None).unwrap();
        devices.set(&none).unwrap();
        assert!(before.alloc(2 << 30, StreamId(0)).is_err());
        assert_eq!(lines(), 3);
        let nowhere = Settings { receipts: Some("/nowhere/at/all".to_owned()), ..none };
        let error = devices.set(&nowhere).unwrap_err().to_string();
        assert!(error.starts_with("receipts cannot be written to /nowhere/at/all: "), "{error}");
    }

    #[test]
    fn what_is_done_with_every_device_is_done_once_with_each() {
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
