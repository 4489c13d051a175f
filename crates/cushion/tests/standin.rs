//! [`Device::cuda`] on the CUDA stand-in, each test in its own process: the calls of buffers and
//! streams, and their failures.

#![cfg(target_os = "linux")]

#[path = "../../cushion-cuda/tests/support/mod.rs"]
mod support;

#[cfg(test)]
mod tests {
    use cushion::{CudaError, Device, DeviceError, Error, Policy, Stream, StreamId};

    use super::support::{Lib, with_library, with_standin};

    fn calls(lib: &Lib, name: &std::ffi::CStr) -> u64 {
        lib.standin_calls(name.as_ptr())
    }

    #[test]
    fn buffers_keep_their_content() {
        with_standin(&[], |lib| {
            let gpu = Device::cuda(0).unwrap();
            assert!(!gpu.is_simulated());
            let stream = gpu.new_stream().unwrap();
            let host: Vec<u32> = (0..1000).collect();
            let a = gpu.alloc_copy(&host, &stream).unwrap();
            let mut b = gpu.alloc_zeros::<u32>(1000, &stream).unwrap();
            assert_eq!(b.to_vec(&stream).unwrap(), [0; 1000]);
            b.copy_from(&a, &stream).unwrap();
            assert_eq!(b.to_vec(&stream).unwrap(), host);
            stream.synchronize().unwrap();
            drop((a, b));
            assert_eq!(gpu.memory_allocated(), 0);
            gpu.empty_cache().unwrap();
            assert_eq!(lib.standin_held(0), 0);
        });
    }

    #[test]
    fn a_gpu_is_shared_unless_the_builder_makes_its_own() {
        with_standin(&[("STANDIN_DEVICES", "2"), ("CUSHION_POLICY", "expandable")], |_| {
            let (one, same) = (Device::cuda(1).unwrap(), Device::cuda(1).unwrap());
            let stream = one.default_stream();
            let kept = one.alloc_zeros::<u8>(3000, &stream).unwrap();
            assert_eq!(same.memory_allocated(), one.memory_allocated());
            assert_eq!(one.engine().policy(), Policy::Expandable, "set by the variable");
            let own = Device::builder().cuda(1).unwrap();
            assert_eq!((own.index(), own.memory_allocated()), (1, 0));
            assert_eq!(own.engine().policy(), Policy::Paged);
            drop(kept);
            assert!(matches!(
                Device::cuda(2),
                Err(Error::Device(DeviceError::Cuda(CudaError::NoSuchDevice { .. })))
            ));
        });
    }

    #[test]
    fn an_own_cache_is_dropped_with_its_last_user() {
        with_standin(&[], |lib| {
            let own = Device::builder().cuda(0).unwrap();
            let stream = own.new_stream().unwrap();
            let buffer = own.alloc_zeros::<u8>(5000, &stream).unwrap();
            drop((own, stream));
            assert!(lib.standin_held(0) > 0, "the buffer keeps its device");
            assert_eq!(calls(lib, c"cuStreamDestroy_v2"), 0);
            drop(buffer);
            assert_eq!(lib.standin_held(0), 0);
            assert_eq!(calls(lib, c"cuStreamDestroy_v2"), 1);
        });
    }

    #[test]
    fn streams_outlive_their_last_use_on_a_device() {
        with_standin(&[], |lib| {
            let gpu = Device::cuda(0).unwrap();
            let (main, side) = (gpu.new_stream().unwrap(), gpu.new_stream().unwrap());
            let buffer = gpu.alloc_zeros::<u8>(5000, &main).unwrap();
            buffer.to_vec(&side).unwrap();
            drop((main, side));
            drop(buffer);
            assert_eq!(calls(lib, c"cuEventRecord"), 1, "on the side stream");
            assert_eq!(calls(lib, c"cuStreamDestroy_v2"), 0);
            gpu.new_stream().unwrap();
            assert_eq!(calls(lib, c"cuStreamCreate"), 2, "idle streams are reused");
        });
    }

    #[test]
    fn the_per_thread_default_stream_is_refused() {
        with_standin(&[], |_| {
            let gpu = Device::cuda(0).unwrap();
            // SAFETY: CUDA takes this number for the default stream of the calling thread, which
            // nothing destroys.
            let per_thread = unsafe { Stream::from_raw(&gpu, StreamId(2)) };
            let refused = gpu.alloc_zeros::<u8>(10, &per_thread).unwrap_err();
            assert!(matches!(refused, Error::PerThreadStream), "{refused}");
        });
    }

    #[test]
    fn cushion_simulate_makes_devices_simulated() {
        with_standin(&[("CUSHION_SIMULATE", "3GiB")], |lib| {
            let gpu = Device::cuda(5).unwrap();
            assert!(gpu.is_simulated());
            assert_eq!((gpu.index(), gpu.memory_info().unwrap().total), (5, 3 << 30));
            assert_eq!(calls(lib, c"cuDeviceGet"), 0);
        });
    }

    #[test]
    fn an_error_names_the_bad_variable() {
        with_standin(&[("CUSHION_POLICY", "magic")], |_| {
            let failed = Device::cuda(0).unwrap_err().to_string();
            assert!(failed.contains("CUSHION_POLICY") && failed.contains("magic"), "{failed}");
        });
    }

    #[test]
    fn a_copy_that_fails_loses_nothing() {
        with_standin(&[], |lib| {
            let gpu = Device::cuda(0).unwrap();
            let stream = gpu.new_stream().unwrap();
            drop(gpu.alloc_zeros::<u8>(100, &stream).unwrap());
            let mut failures = 0;
            for nth in 1..50 {
                lib.standin_fail(nth, 700);
                let copied = gpu.alloc_copy(&[1_u8; 100], &stream);
                lib.standin_fail(u64::MAX, 0);
                match copied {
                    Err(error) => {
                        failures += 1;
                        assert!(error.to_string().contains("700"), "{error}");
                    }
                    Ok(buffer) => assert_eq!(buffer.to_vec(&stream).unwrap(), [1; 100]),
                }
                assert_eq!(gpu.memory_allocated(), 0);
                gpu.engine().check_invariants().unwrap();
            }
            assert!(failures >= 2, "the copy, and the wait for it: {failures}");
        });
    }

    #[test]
    fn a_free_that_fails_is_completed_later() {
        with_standin(&[], |lib| {
            let gpu = Device::cuda(0).unwrap();
            let (main, side) = (gpu.new_stream().unwrap(), gpu.new_stream().unwrap());
            for nth in 1..10 {
                let buffer = gpu.alloc_zeros::<u8>(5000, &main).unwrap();
                buffer.record_stream(&side).unwrap();
                lib.standin_fail(nth, 700);
                drop(buffer);
                lib.standin_fail(u64::MAX, 0);
                assert_eq!(gpu.memory_allocated(), 0);
                gpu.engine().check_invariants().unwrap();
            }
            gpu.empty_cache().unwrap();
            assert_eq!(lib.standin_held(0), 0, "no block stays pending");
        });
    }

    #[test]
    fn a_missing_driver_library_is_reported() {
        let broken = tempfile::NamedTempFile::new().unwrap();
        with_library(broken.path(), || {
            let failed = Device::cuda(0).unwrap_err();
            assert!(matches!(
                failed,
                Error::Device(DeviceError::Cuda(CudaError::NoLibrary { .. }))
            ));
            assert!(failed.to_string().contains("install the NVIDIA driver"), "{failed}");
        });
    }
}
