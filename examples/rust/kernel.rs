//! Runs a cudarc kernel on Cushion's buffers, y = a·x + y, and checks every element.
//!
//! Needs a GPU: `cargo run --example kernel --features cudarc`.

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;

use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use cushion::Device;

/// The kernel in PTX, so that no compiler is needed: the driver compiles it for its GPU.
const SAXPY: &str = "
.version 6.0
.target sm_50
.address_size 64
.visible .entry saxpy(.param .u32 n, .param .f32 a, .param .u64 x, .param .u64 y)
{
    .reg .pred %past;
    .reg .b32 %i, %n, %block, %threads, %thread;
    .reg .f32 %a, %x, %y;
    .reg .b64 %at, %px, %py;
    ld.param.u32 %n, [n];
    ld.param.f32 %a, [a];
    ld.param.u64 %px, [x];
    ld.param.u64 %py, [y];
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.s32 %i, %block, %threads, %thread;
    setp.ge.u32 %past, %i, %n;
    @%past bra DONE;
    mul.wide.u32 %at, %i, 4;
    cvta.to.global.u64 %px, %px;
    cvta.to.global.u64 %py, %py;
    add.s64 %px, %px, %at;
    add.s64 %py, %py, %at;
    ld.global.f32 %x, [%px];
    ld.global.f32 %y, [%py];
    fma.rn.f32 %y, %a, %x, %y;
    st.global.f32 [%py], %y;
DONE:
    ret;
}
";

fn main() -> Result<(), Box<dyn Error>> {
    let gpu = match Device::cuda(0) {
        Ok(gpu) => gpu,
        Err(why) => {
            println!("SKIPPED: {why}");
            return Ok(());
        }
    };
    const N: u16 = 50_000;
    // cudarc and Cushion use the same context: the primary context of the device.
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let saxpy = context.load_module(Ptx::from_src(SAXPY))?.load_function("saxpy")?;

    let xs: Vec<f32> = (0..N).map(f32::from).collect();
    let ys: Vec<f32> = (0..N).map(|i| 1000.0 - f32::from(i)).collect();
    for round in 0..100_u8 {
        // From the second round on, these come from the cache, without a driver call.
        let x = gpu.alloc_copy(&xs, &stream)?;
        let mut y = gpu.alloc_copy(&ys, &stream)?;
        let (n, a) = (u32::from(N), f32::from(round));
        {
            let lent_x = x.cudarc(&stream)?;
            let mut lent_y = y.cudarc_mut(&stream)?;
            let (view_x, mut view_y) = (lent_x.view(), lent_y.view_mut());
            let mut launch = stream.launch_builder(&saxpy);
            launch.arg(&n).arg(&a).arg(&view_x).arg(&mut view_y);
            // SAFETY: the arguments match the parameters, and both buffers have N elements.
            unsafe { launch.launch(LaunchConfig::for_num_elems(n)) }?;
        }
        for (i, got) in y.to_vec(&stream)?.into_iter().enumerate() {
            assert_eq!(got, a.mul_add(xs[i], ys[i]), "round {round}, element {i}");
        }
    }
    let cache = gpu.cache_stats();
    assert!(cache.misses <= 2 && cache.hits >= 198, "{cache:?}");
    assert_eq!(gpu.memory_allocated(), 0, "cudarc freed nothing, and every buffer is freed");
    println!(
        "100 rounds of saxpy on {N} elements are right: {} hits, {} misses",
        cache.hits, cache.misses
    );
    println!("ok");
    Ok(())
}
