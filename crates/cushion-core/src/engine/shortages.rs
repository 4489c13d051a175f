//! The program's view of shortages: callbacks, receipts, injected failures.

use std::sync::Arc;

use super::Engine;
use crate::base::names::Tag;
use crate::driver::Driver;
use crate::options::inject::Injection;
use crate::outcome::receipt::Receipt;
use crate::shortage::callbacks::{Callback, CallbackId, Plea, Reply};
use crate::shortage::climb::Waited;

impl<D: Driver> Engine<D> {
    /// Adds a callback that is called when memory runs out, highest priority first. It may free,
    /// and even allocate. It is called with no lock held, and never re-entered: requests that its
    /// thread makes meanwhile, on any device, call no callbacks and never wait.
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

    /// Like [`on_shortage`](Self::on_shortage), for a callback with a name, or one that several
    /// engines share. It is not called for two of them at once.
    pub fn add_callback(&self, callback: Arc<Callback>) -> CallbackId {
        self.desk.callbacks.add(callback)
    }

    /// Removes a callback; returns false if it was removed before. A call that is running goes on.
    pub fn remove_callback(&self, callback: CallbackId) -> bool {
        self.desk.callbacks.remove(callback)
    }

    /// Returns the receipts of the latest shortages, oldest first.
    #[must_use]
    pub fn receipts(&self) -> Vec<Arc<Receipt>> {
        self.desk.receipts.read()
    }

    /// Returns the receipt with this number, if it is still kept.
    #[must_use]
    pub fn receipt(&self, number: u64) -> Option<Arc<Receipt>> {
        self.desk.receipts.read().into_iter().find(|receipt| receipt.number == number)
    }

    /// Sets how many receipts are kept. The default is 256.
    pub fn keep_receipts(&self, count: usize) {
        self.desk.receipts.keep(count);
    }

    /// Calls `listener` with every receipt from now on, on the thread that was short of memory.
    pub fn on_receipt(&self, listener: impl Fn(&Receipt) + Send + Sync + 'static) {
        self.desk.receipts.listen(Arc::new(listener));
    }

    /// Sets the function that returns the stack of each tag, in order. It is called for each
    /// receipt with tags, on the thread that was short of memory, with no lock held.
    pub fn explain_tags(
        &self,
        explainer: impl Fn(&[Tag]) -> Vec<Vec<String>> + Send + Sync + 'static,
    ) {
        self.desk.receipts.explain_by(Arc::new(explainer));
    }

    /// Makes allocations fail from now on, to test how a program handles it; `None` stops that.
    /// [`Injection::driver_faults`] makes calls of the driver fail.
    pub fn inject(&self, injection: Option<Injection>) {
        let injection = injection.filter(Injection::fails_allocations);
        self.shared.lock().demand.inject(injection);
    }

    /// Returns how many requests wait for memory now.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.shared.lock().demand.queue.len()
    }

    /// Returns how long requests have waited so far, on all engines that share this value.
    #[must_use]
    pub fn waited(&self) -> &Waited {
        &self.desk.waited
    }
}
