//! Shows buffers, streams, a refused request, and statistics.
//!
//! Runs on the first GPU, or on a simulated one if there is none: `cargo run --example buffers`.

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use cushion::{Device, Error};

fn main() -> Result<(), Error> {
    let gpu = Device::cuda(0).unwrap_or_else(|why| {
        println!("{why}\nusing a simulated GPU of 1 GiB instead\n");
        Device::simulated(1 << 30)
    });
    let memory = gpu.memory_info()?;
    let bytes = |number: u64| usize::try_from(number).expect("an address");
    let stream = gpu.new_stream()?;

    // Typed memory, freed when it is dropped.
    let host: Vec<f32> = (0..1000_u16).map(f32::from).collect();
    let a = gpu.alloc_copy(&host, &stream)?;
    let mut b = gpu.alloc_zeros::<f32>(1000, &stream)?;
    b.copy_from(&a, &stream)?;
    assert_eq!(b.to_vec(&stream)?, host);
    println!("copied 1,000 numbers there and back: {} bytes in use", gpu.memory_allocated());

    // Recorded for another stream: not handed out again before that stream is done with it.
    let side = gpu.new_stream()?;
    b.record_stream(&side)?;
    drop((a, b));

    // A request that is too large fails with the reason, and the program goes on.
    let most = gpu.alloc_uninit::<u8>(bytes(memory.free / 2), &stream)?;
    let refused =
        gpu.alloc_uninit::<u8>(bytes(memory.total), &stream).expect_err("more than the device has");
    assert!(refused.is_out_of_memory());
    println!("refused, as expected: {refused}");
    drop(most);
    let again = gpu.alloc_uninit::<u8>(bytes(memory.free / 2), &stream)?;
    println!("{} MiB fit after the other buffer is freed", again.size_bytes() >> 20);
    drop(again);

    let cache = gpu.cache_stats();
    println!(
        "{} allocations from the cache, {} from the device; {} bytes cached in {} blocks",
        cache.hits,
        cache.misses,
        gpu.cached_bytes(),
        gpu.free_block_count()
    );
    gpu.empty_cache()?;
    assert_eq!((gpu.memory_allocated(), gpu.memory_reserved()), (0, 0));
    println!("ok");
    Ok(())
}
