//! C++ exceptions for PyTorch, built and thrown without C++ code.
//!
//! PyTorch does not check what an allocator returns, so an allocator refuses a request by an
//! exception. Python sees a `c10::OutOfMemoryError` as `torch.OutOfMemoryError`. Cushion builds it
//! from symbols that PyTorch's libraries export. The symbols depend on the version of PyTorch:
//!
//! - From 2.13 on, the libraries export the constructor of the class.
//! - Before, they export only the constructor of the base class `c10::Error`. Cushion calls it, and
//!   then writes the address of the derived class's vtable into the object. Both classes have the
//!   same members.
//!
//! Wheels up to 2.6 use the old C++ ABI for strings; the name of the constructor shows which one.
//! If the symbols are missing, Cushion throws `std::runtime_error`, which is `RuntimeError` in
//! Python.
//!
//! A C++ exception must not reach `catch_unwind`, which aborts the process. [`raise`] is called
//! last, when no Rust frame above it has anything to drop.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use cushion::core::Receipt;

use crate::process::symbols::Loaded;

/// Why a call failed. A C++ or a Python exception is built from it.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Memory ran out.
    OutOfMemory { message: String, receipt: Option<Arc<Receipt>> },
    /// Anything else.
    Other(String),
}

impl Failure {
    pub(crate) fn message(&self) -> &str {
        let (Self::OutOfMemory { message, .. } | Self::Other(message)) = self;
        message
    }
}

/// Returns the name of the Python exception that a refused allocation of PyTorch raises.
pub(crate) fn out_of_memory_name() -> &'static str {
    match &thrower().map(|thrower| &thrower.out_of_memory) {
        Some(Some(_)) => "torch.OutOfMemoryError",
        _ => "RuntimeError",
    }
}

/// Throws a C++ exception. Without libstdc++ nothing can catch one, so the process then prints the
/// message and aborts.
pub(crate) fn raise(failure: Failure) -> ! {
    let thrown = thrower().and_then(|thrower| thrower.make(&failure));
    let Some(thrown) = thrown else { end(&failure) };
    drop(failure);
    thrown.throw()
}

#[expect(clippy::print_stderr, reason = "no other channel is left to report the failure")]
fn end(failure: &Failure) -> ! {
    eprintln!("cushion: {}", failure.message());
    std::process::abort();
}

type AllocateException = unsafe extern "C" fn(usize) -> *mut c_void;
type Destroy = unsafe extern "C" fn(*mut c_void);
type Throw = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, Option<Destroy>) -> !;
type MakeRuntimeError = unsafe extern "C-unwind" fn(*mut c_void, *const c_char);
type MakeError = unsafe extern "C-unwind" fn(*mut c_void, SourceLocation, *mut StringMemory);
type MakeString = unsafe extern "C-unwind" fn(*mut StringMemory, *const c_char, *const u8);
type DestroyString = unsafe extern "C" fn(*mut StringMemory);

/// The size that is allocated for an exception. No exception class of PyTorch is larger.
const EXCEPTION_BYTES: usize = 512;

/// `c10::SourceLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

/// Memory for a `std::string` of either ABI: 32 bytes in the new one, 8 in the old one.
#[repr(C, align(8))]
#[derive(Debug)]
struct StringMemory([u8; 32]);

#[derive(Debug)]
struct Thrower {
    allocate: AllocateException,
    throw: Throw,
    runtime_error: RuntimeErrorClass,
    out_of_memory: Option<OutOfMemoryClass>,
}

/// `std::runtime_error`.
#[derive(Debug)]
struct RuntimeErrorClass {
    make: MakeRuntimeError,
    type_info: NonNull<c_void>,
    destroy: Destroy,
}

/// `c10::OutOfMemoryError`.
#[derive(Debug)]
struct OutOfMemoryClass {
    make: MakeError,
    make_string: MakeString,
    destroy_string: DestroyString,
    type_info: NonNull<c_void>,
    /// The first word of an object of the class: the address of the first function in its vtable.
    vtable: NonNull<Destroy>,
    /// The destructor of the class, which is that first function.
    destroy: Destroy,
}

// SAFETY: the fields are addresses of functions and constants of libraries that stay loaded; no
// thread owns them.
unsafe impl Send for Thrower {}
// SAFETY: as above, and no field changes after construction.
unsafe impl Sync for Thrower {}

fn thrower() -> Option<&'static Thrower> {
    static THROWER: OnceLock<Option<Thrower>> = OnceLock::new();
    THROWER.get_or_init(Thrower::find).as_ref()
}

impl Thrower {
    fn find() -> Option<Self> {
        let cxx = Loaded::find("libstdc++.so.6")?;
        // SAFETY: the Itanium C++ ABI defines `void* __cxa_allocate_exception(size_t)`.
        let allocate = unsafe { cxx.function(c"__cxa_allocate_exception") }?;
        // SAFETY: the same ABI defines
        // `void __cxa_throw(void*, std::type_info*, void (*)(void*))`, which does not return.
        let throw = unsafe { cxx.function(c"__cxa_throw") }?;
        // SAFETY: the symbol is `std::runtime_error::runtime_error(char const*)`, which takes the
        // object first.
        let make = unsafe { cxx.function(c"_ZNSt13runtime_errorC1EPKc") }?;
        // SAFETY: the symbol is `std::runtime_error::~runtime_error()`, which takes the object.
        let destroy = unsafe { cxx.function(c"_ZNSt13runtime_errorD1Ev") }?;
        let type_info = cxx.symbol(c"_ZTISt13runtime_error")?;
        let runtime_error = RuntimeErrorClass { make, type_info, destroy };
        Some(Self { allocate, throw, runtime_error, out_of_memory: OutOfMemoryClass::find(&cxx) })
    }

    /// Builds the exception.
    fn make(&'static self, failure: &Failure) -> Option<Thrown> {
        let message = CString::new(failure.message().replace('\0', " ")).ok()?;
        // SAFETY: the function accepts any size. It ends the process if no memory is left.
        let object = NonNull::new(unsafe { (self.allocate)(EXCEPTION_BYTES) })?;
        let throw = self.throw;
        match &self.out_of_memory {
            Some(class) if matches!(failure, Failure::OutOfMemory { .. }) => {
                class.make(object, &message);
                let (type_info, destroy) = (class.type_info, class.destroy);
                Some(Thrown { object, throw, type_info, destroy })
            }
            _ => {
                let class = &self.runtime_error;
                // SAFETY: the object is new memory, larger than the class, and aligned for every
                // type, as `__cxa_allocate_exception` guarantees. The text ends with a nul and
                // lives until the constructor has copied it.
                unsafe { (class.make)(object.as_ptr(), message.as_ptr()) };
                Some(Thrown { object, throw, type_info: class.type_info, destroy: class.destroy })
            }
        }
    }
}

impl OutOfMemoryClass {
    fn find(cxx: &Loaded) -> Option<Self> {
        let names = ["libc10.so", "libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so"];
        let torch: Vec<Loaded> = names.into_iter().filter_map(Loaded::find).collect();
        let symbol = |name: &CStr| torch.iter().find_map(|library| library.symbol(name));
        let type_info = symbol(c"_ZTIN3c1016OutOfMemoryErrorE")?;
        let table = symbol(c"_ZTVN3c1016OutOfMemoryErrorE")?.cast::<Destroy>();
        // SAFETY: the symbol is the vtable of the class: an array of words. The first two are the
        // offset to the top of the object and the type information; at least the two destructors
        // follow, so the third word lies inside the array.
        let vtable = unsafe { table.add(2) };
        // SAFETY: the word is readable, as above, aligned, and never changes. `std::exception`, the
        // base of `c10::Error`, declares its destructor first, so the first function is the
        // complete object destructor, which takes the object alone.
        let destroy = unsafe { vtable.read() };
        CONSTRUCTORS.iter().find_map(|constructor| {
            let make = torch.iter().find_map(|library| {
                // SAFETY: each name is a constructor that takes a location and a string by value. A
                // string that is passed by value arrives as the address of a temporary.
                unsafe { library.function(constructor.name) }
            })?;
            // SAFETY: the symbol is the string's constructor from a C string and an allocator by
            // reference.
            let make_string = unsafe { cxx.function(constructor.make_string) }?;
            // SAFETY: the symbol is the string's destructor, which takes the string.
            let destroy_string = unsafe { cxx.function(constructor.destroy_string) }?;
            Some(Self { make, make_string, destroy_string, type_info, vtable, destroy })
        })
    }

    fn make(&self, object: NonNull<c_void>, message: &CStr) {
        let mut text = StringMemory([0; 32]);
        // `std::allocator` has no members, so any address is valid for it.
        let allocator = 0_u8;
        // SAFETY: `text` is large enough and aligned for a string of either ABI, and holds none
        // yet. The message ends with a nul and lives until the constructor has copied it. The
        // allocator is not read.
        unsafe { (self.make_string)(&raw mut text, message.as_ptr(), &raw const allocator) };
        let location = SourceLocation {
            function: c"cushion_alloc".as_ptr(),
            file: c"cushion".as_ptr(),
            line: 0,
        };
        // SAFETY: the object is new memory, larger than the class, and aligned for every type. The
        // strings of the location are constants. `text` is a string of the ABI that this
        // constructor takes; the constructor may move from it, and leaves it to be destroyed here.
        unsafe { (self.make)(object.as_ptr(), location, &raw mut text) };
        // SAFETY: `make_string` built the string, and nothing else destroys it.
        unsafe { (self.destroy_string)(&raw mut text) };
        // SAFETY: the object is valid for writes and aligned, as above. `std::exception` is its
        // first base and has virtual functions, so the object begins with the address of its
        // vtable. The derived class adds no members, so the object is complete. If the constructor
        // of the derived class ran, it has written the same address.
        unsafe { object.cast::<NonNull<Destroy>>().write(self.vtable) };
    }
}

/// A constructor, and the functions for the string that it takes.
#[derive(Debug)]
struct Constructor {
    name: &'static CStr,
    make_string: &'static CStr,
    destroy_string: &'static CStr,
}

const NEW_STRING: (&CStr, &CStr) = (
    c"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1EPKcRKS3_",
    c"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEED1Ev",
);
const OLD_STRING: (&CStr, &CStr) = (c"_ZNSsC1EPKcRKSaIcE", c"_ZNSsD1Ev");

const fn constructor(name: &'static CStr, string: (&'static CStr, &'static CStr)) -> Constructor {
    Constructor { name, make_string: string.0, destroy_string: string.1 }
}

/// The constructors, in the order of the search.
const CONSTRUCTORS: [Constructor; 3] = [
    constructor(
        c"_ZN3c1016OutOfMemoryErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
        NEW_STRING,
    ),
    constructor(
        c"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
        NEW_STRING,
    ),
    constructor(c"_ZN3c105ErrorC1ENS_14SourceLocationESs", OLD_STRING),
];

/// An exception that is ready to be thrown.
#[derive(Debug)]
struct Thrown {
    object: NonNull<c_void>,
    throw: Throw,
    type_info: NonNull<c_void>,
    destroy: Destroy,
}

impl Thrown {
    fn throw(self) -> ! {
        // SAFETY: the object comes from `__cxa_allocate_exception` and is constructed. The type
        // information and the destructor belong to its class. No other code uses the object.
        unsafe { (self.throw)(self.object.as_ptr(), self.type_info.as_ptr(), Some(self.destroy)) }
    }
}
