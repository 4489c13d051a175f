//! Writes JSON without spaces or line breaks.

use std::io::{self, Write};

use super::sink::{Shared, Sink};

/// Writes JSON.
#[derive(Debug)]
pub(super) struct Json<W> {
    out: W,
    /// Whether the innermost list or dict is still empty.
    empty: bool,
}

impl<W: Write> Json<W> {
    pub(super) fn new(out: W) -> Self {
        Self { out, empty: true }
    }

    fn comma(&mut self) -> io::Result<()> {
        if !self.empty {
            self.out.write_all(b",")?;
        }
        self.empty = false;
        Ok(())
    }

    fn open(&mut self, bracket: &[u8]) -> io::Result<()> {
        self.empty = true;
        self.out.write_all(bracket)
    }

    fn close(&mut self, bracket: &[u8]) -> io::Result<()> {
        // The list or dict around it has at least this item.
        self.empty = false;
        self.out.write_all(bracket)
    }
}

impl<'a, W: Write> Sink<'a> for Json<W> {
    fn open_dict(&mut self) -> io::Result<()> {
        self.open(b"{")
    }

    fn text_key(&mut self, name: &'static str) -> io::Result<()> {
        self.comma()?;
        // Names need no escapes.
        write!(self.out, "\"{name}\":")
    }

    fn close_dict(&mut self) -> io::Result<()> {
        self.close(b"}")
    }

    fn open_list(&mut self) -> io::Result<()> {
        self.open(b"[")
    }

    fn item(&mut self) -> io::Result<()> {
        self.comma()
    }

    fn close_list(&mut self) -> io::Result<()> {
        self.close(b"]")
    }

    fn text(&mut self, text: &'a str) -> io::Result<()> {
        Ok(serde_json::to_writer(&mut self.out, text)?)
    }

    fn int(&mut self, int: i64) -> io::Result<()> {
        write!(self.out, "{int}")
    }

    fn unsigned(&mut self, int: u64) -> io::Result<()> {
        write!(self.out, "{int}")
    }

    fn float(&mut self, float: f64) -> io::Result<()> {
        // JSON cannot write the other values.
        if float.is_finite() { write!(self.out, "{float:?}") } else { self.out.write_all(b"null") }
    }

    fn flag(&mut self, flag: bool) -> io::Result<()> {
        write!(self.out, "{flag}")
    }

    fn pair(&mut self, (a, b): (u64, u64)) -> io::Result<()> {
        write!(self.out, "[{a},{b}]")
    }

    fn again(&mut self, _: Shared) -> io::Result<bool> {
        Ok(false)
    }

    fn keep(&mut self, _: Shared) -> io::Result<()> {
        Ok(())
    }

    fn number_key(&mut self, number: u64) -> io::Result<()> {
        self.comma()?;
        write!(self.out, "\"{number}\":")
    }

    fn end(&mut self) -> io::Result<()> {
        self.out.write_all(b"\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_escaped() {
        for text in ["", "plain", "\"\\\n\r\t\u{1}\u{7f}/", "ß→𝄞", "\\u0041"] {
            let mut out = Vec::new();
            Json::new(&mut out).text(text).unwrap();
            assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), text);
        }
    }

    #[test]
    fn floats_keep_their_point() {
        for (float, text) in [(0.0, "0.0"), (0.75, "0.75"), (1e-300, "1e-300"), (f64::NAN, "null")]
        {
            let mut out = Vec::new();
            Sink::float(&mut Json::new(&mut out), float).unwrap();
            assert_eq!(out, text.as_bytes());
        }
    }
}
