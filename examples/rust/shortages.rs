//! Shows what a program can do about a shortage: callbacks, waits, futures, host memory, receipts.
//!
//! Needs no GPU: `cargo run --example shortages`.

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use cushion::{Device, Error, Outcome, Rung};

const MIB: usize = 1 << 20;

fn main() -> Result<(), Error> {
    // A simulated GPU of 1 GiB, and 256 MiB of host memory for the last rung.
    let gpu = Device::builder().conf("spill_limit_mb:256,wait_ms:5000")?.simulated(1 << 30);
    let stream = gpu.new_stream()?;
    let receipts = std::env::temp_dir().join(format!("shortages-{}.jsonl", std::process::id()));
    gpu.write_receipts(&receipts)?;

    // A callback frees memory that the program can compute again.
    let cache = Arc::new(Mutex::new(Some(gpu.alloc_zeros::<u8>(600 * MIB, &stream)?)));
    let held = Arc::clone(&cache);
    let callback = gpu.on_shortage(0, move |plea| {
        println!("{} MiB would help: dropping the cache", plea.bytes >> 20);
        held.lock().expect("no thread panicked").take();
    });
    drop(gpu.alloc_zeros::<u8>(800 * MIB, &stream)?);
    gpu.remove_callback(callback);

    // A request waits for memory of another thread. A future waits without blocking a thread.
    let both = Barrier::new(2);
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            let batch = gpu.alloc_zeros::<u8>(800 * MIB, &gpu.default_stream());
            both.wait();
            batch.map(drop)
        });
        both.wait();
        let waited = gpu.alloc_zeros::<u8>(700 * MIB, &stream).map(drop);
        other.join().expect("no panic").and(waited)
    })?;
    let buffer = block_on(gpu.alloc_zeros_async::<f32>(200 * MIB, &stream))?;

    // No other thread holds memory: host memory serves the request, more slowly.
    let spilled = gpu.alloc_zeros::<u8>(240 * MIB, &stream)?;
    gpu.alloc_zeros::<u8>(500 * MIB, &stream).expect_err("more than there is");
    drop((buffer, spilled));

    for receipt in gpu.receipts() {
        println!("{receipt}");
        if !receipt.outcome.is_survived() {
            receipt.shortage.remedies().iter().for_each(|remedy| println!("    {remedy}"));
        }
    }
    let survived = |rung| {
        let outcome = Outcome::Survived(rung);
        gpu.receipts().iter().any(|receipt| receipt.outcome == outcome)
    };
    assert!(survived(Rung::Callbacks) && survived(Rung::Spill));
    let lines = std::fs::read_to_string(&receipts).map_or(0, |text| text.lines().count());
    assert_eq!(lines, gpu.receipts().len());
    let _ = std::fs::remove_file(&receipts);
    let stats = gpu.stats();
    println!("{} shortages, {} survived", stats.shortages, stats.shortages_survived);
    println!("ok");
    Ok(())
}

/// Runs a future to its end. Any other runtime works as well.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unparks(Thread);
    impl Wake for Unparks {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unparks(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}
