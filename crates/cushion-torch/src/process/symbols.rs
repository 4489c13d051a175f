//! Symbols of libraries that this process has already loaded: PyTorch's and Python's.
//!
//! This module neither loads nor unloads a library, so a symbol stays valid for the life of the
//! process.

use std::ffi::{CStr, c_void};
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use libloading::os::unix::{Library, RTLD_LAZY};

/// A loaded library.
#[derive(Debug)]
pub(crate) struct Loaded(ManuallyDrop<Library>);

impl Loaded {
    /// Returns the library with this file name, if the process has loaded it.
    pub(crate) fn find(name: &str) -> Option<Self> {
        // SAFETY: `open` may run the initialisers of the library. With RTLD_NOLOAD it only finds a
        // library that is loaded already, whose initialisers have run.
        let library = unsafe { Library::open(Some(name), RTLD_LAZY | libc::RTLD_NOLOAD) };
        library.ok().map(ManuallyDrop::new).map(Self)
    }

    /// Returns the symbols that are visible to the whole process, such as the interpreter's.
    pub(crate) fn process() -> Self {
        Self(ManuallyDrop::new(Library::this()))
    }

    /// Returns the address of a symbol.
    pub(crate) fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: `get` requires that the symbol has the given type. The type is a plain address,
        // and the address of the symbol is never dereferenced here.
        let symbol = unsafe { self.0.get::<*mut c_void>(name.to_bytes_with_nul()) };
        symbol.ok().and_then(|symbol| NonNull::new(*symbol))
    }

    /// Returns the address of a symbol as a function pointer.
    ///
    /// # Safety
    ///
    /// `F` is the type of a function pointer, and the symbol is a function of that type.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let address = self.symbol(name)?.as_ptr();
        // SAFETY: both types have the size of a pointer, which the assertion checks. The address is
        // not null, and the caller guarantees that it is a function of type `F`.
        Some(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
    }
}
