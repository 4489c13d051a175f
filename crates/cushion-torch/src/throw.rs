//! C++ exceptions for PyTorch, without C++.
//!
//! PyTorch does not look at what an allocator returns: the only way to refuse is to throw. A
//! `c10::OutOfMemoryError` becomes `torch.OutOfMemoryError` in Python. It is built from symbols that
//! PyTorch's libraries export, and which they are depends on its version:
//!
//! - from 2.13 on, the class's own constructor;
//! - before, the constructor of its base class `c10::Error`, after which the object is pointed at the
//!   vtable of the derived class. The two classes have the same members.
//!
//! Wheels up to 2.6 pass strings in the layout of the old C++ library ABI; the constructor's name tells.
//! Where nothing of this is exported, `std::runtime_error` is thrown, a `RuntimeError` in Python.
//!
//! Exceptions must not meet `catch_unwind`, which aborts on them: [`raise`] is called last, when no Rust
//! frame above has anything left to do.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;

use crate::symbols::Loaded;

/// What went wrong, for the caller.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Memory ran out.
    OutOfMemory(String),
    /// Anything else.
    Other(String),
}

/// What Python sees when memory runs out.
pub(crate) fn out_of_memory_name() -> &'static str {
    match &thrower().map(|thrower| &thrower.out_of_memory) {
        Some(Some(_)) => "torch.OutOfMemoryError",
        _ => "RuntimeError",
    }
}

/// Throws. Without the C++ library there is nobody to catch, and the process ends with the message.
pub(crate) fn raise(failure: Failure) -> ! {
    let thrown = thrower().and_then(|thrower| thrower.make(&failure));
    let Some(thrown) = thrown else { end(&failure) };
    drop(failure);
    thrown.throw()
}

#[expect(clippy::print_stderr, reason = "there is no other way left to say it")]
fn end(failure: &Failure) -> ! {
    let (Failure::OutOfMemory(message) | Failure::Other(message)) = failure;
    eprintln!("cushion: {message}");
    std::process::abort();
}

type AllocateException = unsafe extern "C" fn(usize) -> *mut c_void;
type Destroy = unsafe extern "C" fn(*mut c_void);
type Throw = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, Option<Destroy>) -> !;
type MakeRuntimeError = unsafe extern "C-unwind" fn(*mut c_void, *const c_char);
type MakeError = unsafe extern "C-unwind" fn(*mut c_void, SourceLocation, *mut StringMemory);
type MakeString = unsafe extern "C-unwind" fn(*mut StringMemory, *const c_char, *const u8);
type DestroyString = unsafe extern "C" fn(*mut StringMemory);

/// More than any exception of PyTorch takes.
const EXCEPTION_BYTES: usize = 512;

/// `c10::SourceLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

/// Room for a `std::string`, of either ABI.
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
    /// What an object of the class begins with: the address of the first function of its vtable, which is
    /// the destructor.
    vtable: NonNull<Destroy>,
}

// SAFETY: all that is kept are addresses of functions and constants of libraries that stay loaded.
unsafe impl Send for Thrower {}
// SAFETY: as above; nothing is ever changed.
unsafe impl Sync for Thrower {}

fn thrower() -> Option<&'static Thrower> {
    static THROWER: OnceLock<Option<Thrower>> = OnceLock::new();
    THROWER.get_or_init(Thrower::find).as_ref()
}

impl Thrower {
    fn find() -> Option<Self> {
        let cxx = Loaded::find("libstdc++.so.6")?;
        // SAFETY: the C++ ABI defines these functions with these types.
        let allocate = unsafe { cxx.function(c"__cxa_allocate_exception") }?;
        // SAFETY: as above.
        let throw = unsafe { cxx.function(c"__cxa_throw") }?;
        // SAFETY: `std::runtime_error::runtime_error(char const*)`.
        let make = unsafe { cxx.function(c"_ZNSt13runtime_errorC1EPKc") }?;
        // SAFETY: `std::runtime_error::~runtime_error()`.
        let destroy = unsafe { cxx.function(c"_ZNSt13runtime_errorD1Ev") }?;
        let type_info = cxx.symbol(c"_ZTISt13runtime_error")?;
        let runtime_error = RuntimeErrorClass { make, type_info, destroy };
        Some(Self { allocate, throw, runtime_error, out_of_memory: OutOfMemoryClass::find(&cxx) })
    }

    /// Builds the exception.
    fn make(&'static self, failure: &Failure) -> Option<Thrown> {
        let (Failure::OutOfMemory(message) | Failure::Other(message)) = failure;
        let message = CString::new(message.replace('\0', " ")).ok()?;
        // SAFETY: any size may be asked for; the function ends the process rather than give null.
        let object = NonNull::new(unsafe { (self.allocate)(EXCEPTION_BYTES) })?;
        let throw = self.throw;
        match &self.out_of_memory {
            Some(class) if matches!(failure, Failure::OutOfMemory(_)) => {
                class.make(object, &message);
                let (type_info, destroy) = (class.type_info, class.destroy());
                Some(Thrown { object, throw, type_info, destroy })
            }
            _ => {
                let class = &self.runtime_error;
                // SAFETY: the object is fresh memory, larger than the class and aligned for anything;
                // the text ends with a nul and is copied.
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
        // Two words come before the functions: the offset to the top and the type.
        // SAFETY: a vtable is an array of words of which the third is its first function.
        let vtable = unsafe { symbol(c"_ZTVN3c1016OutOfMemoryErrorE")?.cast::<Destroy>().add(2) };
        CONSTRUCTORS.iter().find_map(|constructor| {
            let make = torch.iter().find_map(|library| {
                // SAFETY: each name is that of a constructor from a location and a string by value,
                // which arrives as the address of a temporary.
                unsafe { library.function(constructor.name) }
            })?;
            // SAFETY: the string's constructor from a C string and an allocator by reference.
            let make_string = unsafe { cxx.function(constructor.make_string) }?;
            // SAFETY: the string's destructor.
            let destroy_string = unsafe { cxx.function(constructor.destroy_string) }?;
            Some(Self { make, make_string, destroy_string, type_info, vtable })
        })
    }

    fn make(&self, object: NonNull<c_void>, message: &CStr) {
        let mut text = StringMemory([0; 32]);
        // An allocator has no members: any address will do.
        let allocator = 0_u8;
        // SAFETY: the memory is large enough and aligned for a string of either ABI; the text ends with a
        // nul and is copied.
        unsafe { (self.make_string)(&raw mut text, message.as_ptr(), &raw const allocator) };
        let location = SourceLocation {
            function: c"cushion_alloc".as_ptr(),
            file: c"cushion".as_ptr(),
            line: 0,
        };
        // SAFETY: the object is fresh memory, larger than the class and aligned for anything; the string
        // was made above, and stays ours to destroy.
        unsafe { (self.make)(object.as_ptr(), location, &raw mut text) };
        // SAFETY: the string was made above and is destroyed once.
        unsafe { (self.destroy_string)(&raw mut text) };
        // SAFETY: an object of a class with virtual functions begins with the address of its vtable, and
        // the derived class has no members of its own. Where its own constructor ran this changes nothing.
        unsafe { object.cast::<NonNull<Destroy>>().write(self.vtable) };
    }

    fn destroy(&self) -> Destroy {
        // SAFETY: the vtable's first function is the destructor, which takes the object alone.
        unsafe { self.vtable.read() }
    }
}

/// A constructor, and how it takes its text.
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

/// In the order in which they are looked for.
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

/// An exception ready to be thrown.
#[derive(Debug)]
struct Thrown {
    object: NonNull<c_void>,
    throw: Throw,
    type_info: NonNull<c_void>,
    destroy: Destroy,
}

impl Thrown {
    fn throw(self) -> ! {
        // SAFETY: the object came from `__cxa_allocate_exception` and is whole; type and destructor are
        // those of its class.
        unsafe { (self.throw)(self.object.as_ptr(), self.type_info.as_ptr(), Some(self.destroy)) }
    }
}
