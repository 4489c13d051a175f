//! Symbols of libraries that this process has loaded already, PyTorch's and Python's. Nothing is
//! loaded here, and nothing is unloaded: what was found stays valid for the life of the process.

use std::ffi::{CStr, c_void};
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use libloading::os::unix::{Library, RTLD_LAZY};

/// A library that is loaded.
#[derive(Debug)]
pub(crate) struct Loaded(ManuallyDrop<Library>);

impl Loaded {
    /// The library of that file name, if something has loaded it.
    pub(crate) fn find(name: &str) -> Option<Self> {
        // SAFETY: with RTLD_NOLOAD no initialiser runs: the library is found only if it is there.
        let library = unsafe { Library::open(Some(name), RTLD_LAZY | libc::RTLD_NOLOAD) };
        library.ok().map(ManuallyDrop::new).map(Self)
    }

    /// Everything that is visible to the whole process, such as the interpreter.
    pub(crate) fn process() -> Self {
        Self(ManuallyDrop::new(Library::this()))
    }

    /// The address of a symbol.
    pub(crate) fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the type asked for is a plain address, which every symbol has; what it is used as is
        // for the caller to answer.
        let symbol = unsafe { self.0.get::<*mut c_void>(name.to_bytes_with_nul()) };
        symbol.ok().and_then(|symbol| NonNull::new(*symbol))
    }

    /// The address of a symbol as a function pointer.
    ///
    /// # Safety
    ///
    /// `F` is the type of a function pointer, and the symbol is a function of that type.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let address = self.symbol(name)?.as_ptr();
        // SAFETY: both are of the size of a pointer; the caller answers for the type.
        Some(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
    }
}
