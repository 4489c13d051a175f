//! Sets the soname of the shared library.

use std::env;

#[expect(clippy::disallowed_methods, reason = "cargo tells build scripts through variables")]
fn main() {
    // The number changes when programs must be rebuilt; scripts/install-c.sh uses the same number.
    if env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcushion_c.so.0");
    }
    println!("cargo::rerun-if-changed=build.rs");
}
