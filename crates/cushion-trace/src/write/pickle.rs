//! Writes pickles of protocol 4 with the opcodes that PyTorch's viewer supports: no frames, no long
//! texts, no integers beyond 255 bytes, no classes or calls.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Write};

use super::sink::{Shared, Sink};
use crate::format::pickle::op;

/// The number of values of one `APPENDS`, as in Python. The viewer passes them as arguments of one
/// call, which limits their number.
const BATCH: usize = 1000;

/// Writes a pickle.
#[derive(Debug)]
pub(super) struct Pickle<'a, W> {
    out: W,
    /// The memo numbers of texts, and of stacks and frames.
    texts: HashMap<&'a str, u32>,
    shared: HashMap<Shared, u32>,
    /// The number of values in the memo.
    kept: u32,
    /// The number of values in each open list since its last `APPENDS`.
    pending: Vec<usize>,
}

impl<'a, W: Write> Pickle<'a, W> {
    pub(super) fn new(mut out: W) -> io::Result<Self> {
        out.write_all(&[op::PROTO, 4])?;
        let (texts, shared) = (HashMap::new(), HashMap::new());
        Ok(Self { out, texts, shared, kept: 0, pending: Vec::new() })
    }

    /// Puts the last value into the memo. Returns its number.
    fn memoize(&mut self) -> io::Result<u32> {
        let place = self.kept;
        self.kept = place.checked_add(1).ok_or_else(|| too_much("texts and frames"))?;
        self.out.write_all(&[op::MEMOIZE])?;
        Ok(place)
    }

    fn get(&mut self, place: u32) -> io::Result<()> {
        match u8::try_from(place) {
            Ok(place) => self.out.write_all(&[op::BINGET, place]),
            Err(_) => {
                self.out.write_all(&[op::LONG_BINGET])?;
                self.out.write_all(&place.to_le_bytes())
            }
        }
    }

    fn plain_text(&mut self, text: &str) -> io::Result<()> {
        if let Ok(len) = u8::try_from(text.len()) {
            self.out.write_all(&[op::SHORT_BINUNICODE, len])?;
        } else {
            let len = u32::try_from(text.len()).map_err(|_| too_much("bytes in one text"))?;
            self.out.write_all(&[op::BINUNICODE])?;
            self.out.write_all(&len.to_le_bytes())?;
        }
        self.out.write_all(text.as_bytes())
    }

    /// Writes an integer in as few bytes as possible.
    fn integer(&mut self, int: i128) -> io::Result<()> {
        if let Ok(byte) = u8::try_from(int) {
            return self.out.write_all(&[op::BININT1, byte]);
        }
        if let Ok(short) = u16::try_from(int) {
            let [low, high] = short.to_le_bytes();
            return self.out.write_all(&[op::BININT2, low, high]);
        }
        if let Ok(word) = i32::try_from(int) {
            self.out.write_all(&[op::BININT])?;
            return self.out.write_all(&word.to_le_bytes());
        }
        let bytes = int.to_le_bytes();
        // The top bit of the last byte is the sign bit.
        let len = (5..10_u8).find(|&len| {
            let unused = 128 - 8 * u32::from(len);
            int << unused >> unused == int
        });
        let len = len.ok_or_else(|| too_much("bits in an integer"))?;
        self.out.write_all(&[op::LONG1, len])?;
        self.out.write_all(&bytes[..usize::from(len)])
    }
}

fn too_much(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("more {what} than a pickle of this kind holds"))
}

impl<'a, W: Write> Sink<'a> for Pickle<'a, W> {
    fn open_dict(&mut self) -> io::Result<()> {
        self.out.write_all(&[op::EMPTY_DICT, op::MARK])
    }

    fn text_key(&mut self, name: &'static str) -> io::Result<()> {
        self.text(name)
    }

    fn close_dict(&mut self) -> io::Result<()> {
        self.out.write_all(&[op::SETITEMS])
    }

    fn open_list(&mut self) -> io::Result<()> {
        self.pending.push(0);
        self.out.write_all(&[op::EMPTY_LIST])
    }

    fn item(&mut self) -> io::Result<()> {
        let Some(pending) = self.pending.last_mut() else { return Ok(()) };
        let full = *pending == BATCH;
        if full {
            *pending = 0;
        }
        *pending += 1;
        let first = *pending == 1;
        if full {
            self.out.write_all(&[op::APPENDS])?;
        }
        if first { self.out.write_all(&[op::MARK]) } else { Ok(()) }
    }

    fn close_list(&mut self) -> io::Result<()> {
        match self.pending.pop() {
            None | Some(0) => Ok(()),
            Some(_) => self.out.write_all(&[op::APPENDS]),
        }
    }

    fn text(&mut self, text: &'a str) -> io::Result<()> {
        if let Some(&place) = self.texts.get(text) {
            return self.get(place);
        }
        self.plain_text(text)?;
        let place = self.memoize()?;
        self.texts.insert(text, place);
        Ok(())
    }

    fn int(&mut self, int: i64) -> io::Result<()> {
        self.integer(int.into())
    }

    fn unsigned(&mut self, int: u64) -> io::Result<()> {
        self.integer(int.into())
    }

    fn float(&mut self, float: f64) -> io::Result<()> {
        self.out.write_all(&[op::BINFLOAT])?;
        self.out.write_all(&float.to_be_bytes())
    }

    fn flag(&mut self, flag: bool) -> io::Result<()> {
        self.out.write_all(&[if flag { op::NEWTRUE } else { op::NEWFALSE }])
    }

    fn pair(&mut self, (a, b): (u64, u64)) -> io::Result<()> {
        self.unsigned(a)?;
        self.unsigned(b)?;
        self.out.write_all(&[op::TUPLE2])
    }

    fn again(&mut self, what: Shared) -> io::Result<bool> {
        match self.shared.get(&what) {
            Some(&place) => self.get(place).map(|()| true),
            None => Ok(false),
        }
    }

    fn keep(&mut self, what: Shared) -> io::Result<()> {
        let place = self.memoize()?;
        self.shared.insert(what, place);
        Ok(())
    }

    fn number_key(&mut self, number: u64) -> io::Result<()> {
        self.plain_text(&number.to_string())
    }

    fn end(&mut self) -> io::Result<()> {
        self.out.write_all(&[op::STOP])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_take_as_few_bytes_as_possible() {
        let written = |int: i128| {
            let mut out = Vec::new();
            Pickle::new(&mut out).unwrap().integer(int).unwrap();
            out.split_off(2)
        };
        assert_eq!(written(0), [op::BININT1, 0]);
        assert_eq!(written(255), [op::BININT1, 255]);
        assert_eq!(written(256), [op::BININT2, 0, 1]);
        assert_eq!(written(65_536), [op::BININT, 0, 0, 1, 0]);
        assert_eq!(written(-1), [op::BININT, 255, 255, 255, 255]);
        assert_eq!(written(1 << 31), [op::LONG1, 5, 0, 0, 0, 128, 0]);
        assert_eq!(written((1 << 39) - 1), [op::LONG1, 5, 255, 255, 255, 255, 127]);
        assert_eq!(written(1 << 39), [op::LONG1, 6, 0, 0, 0, 0, 128, 0]);
        assert_eq!(written(i64::MIN.into()), [op::LONG1, 8, 0, 0, 0, 0, 0, 0, 0, 128]);
        assert_eq!(written(u64::MAX.into()).len(), 2 + 9);
    }
}
