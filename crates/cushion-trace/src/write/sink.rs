//! The interface between the layout of a snapshot (`layout`) and the writers of JSON and pickles.

use std::io;

use crate::model::names::Name;
use crate::model::stacks::StackId;

/// Receives the values of a file in order. Texts live as long as `'a`, so that a sink can recognise
/// a text it has written before.
pub(super) trait Sink<'a> {
    fn open_dict(&mut self) -> io::Result<()>;
    /// Writes a key, before each value of a dict.
    fn key(&mut self, name: Name) -> io::Result<()> {
        self.text_key(name.text())
    }
    /// Writes a key that the readers of this crate do not use.
    fn text_key(&mut self, name: &'static str) -> io::Result<()>;
    /// Writes a number in quotes as a key.
    fn number_key(&mut self, number: u64) -> io::Result<()>;
    fn close_dict(&mut self) -> io::Result<()>;
    fn open_list(&mut self) -> io::Result<()>;
    /// Starts the next value of a list.
    fn item(&mut self) -> io::Result<()>;
    fn close_list(&mut self) -> io::Result<()>;
    fn text(&mut self, text: &'a str) -> io::Result<()>;
    fn int(&mut self, int: i64) -> io::Result<()>;
    fn unsigned(&mut self, int: u64) -> io::Result<()>;
    fn float(&mut self, float: f64) -> io::Result<()>;
    fn flag(&mut self, flag: bool) -> io::Result<()>;
    fn pair(&mut self, pair: (u64, u64)) -> io::Result<()>;
    /// Writes a reference to the value kept under this name. Returns whether there is one.
    fn again(&mut self, what: Shared) -> io::Result<bool>;
    /// Keeps the value just written under this name.
    fn keep(&mut self, what: Shared) -> io::Result<()>;
    /// Ends the file.
    fn end(&mut self) -> io::Result<()>;
}

/// The name of a value that occurs many times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Shared {
    Stack(StackId),
    Frame(usize),
}
