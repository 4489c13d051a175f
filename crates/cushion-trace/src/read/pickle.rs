//! Reads pickles: runs the opcodes that a memory snapshot uses, and refuses those that load a class
//! or run code.
//!
//! The file is not trusted: values are small `Copy` handles into an arena, so nothing recurses at
//! any depth of nesting, not even a drop. The file is big and nearly all of it is events: a dict
//! with an `action` becomes a compact event as its items arrive, moves into its list when it is
//! appended, and its slot is reused for the next dict.

mod text;

use self::text::{long, number, unescape};
use super::python::arena::Arena;
use super::python::value::Value;
use super::source::{CHUNK, Source};
use crate::format::pickle::op;
use crate::model::error::{Format, TraceError};

/// The machine that runs a pickle.
#[derive(Debug)]
pub(crate) struct Machine<'s, 'r> {
    source: &'s mut Source<'r>,
    stack: Vec<Value>,
    /// The heights of the stack at each MARK.
    marks: Vec<usize>,
    arena: Arena,
    scratch: Vec<u8>,
    /// The offset of the next check of the memory limit.
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

    /// Runs the pickle to its STOP. Returns the value it built and the arena of the value.
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

    /// Runs a frequent opcode. The order is about that of their frequency in a snapshot.
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
            // The length of a frame, for readers that read frame by frame.
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
            // In protocol 0 the items come before the container.
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
            // POP removes a mark if one is on top.
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

    /// Makes the error of an opcode that is refused.
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

    /// Returns the height below which values belong to an outer mark.
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

    /// Pushes a value. Returns `Ok` so that an opcode's arm can end with the call.
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

    /// Returns the container of the values from `from` on: the value below them.
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
        // A Python str can have lone surrogates, for example in file names.
        let id = self.arena.intern(&String::from_utf8_lossy(bytes))?;
        self.push(Value::Str(id))
    }

    fn bytes(&mut self, len: impl Operand<'r>) -> Result<(), TraceError> {
        let len = len(self.source)?;
        self.source.skip(len)?;
        self.push(Value::Bytes)
    }
}

/// Reads an opcode's operand: a length or a number in the memo.
trait Operand<'r>: FnOnce(&mut Source<'r>) -> Result<u64, TraceError> {}

impl<'r, F: FnOnce(&mut Source<'r>) -> Result<u64, TraceError>> Operand<'r> for F {}

#[cfg(test)]
mod tests;
