//! Buffers, streams and statistics on the simulated device.

#[cfg(test)]
mod tests {
    use std::thread;

    use cushion::core::AllocError;
    use cushion::{AsStream, Buffer, CacheStats, Device, Error, Policy};

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn gpu() -> Device {
        Device::simulated(GIB)
    }

    #[test]
    fn alloc_zeros_clears_reused_memory() {
        let gpu = gpu();
        let stream = gpu.new_stream().unwrap();
        let before = gpu.alloc_copy(&[7_u8; 5000], &stream).unwrap();
        let address = before.address();
        drop(before);
        let zeros = gpu.alloc_zeros::<u8>(5000, &stream).unwrap();
        assert_eq!(zeros.address(), address, "the memory is used again");
        assert_eq!(zeros.to_vec(&stream).unwrap(), [0; 5000]);
    }

    #[test]
    fn copies_round_trip() {
        let gpu = gpu();
        let stream = gpu.default_stream();
        let host: Vec<f64> = (0..10_000).map(f64::from).collect();
        let mut a = gpu.alloc_copy(&host, &stream).unwrap();
        let mut b = gpu.alloc_uninit::<f64>(host.len(), &stream).unwrap();
        b.copy_from(&a, &stream).unwrap();
        a.fill_zero(&stream).unwrap();
        assert_eq!(b.to_vec(&stream).unwrap(), host);
        assert_eq!(a.to_vec(&stream).unwrap(), vec![0.0; host.len()]);
        a.copy_from_host(&host, &stream).unwrap();
        let mut back = vec![0.0; host.len()];
        a.copy_to_host(&mut back, &stream).unwrap();
        assert_eq!(back, host);
    }

    #[test]
    fn copies_between_different_lengths_are_refused() {
        let gpu = gpu();
        let stream = gpu.default_stream();
        let mut three = gpu.alloc_zeros::<u32>(3, &stream).unwrap();
        let four = gpu.alloc_zeros::<u32>(4, &stream).unwrap();
        for failed in [
            three.copy_from_host(&[1, 2], &stream),
            three.copy_to_host(&mut [0; 4], &stream),
            three.copy_from(&four, &stream),
        ] {
            assert!(matches!(failed, Err(Error::Lengths { one: 3, .. })), "{failed:?}");
        }
        let most = gpu.alloc_zeros::<u64>(usize::MAX / 4, &stream);
        assert!(matches!(most, Err(Error::TooLong { .. })), "{most:?}");
    }

    #[test]
    fn streams_and_buffers_of_another_device_are_refused() {
        let (gpu, other) = (gpu(), gpu());
        let (here, there) = (gpu.new_stream().unwrap(), other.new_stream().unwrap());
        let mut buffer = gpu.alloc_zeros::<u32>(3, &here).unwrap();
        let elsewhere = other.alloc_zeros::<u32>(3, &there).unwrap();
        for failed in [
            buffer.copy_from(&elsewhere, &here),
            buffer.fill_zero(&there),
            buffer.copy_from_host(&[1, 2, 3], &there),
            buffer.copy_to_host(&mut [0; 3], &there),
            buffer.record_stream(&there),
            gpu.alloc_zeros::<u32>(3, &there).map(drop),
            gpu.alloc_uninit::<u32>(0, &there).map(drop),
            gpu.alloc_copy(&[1], &there).map(drop),
        ] {
            assert!(matches!(failed, Err(Error::OtherDevice)), "{failed:?}");
        }
        assert_eq!(buffer.to_vec(&here).unwrap(), [0; 3]);
        assert_eq!(gpu.memory_allocated(), 512);
    }

    #[test]
    fn a_dropped_stream_is_reused() {
        let gpu = gpu();
        let stream = gpu.new_stream().unwrap();
        let (id, buffer) = (stream.stream_id(), gpu.alloc_zeros::<u8>(9, &stream).unwrap());
        drop(stream);
        drop(buffer);
        let again = gpu.new_stream().unwrap();
        assert_eq!(again.stream_id(), id);
        assert_ne!(gpu.new_stream().unwrap().stream_id(), id);
    }

    #[test]
    fn empty_buffers_allocate_nothing() {
        let gpu = gpu();
        let stream = gpu.default_stream();
        let mut empty = gpu.alloc_zeros::<f32>(0, &stream).unwrap();
        assert!(empty.is_empty());
        assert_eq!((empty.len(), empty.address(), empty.size_bytes()), (0, 0, 0));
        assert_eq!(empty.to_vec(&stream).unwrap(), [0_f32; 0]);
        empty.copy_from_host(&[], &stream).unwrap();
        empty.fill_zero(&stream).unwrap();
        empty.record_stream(&gpu.new_stream().unwrap()).unwrap();
        let units = gpu.alloc_copy(&[(); 9], &stream).unwrap();
        assert_eq!(units.to_vec(&stream).unwrap().len(), 9);
        gpu.free(empty);
        gpu.free(units);
        assert_eq!((gpu.memory_allocated(), gpu.memory_reserved()), (0, 0));
    }

    #[test]
    fn statistics_follow_the_buffers() {
        let gpu = gpu();
        let stream = gpu.default_stream();
        let one = gpu.alloc_zeros::<f32>(256, &stream).unwrap();
        let other = gpu.alloc_zeros::<f32>(128, &stream).unwrap();
        assert_eq!(gpu.memory_allocated(), 1024 + 512);
        assert_eq!(gpu.cache_stats(), CacheStats { hits: 1, misses: 1 });
        assert_eq!((gpu.block_count(), gpu.free_block_count()), (3, 1));
        assert_eq!(gpu.memory_reserved(), 2 * MIB);
        assert_eq!(gpu.cached_bytes(), 2 * MIB - 1536);
        let four = gpu.alloc_copy(&[1_f64; 4], &stream).unwrap();
        assert_eq!((gpu.memory_requested(), gpu.memory_allocated()), (1536 + 32, 1536 + 512));
        gpu.free(four);
        one.free();
        assert_eq!(gpu.max_memory_allocated(), 2048);
        gpu.reset_peak_stats();
        assert_eq!(gpu.max_memory_allocated(), 512);
        drop(other);
        assert_eq!((gpu.memory_allocated(), gpu.max_memory_reserved()), (0, 2 * MIB));
        gpu.empty_cache().unwrap();
        assert_eq!((gpu.memory_reserved(), gpu.block_count()), (0, 0));
        let info = gpu.memory_info().unwrap();
        assert_eq!((info.free, info.total), (GIB, GIB));
        assert!(format!("{gpu:?}").contains("memory_allocated: 0"));
    }

    #[test]
    fn out_of_memory_is_a_recoverable_error_with_figures() {
        let gpu = gpu();
        let stream = gpu.default_stream();
        let most = gpu.alloc_zeros::<u8>(900 << 20, &stream).unwrap();
        let refused = gpu.alloc_zeros::<u8>(200 << 20, &stream).unwrap_err();
        assert!(refused.is_out_of_memory());
        assert!(matches!(refused, Error::Alloc(AllocError::FullNow(_))));
        assert!(refused.to_string().contains("200.00 MiB asked for"), "{refused}");
        let never = gpu.alloc_zeros::<u8>(2 << 30, &stream).unwrap_err();
        assert!(never.is_out_of_memory());
        drop(most);
        assert!(gpu.alloc_zeros::<u8>(200 << 20, &stream).is_ok());
    }

    #[test]
    fn memory_another_stream_uses_is_not_handed_out() {
        let gpu = gpu();
        let simulator = gpu.engine().driver().simulator().unwrap();
        let (main, side) = (gpu.new_stream().unwrap(), gpu.new_stream().unwrap());
        assert_ne!(main.stream_id(), side.stream_id());
        let buffer = gpu.alloc_zeros::<u8>(100 << 20, &main).unwrap();
        let address = buffer.address();
        let work = simulator.launch(side.stream_id());
        buffer.record_stream(&side).unwrap();
        drop(buffer);
        let next = gpu.alloc_zeros::<u8>(100 << 20, &main).unwrap();
        assert_ne!(next.address(), address);
        simulator.finish_until(side.stream_id(), work);
        let next = gpu.alloc_zeros::<u8>(100 << 20, &main).unwrap();
        assert_eq!(next.address(), address);
    }

    #[test]
    fn copies_record_their_stream() {
        let gpu = gpu();
        let simulator = gpu.engine().driver().simulator().unwrap();
        let (main, side) = (gpu.new_stream().unwrap(), gpu.new_stream().unwrap());
        let mut buffer = gpu.alloc_zeros::<u8>(100 << 20, &main).unwrap();
        let address = buffer.address();
        buffer.fill_zero(&side).unwrap();
        simulator.launch(side.stream_id());
        drop(buffer);
        assert_ne!(gpu.alloc_zeros::<u8>(100 << 20, &main).unwrap().address(), address);
        side.synchronize().unwrap();
        assert_eq!(gpu.alloc_zeros::<u8>(100 << 20, &main).unwrap().address(), address);
    }

    #[test]
    fn buffers_cross_threads() {
        let gpu = gpu();
        let stream = gpu.new_stream().unwrap();
        let buffer = gpu.alloc_copy(&[1_u64, 2, 3], &stream).unwrap();
        let other = gpu.clone();
        let sum = thread::spawn(move || {
            let stream = other.default_stream();
            buffer.to_vec(&stream).unwrap().iter().sum::<u64>()
        });
        assert_eq!(sum.join().unwrap(), 6);
        thread::scope(|scope| {
            for value in 0..8_u32 {
                let gpu = &gpu;
                scope.spawn(move || {
                    let stream = gpu.new_stream().unwrap();
                    for round in 0..100 {
                        let host = vec![value * 1000 + round; 100];
                        let buffer = gpu.alloc_copy(&host, &stream).unwrap();
                        assert_eq!(buffer.to_vec(&stream).unwrap(), host);
                    }
                });
            }
        });
        gpu.engine().check_invariants().unwrap();
        assert_eq!(gpu.memory_allocated(), 0);
    }

    #[test]
    fn into_raw_and_from_raw_round_trip() {
        let gpu = gpu();
        let stream = gpu.new_stream().unwrap();
        let buffer = gpu.alloc_copy(&[5_u16; 6], &stream).unwrap();
        let (len, id) = (buffer.len(), buffer.stream_id());
        let address = buffer.into_raw();
        assert_eq!(gpu.memory_allocated(), 512);
        // SAFETY: the address comes from `into_raw`, with its length and stream.
        let again = unsafe { Buffer::<u16>::from_raw(&gpu, address, len, id) };
        assert_eq!(again.to_vec(&stream).unwrap(), [5; 6]);
        drop(again);
        assert_eq!(gpu.memory_allocated(), 0);
    }

    #[test]
    fn the_builder_takes_policies_and_options_and_reports_errors() {
        for policy in Policy::ALL {
            let gpu = Device::builder().policy(policy).simulated(GIB);
            assert_eq!(gpu.engine().policy(), policy);
            let stream = gpu.default_stream();
            assert_eq!(
                gpu.alloc_copy(&[3_u8; 9], &stream).unwrap().to_vec(&stream).unwrap(),
                [3; 9]
            );
        }
        let wrong = Device::builder().conf("max_split_size_mb:soon").unwrap_err();
        assert!(matches!(wrong, Error::Options(_)), "{wrong}");
        assert_eq!(Device::simulated(GIB).engine().policy(), Policy::Paged);
        let gpu = Device::builder().conf("paged:False").unwrap().simulated(GIB);
        assert_eq!(gpu.engine().policy(), Policy::Segments);
        let gpu = Device::builder().conf("expandable_segments:True").unwrap().simulated(GIB);
        assert_eq!(gpu.engine().policy(), Policy::Expandable);
        assert!(gpu.set_memory_fraction(1.5).is_err());
        gpu.set_memory_fraction(0.25).unwrap();
        let stream = gpu.default_stream();
        assert!(gpu.alloc_zeros::<u8>(300 << 20, &stream).unwrap_err().is_out_of_memory());
    }
}
