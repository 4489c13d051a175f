//! The pickle opcodes in use, under the names of Python's `pickletools`.

macro_rules! opcodes {
    ($($name:ident = $byte:literal),* $(,)?) => {
        pub(crate) mod op {
            $(pub(crate) const $name: u8 = $byte;)*
        }
    };
}

opcodes! {
    MARK = b'(', STOP = b'.', POP = b'0', POP_MARK = b'1', DUP = b'2', FLOAT = b'F', INT = b'I',
    LONG = b'L', BININT = b'J', BININT1 = b'K', BININT2 = b'M', NONE = b'N', BINSTRING = b'T',
    SHORT_BINSTRING = b'U', UNICODE = b'V', BINUNICODE = b'X', BINFLOAT = b'G', APPEND = b'a',
    APPENDS = b'e', DICT = b'd', EMPTY_DICT = b'}', LIST = b'l', EMPTY_LIST = b']', TUPLE = b't',
    EMPTY_TUPLE = b')', SETITEM = b's', SETITEMS = b'u', GET = b'g', BINGET = b'h',
    LONG_BINGET = b'j', PUT = b'p', BINPUT = b'q', LONG_BINPUT = b'r', BINBYTES = b'B',
    SHORT_BINBYTES = b'C', PROTO = 0x80, TUPLE1 = 0x85, TUPLE2 = 0x86, TUPLE3 = 0x87,
    NEWTRUE = 0x88, NEWFALSE = 0x89, LONG1 = 0x8a, LONG4 = 0x8b, SHORT_BINUNICODE = 0x8c,
    BINUNICODE8 = 0x8d, BINBYTES8 = 0x8e, MEMOIZE = 0x94, FRAME = 0x95, BYTEARRAY8 = 0x96,
}
