//! A small pickle machine: the part of Python's pickle language that a memory snapshot uses, and
//! nothing that could load a class or run code.
//!
//! Two things shape it. The file is not trusted, so values are small `Copy` handles into an
//! arena: nothing here recurses, however deep the nesting, not even a drop. And the file is big,
//! almost all of it events, so a dict with an `action` becomes a compact event as its items
//! arrive, moves into its list when it is appended, and gives its place to the next dict.

use crate::arena::Arena;
use crate::error::{Format, TraceError};
use crate::source::{CHUNK, Source};
use crate::value::Value;

macro_rules! opcodes {
    ($($name:ident = $byte:literal),* $(,)?) => {
        /// The opcodes that are run, under the names Python's `pickletools` gives them.
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

/// The machine that runs a pickle.
#[derive(Debug)]
pub(crate) struct Machine<'s, 'r> {
    source: &'s mut Source<'r>,
    stack: Vec<Value>,
    /// Heights of the stack at which a MARK lies.
    marks: Vec<usize>,
    arena: Arena,
    scratch: Vec<u8>,
    /// The offset from which the memory limit is due to be looked at again.
    next_check: u64,
}

impl<'s, 'r> Machine<'s, 'r> {
    pub(crate) fn new(source: &'s mut Source<'r>) -> Self {
        Self {
            source,
            stack: Vec::new(),
            marks: Vec::new(),
            arena: Arena::new(Format::Pickle),
            scratch: Vec::new(),
            next_check: 0,
        }
    }

    /// Runs the pickle to its STOP: the value it built, and the arena the value lives in.
    pub(crate) fn run(mut self) -> Result<(Value, Arena), TraceError> {
        loop {
            let at = self.source.offset();
            self.arena.at = at;
            if at >= self.next_check {
                self.check_memory()?;
            }
            let opcode = self.source.byte()?;
            if opcode == op::STOP {
                let root = self.pop()?;
                return Ok((root, self.arena));
            }
            self.step(opcode)?;
        }
    }

    /// Opcodes about in the order of how often a snapshot has them.
    #[inline]
    fn step(&mut self, opcode: u8) -> Result<(), TraceError> {
        match opcode {
            op::LONG_BINGET => self.get(Source::u32),
            op::BINGET => self.get(Source::u8),
            op::LONG1 => self.long1(),
            op::BININT => {
                let int = i32::from_le_bytes(self.source.array()?);
                self.push(Value::Int(int.into()))
            }
            op::BININT1 => {
                let int = self.source.byte()?;
                self.push(Value::Int(int.into()))
            }
            op::BININT2 => {
                let int = u16::from_le_bytes(self.source.array()?);
                self.push(Value::Int(int.into()))
            }
            op::MARK => {
                self.marks.push(self.stack.len());
                Ok(())
            }
            op::EMPTY_DICT => {
                let dict = self.arena.new_dict()?;
                self.push(Value::Dict(dict))
            }
            op::MEMOIZE => {
                let index = self.arena.memo_len();
                self.put(|_| Ok(index))
            }
            op::LONG_BINPUT => self.put(Source::u32),
            op::BINPUT => self.put(Source::u8),
            op::SETITEMS => {
                let from = self.pop_mark()?;
                self.set_items(from)
            }
            op::SETITEM => self.set_items(self.stack.len().saturating_sub(2)),
            op::APPENDS => {
                let from = self.pop_mark()?;
                self.append(from)
            }
            op::APPEND => self.append(self.stack.len().saturating_sub(1)),
            op::EMPTY_LIST => {
                let list = self.arena.new_list(Vec::new())?;
                self.push(Value::List(list))
            }
            op::TUPLE2 => self.tuple(2),
            op::SHORT_BINUNICODE => self.text(Source::u8),
            op::NONE => self.push(Value::None),
            op::NEWTRUE => self.push(Value::Bool(true)),
            op::NEWFALSE => self.push(Value::Bool(false)),
            op::BINFLOAT => {
                let float = f64::from_be_bytes(self.source.array()?);
                self.push(Value::Float(float))
            }
            // A hint for readers that fetch frame by frame.
            op::FRAME => self.source.skip(8),
            _ => self.rare_step(opcode),
        }
    }

    fn rare_step(&mut self, opcode: u8) -> Result<(), TraceError> {
        match opcode {
            op::PROTO => match self.source.byte()? {
                0..=5 => Ok(()),
                n => Err(self.broken("a pickle protocol up to 5", format!("protocol {n}"))),
            },
            op::BINUNICODE | op::BINSTRING => self.text(Source::u32),
            op::BINUNICODE8 => self.text(Source::u64),
            op::SHORT_BINSTRING => self.text(Source::u8),
            op::UNICODE => {
                self.source.line(&mut self.scratch)?;
                let id = self.arena.intern(&unescape(&self.scratch))?;
                self.push(Value::Str(id))
            }
            op::SHORT_BINBYTES => self.bytes(Source::u8),
            op::BINBYTES => self.bytes(Source::u32),
            op::BINBYTES8 | op::BYTEARRAY8 => self.bytes(Source::u64),
            op::LONG4 => {
                let len = i32::from_le_bytes(self.source.array()?);
                let Ok(len) = u64::try_from(len) else {
                    return Err(self.broken("the length of an int", len.to_string()));
                };
                self.source.copy(len, &mut self.scratch)?;
                self.push(long(&self.scratch))
            }
            op::INT | op::LONG | op::FLOAT => {
                self.source.line(&mut self.scratch)?;
                let number = number(opcode, &self.scratch);
                self.push(number.ok_or_else(|| self.broken("a number", "other text"))?)
            }
            op::GET => self.get(Source::decimal),
            op::PUT => self.put(Source::decimal),
            op::EMPTY_TUPLE => self.tuple(0),
            op::TUPLE1 => self.tuple(1),
            op::TUPLE3 => self.tuple(3),
            op::TUPLE => {
                let from = self.pop_mark()?;
                self.tuple(self.stack.len() - from)
            }
            // In protocol 0 the contents come before the container.
            op::LIST => {
                let from = self.pop_mark()?;
                let list = self.arena.new_list(Vec::new())?;
                self.arena.append(list, &self.stack[from..])?;
                self.stack.truncate(from);
                self.push(Value::List(list))
            }
            op::DICT => {
                let from = self.pop_mark()?;
                let dict = self.arena.new_dict()?;
                self.fill_dict(dict, from)?;
                self.push(Value::Dict(dict))
            }
            op::DUP => {
                let top = self.top()?;
                self.arena.share(top);
                self.push(top)
            }
            // POP takes a mark where one is on top.
            op::POP if self.marks.last() == Some(&self.stack.len()) => self.pop_mark().map(drop),
            op::POP => self.pop().map(drop),
            op::POP_MARK => {
                let from = self.pop_mark()?;
                self.stack.truncate(from);
                Ok(())
            }
            _ => Err(self.refuse(opcode)),
        }
    }

    /// Why an opcode is not run.
    #[cold]
    fn refuse(&self, opcode: u8) -> TraceError {
        let offset = self.arena.at;
        let code = |opcode| TraceError::Code { offset, opcode };
        let other = |opcode| self.broken("the plain data of a snapshot", format!("a {opcode}"));
        match opcode {
            b'c' => code("GLOBAL"),
            b'i' => code("INST"),
            b'o' => code("OBJ"),
            b'R' => code("REDUCE"),
            b'b' => code("BUILD"),
            b'P' => code("PERSID"),
            b'Q' => code("BINPERSID"),
            0x81 => code("NEWOBJ"),
            0x82 => code("EXT1"),
            0x83 => code("EXT2"),
            0x84 => code("EXT4"),
            0x92 => code("NEWOBJ_EX"),
            0x93 => code("STACK_GLOBAL"),
            b'S' => other("string of Python 2"),
            0x8f..=0x91 => other("set"),
            0x97 | 0x98 => other("buffer kept outside the file"),
            _ => self.broken("a pickle opcode", format!("the byte {opcode:#04x}")),
        }
    }

    #[cold]
    fn broken(&self, expected: &str, found: impl Into<String>) -> TraceError {
        self.arena.broken(expected, found)
    }

    fn check_memory(&mut self) -> Result<(), TraceError> {
        let values = self.stack.len() * size_of::<Value>();
        let marks = self.marks.len() * size_of::<usize>();
        self.source.check_memory(self.arena.held() + values + marks, self.arena.at)?;
        self.next_check = self.arena.at + CHUNK as u64;
        Ok(())
    }

    /// The height below which values belong to an outer mark.
    #[inline]
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    #[inline]
    fn pop_mark(&mut self) -> Result<usize, TraceError> {
        self.marks.pop().ok_or_else(|| self.broken("a mark", "none on the stack"))
    }

    #[inline]
    fn top(&self) -> Result<Value, TraceError> {
        match self.stack.last() {
            Some(&value) if self.stack.len() > self.floor() => Ok(value),
            _ => Err(self.broken("a value", "none on the stack")),
        }
    }

    /// Always `Ok`, so that an opcode's arm can end with it.
    #[inline]
    fn push(&mut self, value: Value) -> Result<(), TraceError> {
        self.stack.push(value);
        Ok(())
    }

    #[inline]
    fn pop(&mut self) -> Result<Value, TraceError> {
        let value = self.top()?;
        self.stack.pop();
        Ok(value)
    }

    /// The container that the values from `from` on go into: the value below them.
    #[inline]
    fn below(&self, from: usize) -> Option<Value> {
        let place = from.checked_sub(1).filter(|&place| place >= self.floor())?;
        self.stack.get(place).copied()
    }

    #[inline]
    fn set_items(&mut self, from: usize) -> Result<(), TraceError> {
        let Some(Value::Dict(dict)) = self.below(from) else {
            return Err(self.broken("a dict to put items into", "none below them"));
        };
        self.fill_dict(dict, from)
    }

    #[inline]
    fn fill_dict(&mut self, dict: u32, from: usize) -> Result<(), TraceError> {
        let (items, odd) = self.stack[from..].as_chunks();
        if !odd.is_empty() {
            return Err(self.broken("keys with a value each", "a key without one"));
        }
        self.arena.extend(dict, items)?;
        self.stack.truncate(from);
        Ok(())
    }

    #[inline]
    fn append(&mut self, from: usize) -> Result<(), TraceError> {
        let Some(Value::List(list)) = self.below(from) else {
            return Err(self.broken("a list to append to", "none below the values"));
        };
        self.arena.append(list, &self.stack[from..])?;
        self.stack.truncate(from);
        Ok(())
    }

    #[inline]
    fn tuple(&mut self, len: usize) -> Result<(), TraceError> {
        let from = self.stack.len().checked_sub(len).filter(|&from| from >= self.floor());
        let Some(from) = from else {
            return Err(self.broken("the values of a tuple", "too few on the stack"));
        };
        let tuple = self.arena.new_tuple(&self.stack[from..])?;
        self.stack.truncate(from);
        self.push(tuple)
    }

    #[inline]
    fn get(&mut self, index: impl Operand<'r>) -> Result<(), TraceError> {
        let index = index(self.source)?;
        let value = self.arena.recall(index)?;
        self.push(value)
    }

    #[inline]
    fn put(&mut self, index: impl Operand<'r>) -> Result<(), TraceError> {
        let index = index(self.source)?;
        let top = self.top()?;
        self.arena.memoize(index, top);
        Ok(())
    }

    #[inline]
    fn long1(&mut self) -> Result<(), TraceError> {
        let len = self.source.byte()?;
        let value = long(self.source.slice(len.into())?);
        self.push(value)
    }

    fn text(&mut self, len: impl Operand<'r>) -> Result<(), TraceError> {
        let len = len(self.source)?;
        let bytes = match usize::try_from(len) {
            Ok(len) if len <= CHUNK => self.source.slice(len)?,
            _ => {
                self.source.copy(len, &mut self.scratch)?;
                &self.scratch
            }
        };
        // Python lets lone surrogates into a str; a file name with one is still worth showing.
        let id = self.arena.intern(&String::from_utf8_lossy(bytes))?;
        self.push(Value::Str(id))
    }

    fn bytes(&mut self, len: impl Operand<'r>) -> Result<(), TraceError> {
        let len = len(self.source)?;
        self.source.skip(len)?;
        self.push(Value::Bytes)
    }
}

/// How an opcode's number, a length or a place in the memo, is written in the file.
trait Operand<'r>: FnOnce(&mut Source<'r>) -> Result<u64, TraceError> {}

impl<'r, F: FnOnce(&mut Source<'r>) -> Result<u64, TraceError>> Operand<'r> for F {}

/// A little-endian two's complement integer of any length.
#[inline]
fn long(bytes: &[u8]) -> Value {
    let negative = bytes.last().is_some_and(|&top| top >= 0x80);
    let sign = if negative { 0xff } else { 0 };
    let (low, high) = bytes.split_at(bytes.len().min(8));
    let mut word = [sign; 8];
    word[..low.len()].copy_from_slice(low);
    let int = i64::from_le_bytes(word);
    match high.iter().all(|&byte| byte == sign) {
        true if (int < 0) == negative => Value::Int(int),
        true if !negative => Value::Uint(int.cast_unsigned()),
        _ => Value::Huge,
    }
}

/// The value of an INT, LONG or FLOAT line: numbers as text, from protocol 0.
fn number(opcode: u8, line: &[u8]) -> Option<Value> {
    let line = str::from_utf8(line).ok()?;
    match (opcode, line) {
        (op::INT, "00") => return Some(Value::Bool(false)),
        (op::INT, "01") => return Some(Value::Bool(true)),
        (op::FLOAT, _) => return line.parse().ok().map(Value::Float),
        _ => {}
    }
    let digits = line.strip_suffix('L').unwrap_or(line);
    let plain = digits.strip_prefix('-').unwrap_or(digits);
    if plain.is_empty() || !plain.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let int = digits.parse().map(Value::Int).or_else(|_| digits.parse().map(Value::Uint));
    Some(int.unwrap_or(Value::Huge))
}

/// The text of a UNICODE line: Latin-1, and `\uXXXX` or `\UXXXXXXXX` for the rest.
fn unescape(line: &[u8]) -> String {
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while let [byte, tail @ ..] = rest {
        let escaped = match tail {
            [b'u', digits @ ..] if *byte == b'\\' => hex(digits, 4),
            [b'U', digits @ ..] if *byte == b'\\' => hex(digits, 8),
            _ => None,
        };
        let (char, tail) = escaped.unwrap_or((char::from(*byte), tail));
        text.push(char);
        rest = tail;
    }
    text
}

fn hex(digits: &[u8], len: usize) -> Option<(char, &[u8])> {
    let (digits, rest) = digits.split_at_checked(len)?;
    let code = u32::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?;
    Some((char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER), rest))
}

/// Pickles written by hand, for the tests of this crate.
#[cfg(test)]
pub(crate) mod write {
    use super::op;

    pub(crate) fn int(int: i64) -> Vec<u8> {
        [&[op::LONG1, 8][..], &int.to_le_bytes()].concat()
    }

    pub(crate) fn text(text: &str) -> Vec<u8> {
        let len = u32::try_from(text.len()).unwrap();
        [&[op::BINUNICODE][..], &len.to_le_bytes(), text.as_bytes()].concat()
    }

    pub(crate) fn list(values: &[Vec<u8>]) -> Vec<u8> {
        [&[op::EMPTY_LIST, op::MARK][..], &values.concat(), &[op::APPENDS]].concat()
    }

    pub(crate) fn pair(a: i64, b: i64) -> Vec<u8> {
        [&int(a)[..], &int(b), &[op::TUPLE2]].concat()
    }

    pub(crate) fn dict(items: &[(&str, Vec<u8>)]) -> Vec<u8> {
        let items: Vec<_> =
            items.iter().flat_map(|(key, value)| [text(key), value.clone()]).collect();
        [&[op::EMPTY_DICT, op::MARK][..], &items.concat(), &[op::SETITEMS]].concat()
    }

    /// A snapshot of one device with these events.
    pub(crate) fn snapshot(events: &[Vec<u8>]) -> Vec<u8> {
        top(&[("segments", list(&[])), ("device_traces", list(&[list(events)]))])
    }

    pub(crate) fn top(items: &[(&str, Vec<u8>)]) -> Vec<u8> {
        [dict(items), vec![op::STOP]].concat()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::write::{dict, int, list, snapshot, text, top};
    use super::*;
    use crate::arena::List;
    use crate::open::{Limits, read};
    use crate::snapshot::{Action, BlockState, Event, Snapshot};

    // One snapshot, as Python's pickle writes it: two events share a list of frames, a third has
    // one of its own that is equal, and some numbers need all their bits.
    const PROTOCOL_0: &[u8] = b"(dp0\nVsegments\np1\n(lp2\n(dp3\nVdevice\np4\nI0\nsVaddress\np5\nL140737488355328L\nsVtota\
        l_size\np6\nI2097152\nsVstream\np7\nI0\nsVsegment_type\np8\nVsmall\np9\nsVsegment_pool_id\
        \np10\n(I0\nI0\ntp11\nsVis_expandable\np12\nI00\nsVframes\np13\n(lp14\n(dp15\nVname\np16\n\
        Vstep\np17\nsVfilename\np18\nVtr\xe9n.py\np19\nsVline\np20\nI88\nsa(dp21\ng16\nV<module>\n\
        p22\nsg18\ng19\nsg20\nI144\nsasVblocks\np23\n(lp24\n(dp25\ng5\nL140737488355328L\nsVsize\n\
        p26\nI512\nsVrequested_size\np27\nI500\nsVstate\np28\nVactive_allocated\np29\nsg13\ng14\ns\
        a(dp30\ng5\nL140737488355840L\nsg26\nI2096640\nsg27\nI0\nsg28\nVinactive\np31\nsg13\n(lp32\
        \nsasasVdevice_traces\np33\n(lp34\n(lp35\n(dp36\nVaction\np37\nVsegment_alloc\np38\nsVaddr\
        \np39\nL140737488355328L\nsg26\nI2097152\nsg7\nI0\nsVtime_us\np40\nL1794709563093091L\nsVc\
        ompile_context\np41\nVN/A\np42\nsVpool_id\np43\ng11\nsa(dp44\ng37\nValloc\np45\nsg39\nL140\
        737488355328L\nsg26\nI500\nsg7\nI-1\nsg40\nL1794709563093092L\nsg41\ng42\nsg43\n(I3\nI7000\
        0\ntp46\nsg13\ng14\nsa(dp47\ng37\nVfree_requested\np48\nsg39\nL140737488355328L\nsg26\nI50\
        0\nsg7\nL9223372036854775813L\nsg40\nL1794709563093093L\nsg41\ng42\nsg13\ng14\nsa(dp49\ng3\
        7\nVfree_completed\np50\nsg39\nL140737488355328L\nsg26\nI500\nsg7\nI0\nsg40\nL179470956309\
        3094L\nsg41\ng42\nsg13\n(lp51\n(dp52\ng16\ng17\nsg18\ng19\nsg20\nI88\nsa(dp53\ng16\ng22\ns\
        g18\ng19\nsg20\nI144\nsasa(dp54\ng37\nVoom\np55\nsVdevice_free\np56\nL12345678901L\nsg26\n\
        I300\nsg7\nI0\nsg40\nL1794709563093095L\nsg13\n(lp57\ng21\nasaa(lp58\nasVallocator_setting\
        s\np59\n(dp60\nVPYTORCH_CUDA_ALLOC_CONF\np61\nVx:1\np62\nsVmax_split_size\np63\nI-1\nsVgar\
        bage_collection_threshold\np64\nF0.5\nsVexpandable_segments\np65\nI01\nsVroundup_power2_di\
        visions\np66\n(dp67\nV1\np68\nI0\nsV2\np69\nI4\nsssVexternal_annotations\np70\n(lp71\n(dp7\
        2\ng16\nVraw\np73\nsVbig\np74\nL1208925819614629174706176L\nsVnone\np75\nNsas.";

    const PROTOCOL_1: &[u8] =
        b"}q\x00(X\x08\x00\x00\x00segmentsq\x01]q\x02}q\x03(X\x06\x00\x00\x00deviceq\x04K\x00X\x07\
        \x00\x00\x00addressq\x05L140737488355328L\nX\n\x00\x00\x00total_sizeq\x06J\x00\x00 \x00X\
        \x06\x00\x00\x00streamq\x07K\x00X\x0c\x00\x00\x00segment_typeq\x08X\x05\x00\x00\x00smallq\
        \tX\x0f\x00\x00\x00segment_pool_idq\n(K\x00K\x00tq\x0bX\r\x00\x00\x00is_expandableq\x0cI00\
        \nX\x06\x00\x00\x00framesq\r]q\x0e(}q\x0f(X\x04\x00\x00\x00nameq\x10X\x04\x00\x00\x00stepq\
        \x11X\x08\x00\x00\x00filenameq\x12X\x08\x00\x00\x00tr\xc3\xa9n.pyq\x13X\x04\x00\x00\x00lin\
        eq\x14KXu}q\x15(h\x10X\x08\x00\x00\x00<module>q\x16h\x12h\x13h\x14K\x90ueX\x06\x00\x00\x00\
        blocksq\x17]q\x18(}q\x19(h\x05L140737488355328L\nX\x04\x00\x00\x00sizeq\x1aM\x00\x02X\x0e\
        \x00\x00\x00requested_sizeq\x1bM\xf4\x01X\x05\x00\x00\x00stateq\x1cX\x10\x00\x00\x00active\
        _allocatedq\x1dh\rh\x0eu}q\x1e(h\x05L140737488355840L\nh\x1aJ\x00\xfe\x1f\x00h\x1bK\x00h\
        \x1cX\x08\x00\x00\x00inactiveq\x1fh\r]q ueuaX\r\x00\x00\x00device_tracesq!]q\"(]q#(}q$(X\
        \x06\x00\x00\x00actionq%X\r\x00\x00\x00segment_allocq&X\x04\x00\x00\x00addrq'L140737488355\
        328L\nh\x1aJ\x00\x00 \x00h\x07K\x00X\x07\x00\x00\x00time_usq(L1794709563093091L\nX\x0f\x00\
        \x00\x00compile_contextq)X\x03\x00\x00\x00N/Aq*X\x07\x00\x00\x00pool_idq+h\x0bu}q,(h%X\x05\
        \x00\x00\x00allocq-h'L140737488355328L\nh\x1aM\xf4\x01h\x07J\xff\xff\xff\xffh(L17947095630\
        93092L\nh)h*h+(K\x03Jp\x11\x01\x00tq.h\rh\x0eu}q/(h%X\x0e\x00\x00\x00free_requestedq0h'L14\
        0737488355328L\nh\x1aM\xf4\x01h\x07L9223372036854775813L\nh(L1794709563093093L\nh)h*h\rh\
        \x0eu}q1(h%X\x0e\x00\x00\x00free_completedq2h'L140737488355328L\nh\x1aM\xf4\x01h\x07K\x00h\
        (L1794709563093094L\nh)h*h\r]q3(}q4(h\x10h\x11h\x12h\x13h\x14KXu}q5(h\x10h\x16h\x12h\x13h\
        \x14K\x90ueu}q6(h%X\x03\x00\x00\x00oomq7X\x0b\x00\x00\x00device_freeq8L12345678901L\nh\x1a\
        M,\x01h\x07K\x00h(L1794709563093095L\nh\r]q9h\x15aue]q:eX\x12\x00\x00\x00allocator_setting\
        sq;}q<(X\x17\x00\x00\x00PYTORCH_CUDA_ALLOC_CONFq=X\x03\x00\x00\x00x:1q>X\x0e\x00\x00\x00ma\
        x_split_sizeq?J\xff\xff\xff\xffX\x1c\x00\x00\x00garbage_collection_thresholdq@G?\xe0\x00\
        \x00\x00\x00\x00\x00X\x13\x00\x00\x00expandable_segmentsqAI01\nX\x18\x00\x00\x00roundup_po\
        wer2_divisionsqB}qC(X\x01\x00\x00\x001qDK\x00X\x01\x00\x00\x002qEK\x04uuX\x14\x00\x00\x00e\
        xternal_annotationsqF]qG}qH(h\x10X\x03\x00\x00\x00rawqIX\x03\x00\x00\x00bigqJL120892581961\
        4629174706176L\nX\x04\x00\x00\x00noneqKNuau.";

    const PROTOCOL_2: &[u8] =
        b"\x80\x02}q\x00(X\x08\x00\x00\x00segmentsq\x01]q\x02}q\x03(X\x06\x00\x00\x00deviceq\x04K\
        \x00X\x07\x00\x00\x00addressq\x05\x8a\x07\x00\x00\x00\x00\x00\x80\x00X\n\x00\x00\x00total_\
        sizeq\x06J\x00\x00 \x00X\x06\x00\x00\x00streamq\x07K\x00X\x0c\x00\x00\x00segment_typeq\x08\
        X\x05\x00\x00\x00smallq\tX\x0f\x00\x00\x00segment_pool_idq\nK\x00K\x00\x86q\x0bX\r\x00\x00\
        \x00is_expandableq\x0c\x89X\x06\x00\x00\x00framesq\r]q\x0e(}q\x0f(X\x04\x00\x00\x00nameq\
        \x10X\x04\x00\x00\x00stepq\x11X\x08\x00\x00\x00filenameq\x12X\x08\x00\x00\x00tr\xc3\xa9n.p\
        yq\x13X\x04\x00\x00\x00lineq\x14KXu}q\x15(h\x10X\x08\x00\x00\x00<module>q\x16h\x12h\x13h\
        \x14K\x90ueX\x06\x00\x00\x00blocksq\x17]q\x18(}q\x19(h\x05\x8a\x07\x00\x00\x00\x00\x00\x80\
        \x00X\x04\x00\x00\x00sizeq\x1aM\x00\x02X\x0e\x00\x00\x00requested_sizeq\x1bM\xf4\x01X\x05\
        \x00\x00\x00stateq\x1cX\x10\x00\x00\x00active_allocatedq\x1dh\rh\x0eu}q\x1e(h\x05\x8a\x07\
        \x00\x02\x00\x00\x00\x80\x00h\x1aJ\x00\xfe\x1f\x00h\x1bK\x00h\x1cX\x08\x00\x00\x00inactive\
        q\x1fh\r]q ueuaX\r\x00\x00\x00device_tracesq!]q\"(]q#(}q$(X\x06\x00\x00\x00actionq%X\r\x00\
        \x00\x00segment_allocq&X\x04\x00\x00\x00addrq'\x8a\x07\x00\x00\x00\x00\x00\x80\x00h\x1aJ\
        \x00\x00 \x00h\x07K\x00X\x07\x00\x00\x00time_usq(\x8a\x07c\xb0\xfbaG`\x06X\x0f\x00\x00\x00\
        compile_contextq)X\x03\x00\x00\x00N/Aq*X\x07\x00\x00\x00pool_idq+h\x0bu}q,(h%X\x05\x00\x00\
        \x00allocq-h'\x8a\x07\x00\x00\x00\x00\x00\x80\x00h\x1aM\xf4\x01h\x07J\xff\xff\xff\xffh(\
        \x8a\x07d\xb0\xfbaG`\x06h)h*h+K\x03Jp\x11\x01\x00\x86q.h\rh\x0eu}q/(h%X\x0e\x00\x00\x00fre\
        e_requestedq0h'\x8a\x07\x00\x00\x00\x00\x00\x80\x00h\x1aM\xf4\x01h\x07\x8a\t\x05\x00\x00\
        \x00\x00\x00\x00\x80\x00h(\x8a\x07e\xb0\xfbaG`\x06h)h*h\rh\x0eu}q1(h%X\x0e\x00\x00\x00free\
        _completedq2h'\x8a\x07\x00\x00\x00\x00\x00\x80\x00h\x1aM\xf4\x01h\x07K\x00h(\x8a\x07f\xb0\
        \xfbaG`\x06h)h*h\r]q3(}q4(h\x10h\x11h\x12h\x13h\x14KXu}q5(h\x10h\x16h\x12h\x13h\x14K\x90ue\
        u}q6(h%X\x03\x00\x00\x00oomq7X\x0b\x00\x00\x00device_freeq8\x8a\x055\x1c\xdc\xdf\x02h\x1aM\
        ,\x01h\x07K\x00h(\x8a\x07g\xb0\xfbaG`\x06h\r]q9h\x15aue]q:eX\x12\x00\x00\x00allocator_sett\
        ingsq;}q<(X\x17\x00\x00\x00PYTORCH_CUDA_ALLOC_CONFq=X\x03\x00\x00\x00x:1q>X\x0e\x00\x00\
        \x00max_split_sizeq?J\xff\xff\xff\xffX\x1c\x00\x00\x00garbage_collection_thresholdq@G?\xe0\
        \x00\x00\x00\x00\x00\x00X\x13\x00\x00\x00expandable_segmentsqA\x88X\x18\x00\x00\x00roundup\
        _power2_divisionsqB}qC(X\x01\x00\x00\x001qDK\x00X\x01\x00\x00\x002qEK\x04uuX\x14\x00\x00\
        \x00external_annotationsqF]qG}qH(h\x10X\x03\x00\x00\x00rawqIX\x03\x00\x00\x00bigqJ\x8a\x0b\
        \x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01X\x04\x00\x00\x00noneqKNuau.";

    pub(crate) const PROTOCOL_4: &[u8] = b"\x80\x04\x95\x16\x04\x00\x00\x00\x00\x00\x00}\x94(\x8c\x08segments\x94]\x94}\x94(\x8c\x06d\
        evice\x94K\x00\x8c\x07address\x94\x8a\x07\x00\x00\x00\x00\x00\x80\x00\x8c\ntotal_size\x94J\
        \x00\x00 \x00\x8c\x06stream\x94K\x00\x8c\x0csegment_type\x94\x8c\x05small\x94\x8c\x0fsegme\
        nt_pool_id\x94K\x00K\x00\x86\x94\x8c\ris_expandable\x94\x89\x8c\x06frames\x94]\x94(}\x94(\
        \x8c\x04name\x94\x8c\x04step\x94\x8c\x08filename\x94\x8c\x08tr\xc3\xa9n.py\x94\x8c\x04line\
        \x94KXu}\x94(h\x10\x8c\x08<module>\x94h\x12h\x13h\x14K\x90ue\x8c\x06blocks\x94]\x94(}\x94(\
        h\x05\x8a\x07\x00\x00\x00\x00\x00\x80\x00\x8c\x04size\x94M\x00\x02\x8c\x0erequested_size\
        \x94M\xf4\x01\x8c\x05state\x94\x8c\x10active_allocated\x94h\rh\x0eu}\x94(h\x05\x8a\x07\x00\
        \x02\x00\x00\x00\x80\x00h\x1aJ\x00\xfe\x1f\x00h\x1bK\x00h\x1c\x8c\x08inactive\x94h\r]\x94u\
        eua\x8c\rdevice_traces\x94]\x94(]\x94(}\x94(\x8c\x06action\x94\x8c\rsegment_alloc\x94\x8c\
        \x04addr\x94\x8a\x07\x00\x00\x00\x00\x00\x80\x00h\x1aJ\x00\x00 \x00h\x07K\x00\x8c\x07time_\
        us\x94\x8a\x07c\xb0\xfbaG`\x06\x8c\x0fcompile_context\x94\x8c\x03N/A\x94\x8c\x07pool_id\
        \x94h\x0bu}\x94(h%\x8c\x05alloc\x94h'\x8a\x07\x00\x00\x00\x00\x00\x80\x00h\x1aM\xf4\x01h\
        \x07J\xff\xff\xff\xffh(\x8a\x07d\xb0\xfbaG`\x06h)h*h+K\x03Jp\x11\x01\x00\x86\x94h\rh\x0eu}\
        \x94(h%\x8c\x0efree_requested\x94h'\x8a\x07\x00\x00\x00\x00\x00\x80\x00h\x1aM\xf4\x01h\x07\
        \x8a\t\x05\x00\x00\x00\x00\x00\x00\x80\x00h(\x8a\x07e\xb0\xfbaG`\x06h)h*h\rh\x0eu}\x94(h%\
        \x8c\x0efree_completed\x94h'\x8a\x07\x00\x00\x00\x00\x00\x80\x00h\x1aM\xf4\x01h\x07K\x00h(\
        \x8a\x07f\xb0\xfbaG`\x06h)h*h\r]\x94(}\x94(h\x10h\x11h\x12h\x13h\x14KXu}\x94(h\x10h\x16h\
        \x12h\x13h\x14K\x90ueu}\x94(h%\x8c\x03oom\x94\x8c\x0bdevice_free\x94\x8a\x055\x1c\xdc\xdf\
        \x02h\x1aM,\x01h\x07K\x00h(\x8a\x07g\xb0\xfbaG`\x06h\r]\x94h\x15aue]\x94e\x8c\x12allocator\
        _settings\x94}\x94(\x8c\x17PYTORCH_CUDA_ALLOC_CONF\x94\x8c\x03x:1\x94\x8c\x0emax_split_siz\
        e\x94J\xff\xff\xff\xff\x8c\x1cgarbage_collection_threshold\x94G?\xe0\x00\x00\x00\x00\x00\
        \x00\x8c\x13expandable_segments\x94\x88\x8c\x18roundup_power2_divisions\x94}\x94(\x8c\x011\
        \x94K\x00\x8c\x012\x94K\x04uu\x8c\x14external_annotations\x94]\x94}\x94(h\x10\x8c\x03raw\
        \x94\x8c\x03big\x94\x8a\x0b\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x8c\x04none\x94Nua\
        u.";

    /// The same pickle under every protocol; 2 and 3 differ in their header only, as do 4 and 5.
    fn pickles() -> [Vec<u8>; 6] {
        let [mut three, mut five] = [PROTOCOL_2.to_vec(), PROTOCOL_4.to_vec()];
        (three[1], five[1]) = (3, 5);
        [
            PROTOCOL_0.to_vec(),
            PROTOCOL_1.to_vec(),
            PROTOCOL_2.to_vec(),
            three,
            PROTOCOL_4.to_vec(),
            five,
        ]
    }

    fn load(pickle: &[u8]) -> Result<Snapshot, TraceError> {
        read(pickle, &Limits::default())
    }

    fn value(pickle: &[u8]) -> Result<Value, TraceError> {
        let mut input = pickle;
        let mut source = Source::new(&mut input, &Limits::default());
        Machine::new(&mut source).run().map(|(value, _)| value)
    }

    /// The error of a pickle that cannot be read.
    fn error(pickle: &[u8]) -> TraceError {
        value(pickle).expect_err("this pickle is broken")
    }

    /// Where a pickle is broken.
    fn at(error: &TraceError) -> u64 {
        let TraceError::Broken { offset, .. } = error else { panic!("{error}") };
        offset.byte
    }

    fn alloc() -> Vec<(&'static str, Vec<u8>)> {
        vec![("action", text("alloc")), ("addr", int(512)), ("size", int(100))]
    }

    #[test]
    fn every_protocol_gives_the_same_snapshot() {
        let read: Vec<_> = pickles().iter().map(|pickle| load(pickle).unwrap()).collect();
        assert!(read.iter().all(|snapshot| *snapshot == read[0]));

        let [ref events, ref none] = read[0].devices[..] else { panic!("two devices") };
        assert!(none.is_empty());
        let start = 1_794_709_563_093_091;
        let facts: Vec<_> = events
            .iter()
            .map(|e| (e.action, e.addr, e.size, e.stream, e.time_us - start))
            .collect();
        assert_eq!(
            facts,
            [
                (Action::SegmentAlloc, 1 << 47, 2 << 20, 0, 0),
                (Action::Alloc, 1 << 47, 500, u64::MAX, 1),
                (Action::FreeRequested, 1 << 47, 500, (1 << 63) + 5, 2),
                (Action::FreeCompleted, 1 << 47, 500, 0, 3),
                (Action::Oom, 12_345_678_901, 300, 0, 4),
            ]
        );
        let pools: Vec<_> = events.iter().map(|e| e.pool).collect();
        assert_eq!(pools, [Some((0, 0)), Some((3, 70_000)), None, None, None]);

        let stacks = &read[0].stacks;
        assert_eq!(events.get(0).unwrap().stack, None);
        assert_eq!(events.get(1).unwrap().stack, events.get(2).unwrap().stack, "the same list");
        assert_eq!(events.get(1).unwrap().stack, events.get(3).unwrap().stack, "an equal list");
        let lines = |event: &Event| -> Vec<_> {
            let frames = stacks.frames(event.stack.unwrap());
            frames.map(|f| (f.name.to_string(), f.filename.to_string(), f.line)).collect()
        };
        let step = ("step".to_owned(), "trén.py".to_owned(), 88);
        let module = ("<module>".to_owned(), "trén.py".to_owned(), 144);
        assert_eq!(lines(&events.get(1).unwrap()), [step, module.clone()]);
        assert_eq!(lines(&events.get(4).unwrap()), [module]);

        let [ref segment] = read[0].segments[..] else { panic!("one segment") };
        assert!(!segment.large && segment.total_size == 2 << 20);
        assert_eq!(segment.blocks[0].state, BlockState::Allocated);
        assert_eq!(segment.blocks[1].address, (1 << 47) + 512);
        assert_eq!(read[0].settings.conf.as_deref(), Some("x:1"));
        assert_eq!(read[0].settings.roundup_power2_divisions, Some(vec![(1, 0), (2, 4)]));
    }

    #[test]
    fn numbers_of_every_kind() {
        let cases: [(&[u8], Value); 17] = [
            (b"K\xff.", Value::Int(255)),
            (b"M\xff\xff.", Value::Int(65_535)),
            (b"J\xff\xff\xff\xff.", Value::Int(-1)),
            (b"\x8a\x00.", Value::Int(0)),
            (b"\x8a\x01\x80.", Value::Int(-128)),
            (b"\x8a\x02\xff\x00.", Value::Int(255)),
            (b"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80.", Value::Int(i64::MIN)),
            (b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00.", Value::Uint(u64::MAX)),
            (b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\xff.", Value::Int(-1)),
            (b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01.", Value::Huge),
            (b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\xff.", Value::Huge),
            (b"\x8b\x01\x00\x00\x00\x07.", Value::Int(7)),
            (b"I-5\n.", Value::Int(-5)),
            (b"I01\n.", Value::Bool(true)),
            (b"L18446744073709551615L\n.", Value::Uint(u64::MAX)),
            (b"L-18446744073709551615L\n.", Value::Huge),
            (b"F-2.5e3\n.", Value::Float(-2500.0)),
        ];
        for (pickle, expected) in cases {
            assert_eq!(value(pickle).unwrap(), expected, "{pickle:?}");
        }
        for pickle in [&b"I\n."[..], b"Ix\n.", b"L--1L\n.", b"Fx\n.", b"\x8b\xff\xff\xff\xff."] {
            assert!(at(&error(pickle)) == 0, "{pickle:?}");
        }
    }

    #[test]
    fn the_memo_may_be_sparse() {
        // Writes number 4,294,967,295 and reads it back; nothing is made that long.
        let pickle = b"K\x05r\xff\xff\xff\xff0K\x06j\xff\xff\xff\xff.";
        assert_eq!(value(pickle).unwrap(), Value::Int(5));
        // MEMOIZE counts entries, as Python does, and later entries replace earlier ones.
        assert_eq!(value(b"K\x05q\x010K\x06\x940K\x07h\x01.").unwrap(), Value::Int(6));
        assert_eq!(value(b"K\x05p99999999999\n0g99999999999\n.").unwrap(), Value::Int(5));
        assert!(error(b"h\x00.").to_string().contains("byte 0"));
    }

    #[test]
    fn text_is_never_a_reason_to_stop() {
        assert_eq!(unescape(br"a\u00e9\U0001f600\ud800\q\u12"), "aé😀\u{fffd}\\q\\u12");
        // A lone surrogate, which Python allows.
        assert!(matches!(value(b"\x8c\x03\xed\xa0\x80.").unwrap(), Value::Str(_)));
        let long = "x".repeat(3 * CHUNK);
        assert!(matches!(value(&[text(&long), vec![op::STOP]].concat()), Ok(Value::Str(_))));
    }

    #[test]
    fn pop_takes_marks_and_values() {
        assert_eq!(value(b"K\x01(0.").unwrap(), Value::Int(1));
        assert_eq!(value(b"K\x01(K\x02K\x031.").unwrap(), Value::Int(1));
        assert_eq!(value(b"K\x01K\x020.").unwrap(), Value::Int(1));
        assert_eq!(value(b"K\x012\x86.").unwrap().kind(), "a tuple");
        assert_eq!(value(b"C\x02ab.").unwrap(), Value::Bytes);
    }

    #[test]
    fn stack_faults_are_errors() {
        let broken: [&[u8]; 15] = [
            b".",
            b"0",
            b"1",
            b"2",
            b"a",
            b"e",
            b"s",
            b"u",
            b"t",
            b"\x85",
            b"\x94",
            b"K\x01(.",
            b"](K\x01a",
            b"}(K\x01u",
            b"}K\x01K\x02(s",
        ];
        for pickle in broken {
            assert!(matches!(error(pickle), TraceError::Broken { .. }), "{pickle:?}");
        }
    }

    #[test]
    fn code_is_refused() {
        let shell = error(b"\x80\x02cos\nsystem\n\x8c\x02ls\x85R.");
        assert!(matches!(shell, TraceError::Code { offset: 2, opcode: "GLOBAL" }), "{shell}");
        let opcodes = b"ciobRPQ\x81\x82\x83\x84\x92\x93";
        for &opcode in opcodes {
            assert!(matches!(error(&[b'N', opcode]), TraceError::Code { offset: 1, .. }));
        }
        for opcode in [b'S', 0x8f, 0x97, 0, 0xff] {
            assert!(at(&error(&[opcode])) == 0);
        }
    }

    #[test]
    fn every_cut_is_an_error() {
        for pickle in pickles() {
            for len in 0..pickle.len() {
                assert!(load(&pickle[..len]).is_err(), "cut to {len}");
            }
        }
    }

    #[test]
    fn an_absurd_length_is_a_cut_file() {
        for opcode in [op::BINUNICODE8, op::BINBYTES8] {
            let error = error(&[&[opcode][..], &(1_u64 << 60).to_le_bytes(), b"abc"].concat());
            let TraceError::Broken { offset, expected, found, .. } = error else {
                panic!("{error}")
            };
            assert_eq!((offset.byte, &found[..]), (12, "the end of the file"));
            assert_eq!(expected, format!("{} more bytes", (1_u64 << 60) - 3));
        }
    }

    #[test]
    fn a_million_deep_is_not_too_deep() {
        let deep = 1_000_000;
        let nested = [vec![op::EMPTY_LIST; deep], vec![op::APPEND; deep - 1]].concat();
        let tuples = [vec![op::EMPTY_TUPLE], vec![op::TUPLE1; deep]].concat();
        let dicts = [b"}N".repeat(deep), vec![op::NONE], vec![op::SETITEM; deep]].concat();
        for mut pickle in [nested, tuples, dicts] {
            pickle.push(op::STOP);
            assert!(value(&pickle).is_ok());
            assert!(matches!(load(&pickle), Err(TraceError::Snapshot { .. })));
        }
    }

    #[test]
    fn an_event_is_read_once() {
        // The dict is memoised, appended, and asked for again.
        let event = [dict(&alloc()), vec![op::BINPUT, 0]].concat();
        let again = snapshot(&[event.clone(), vec![op::APPENDS, op::MARK, op::BINGET, 0]]);
        let error = load(&again).expect_err("the dict is gone");
        let at = again.iter().rposition(|&byte| byte == op::BINGET).unwrap() as u64;
        assert!(self::at(&error) == at, "{error}");
        // Also where another event has taken its place, and where it comes twice at once.
        let later = [vec![op::APPENDS, op::MARK], dict(&alloc()), vec![op::BINGET, 0]].concat();
        assert!(load(&snapshot(&[event.clone(), later])).is_err());
        assert!(load(&snapshot(&[event, vec![op::DUP]])).is_err());
        // A list of events takes nothing else.
        assert!(load(&snapshot(&[dict(&alloc()), int(1)])).is_err());
        assert!(load(&snapshot(&[dict(&alloc()), dict(&[])])).is_err());
    }

    #[test]
    fn an_event_may_be_filled_bit_by_bit() {
        // Key by key, `action` last, as no known writer does.
        let mut late = vec![op::EMPTY_DICT];
        for (key, value) in alloc().iter().rev() {
            late.extend([text(key), value.clone(), vec![op::SETITEM]].concat());
        }
        let twice = [dict(&alloc()), text("size"), int(7), vec![op::SETITEM]].concat();
        let events = &load(&snapshot(&[late, twice])).unwrap().devices[0];
        assert_eq!(
            (
                events.get(0).unwrap().action,
                events.get(0).unwrap().addr,
                events.get(0).unwrap().size
            ),
            (Action::Alloc, 512, 100)
        );
        assert_eq!(events.get(1).unwrap().size, 7);
    }

    #[test]
    fn places_of_events_are_used_again() {
        let one = [vec![op::MARK], dict(&alloc()), vec![op::APPENDS]].concat();
        let pickle = [vec![op::EMPTY_LIST], one.repeat(1000), vec![op::STOP]].concat();
        let mut input = &pickle[..];
        let mut source = Source::new(&mut input, &Limits::default());
        let (_, arena) = Machine::new(&mut source).run().unwrap();
        assert_eq!(arena.dicts.len(), 1);
        assert!(matches!(&arena.lists[0].holds, List::Events(events) if events.len() == 1000));
    }

    #[test]
    fn places_of_what_is_in_events_are_used_again() {
        // Each event has its own list of frames, its own pool and something of another version, all
        // in the memo, as Python writes them.
        let memo = vec![op::MEMOIZE];
        let frame = dict(&[("name", text("f")), ("line", int(1))]);
        let event = |n: i64| {
            let frames = [list(&[[frame.clone(), memo.clone()].concat()]), memo.clone()].concat();
            let pool = [list(&[int(0), int(n % 3)]), memo.clone()].concat();
            let novelty = [list(&[dict(&[("deep", list(&[]))])]), memo.clone()].concat();
            let more = [("frames", frames), ("pool_id", pool), ("novelty", novelty)];
            [dict(&[&alloc()[..], &more].concat()), memo.clone()].concat()
        };
        let one = |n| [vec![op::MARK], event(n), vec![op::APPENDS]].concat();
        let all: Vec<u8> = (0..1000).flat_map(one).collect();
        let pickle = [vec![op::EMPTY_LIST], all, vec![op::STOP]].concat();
        let mut input = &pickle[..];
        let mut source = Source::new(&mut input, &Limits::default());
        let (_, arena) = Machine::new(&mut source).run().unwrap();
        assert!(arena.dicts.len() < 10 && arena.lists.len() < 10);
        assert!(arena.held() < 60_000, "{}", arena.held());
        let List::Events(events) = &arena.lists[0].holds else { panic!("no events") };
        assert!(events.iter().zip(0..).all(|(event, n)| event.pool == Some((0, n % 3))));
        assert!(events.iter().all(|event| event.stack == events.get(0).unwrap().stack));
    }

    #[test]
    fn what_was_read_may_be_named_again() {
        // Frames, a frame, an empty list, a pool and something of another version: once in the first
        // event, and from the memo in the second.
        let put = |value: Vec<u8>, n: u8| [value, vec![op::BINPUT, n]].concat();
        let frame = put(dict(&[("name", text("f"))]), 0);
        let parts = [
            ("frames", put(list(&[frame]), 1)),
            ("pool_id", put(list(&[int(1), int(2)]), 2)),
            ("novelty", put(list(&[put(dict(&[]), 3)]), 4)),
        ];
        let get = |n: u8| vec![op::BINGET, n];
        let again = [("frames", get(1)), ("pool_id", get(2)), ("novelty", list(&[get(3), get(4)]))];
        let own = [("frames", list(&[get(0)])), ("pool_id", get(2)), ("novelty", get(4))];
        let event = |more: &[(&str, Vec<u8>)]| dict(&[&alloc()[..], more].concat());
        let events = load(&snapshot(&[event(&parts), event(&again), event(&own)])).unwrap();
        let first = events.devices[0].get(0).unwrap();
        assert!(first.stack.is_some() && first.pool == Some((1, 2)));
        assert!(events.devices[0].iter().all(|event| event == first));
        // What was passed over is not there any more where it would matter.
        let late = [&alloc()[..], &[("frames", get(4))]].concat();
        let error = load(&snapshot(&[event(&parts), dict(&late)])).expect_err("no frames");
        assert!(error.to_string().contains("something of another use"), "{error}");
    }

    #[test]
    fn memory_has_a_limit() {
        let limits = Limits { memory_bytes: 1 << 20, ..Limits::default() };
        let many = |opcode: &[u8]| opcode.repeat(200_000);
        for pickle in [many(b"]"), many(b"}"), many(b"N"), many(b"("), many(b")"), many(b"]Na")] {
            let error = read(&[&b"\x80\x04"[..], &pickle].concat()[..], &limits)
                .expect_err("over the limit");
            assert!(matches!(error, TraceError::Limit { field: "memory_bytes", .. }), "{error}");
        }
        let long = [b"\x80\x04".to_vec(), text(&"x".repeat(2 << 20))].concat();
        let long = read(&long[..], &limits).expect_err("over the limit");
        assert!(matches!(long, TraceError::Limit { field: "memory_bytes", .. }), "{long}");
    }

    #[test]
    fn frames_of_a_wrong_kind_are_named() {
        for (frames, found) in
            [(int(1), "`frames` is an int"), (list(&[int(1)]), "a frame is an int")]
        {
            let mut items = alloc();
            items.push(("frames", frames));
            let error = load(&snapshot(&[dict(&items)])).expect_err("no frames");
            assert!(error.to_string().contains(found), "{error}");
        }
        // Frames that contain themselves, and a list that is both frames and trace.
        let own = b"}\x94(\x8c\x06action\x8c\x05alloc\x8c\x06frames](h\x00eu.";
        assert!(value(own).is_ok());
        let both = [list(&[dict(&[])]), vec![op::BINPUT, 0]].concat();
        let event = dict(&[&alloc()[..], &[("frames", both)]].concat());
        let traces = list(&[list(&[event]), vec![op::BINGET, 0]]);
        let error = load(&top(&[("segments", list(&[])), ("device_traces", traces)]));
        assert!(error.expect_err("frames, not events").to_string().contains("device_traces[1]"));
    }

    /// Opcodes that change the stack and the memo, and numbers that are short enough to matter.
    const OPCODES: &[u8] = b"()[]}{012.NaesudltqhKX\x85\x86\x87\x88\x94\x8a\x00\x01\x02\x03";

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn damage_never_panics(
            which in 0..6_usize,
            flips in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            keep in any::<prop::sample::Index>(),
            cut in prop::bool::weighted(0.2),
        ) {
            let mut pickle = pickles()[which].clone();
            for (place, byte) in flips {
                let place = place.index(pickle.len());
                pickle[place] = byte;
            }
            if cut {
                pickle.truncate(keep.index(pickle.len()));
            }
            let _ = load(&pickle);
        }

        #[test]
        fn any_opcodes_never_panic(
            codes in vec(prop::sample::select(OPCODES), 0..80),
        ) {
            let _ = load(&[&b"\x80\x04"[..], &codes].concat());
            // On top of a dict that looks like an event, in a list.
            let event = b"]\x94}\x94(\x8c\x06action\x8c\x05alloc\
                \x8c\x04addrK\x01\x8c\x04sizeK\x01u";
            let _ = load(&[&event[..], &codes].concat());
        }
    }
}
