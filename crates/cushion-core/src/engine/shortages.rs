//! What a program can know and do about shortages: callbacks, receipts, injected failures.

use std::sync::Arc;

use super::Engine;
use crate::base::names::Tag;
use crate::driver::Driver;
use crate::options::inject::Injection;
use crate::outcome::receipt::Receipt;
use crate::shortage::callbacks::{Callback, CallbackId, Plea, Reply};
use crate::shortage::climb::Waited;

impl<D: Driver> Engine<D> {
    /// Calls `callback` when memory runs out, those of higher priority first. It may free, and even
    /// allocate; it is never called with a lock held, and never re-entered: what its thread asks for meanwhile, on
    /// whatever device, asks no callbacks and never waits.
    pub fn on_shortage<F: Fn(&Plea) + Send + Sync + 'static>(
        &self,
        priority: i32,
        callback: F,
    ) -> CallbackId {
        let name = std::any::type_name::<F>();
        self.add_callback(Arc::new(Callback::new(name, priority, move |plea| {
            callback(plea);
            Reply::Nothing
        })))
    }

    /// As [`on_shortage`](Self::on_shortage), for a callback with a name, or one that several engines ask: it is not
    /// called for two of them at once.
    pub fn add_callback(&self, callback: Arc<Callback>) -> CallbackId {
        self.desk.callbacks.add(callback)
    }

    /// Takes a callback away; false if it is gone already. One that runs now runs on.
    pub fn remove_callback(&self, callback: CallbackId) -> bool {
        self.desk.callbacks.remove(callback)
    }

    /// The latest shortages, oldest first.
    #[must_use]
    pub fn receipts(&self) -> Vec<Arc<Receipt>> {
        self.desk.receipts.read()
    }

    /// The receipt of this number, if it is still kept.
    #[must_use]
    pub fn receipt(&self, number: u64) -> Option<Arc<Receipt>> {
        self.desk.receipts.read().into_iter().find(|receipt| receipt.number == number)
    }

    /// Keeps so many receipts; 256 to begin with.
    pub fn keep_receipts(&self, count: usize) {
        self.desk.receipts.keep(count);
    }

    /// Calls `listener` with every receipt from now on, on the thread that was short of memory.
    pub fn on_receipt(&self, listener: impl Fn(&Receipt) + Send + Sync + 'static) {
        self.desk.receipts.listen(Arc::new(listener));
    }

    /// Asks `explainer` for the stacks that tags stand for, in order, whenever a receipt has such: on the thread that
    /// was short of memory, with no lock held.
    pub fn explain_tags(
        &self,
        explainer: impl Fn(&[Tag]) -> Vec<Vec<String>> + Send + Sync + 'static,
    ) {
        self.desk.receipts.explain_by(Arc::new(explainer));
    }

    /// Makes allocations fail from now on, to test how a program takes it; `None` ends that. Calls of the
    /// driver are made to fail by [`Injection::driver_faults`].
    pub fn inject(&self, injection: Option<Injection>) {
        let injection = injection.filter(Injection::fails_allocations);
        self.shared.lock().demand.inject(injection);
    }

    /// How many requests wait for memory now.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.shared.lock().demand.queue.len()
    }

    /// How long requests have waited so far, on all engines that share this.
    #[must_use]
    pub fn waited(&self) -> &Waited {
        &self.desk.waited
    }
}
