//! Detects the format of a file by its first bytes. File names are not trusted.

use std::fmt::Write as _;

use crate::format::own;

/// The number of bytes that detection looks at.
pub(crate) const LOOK: usize = 4096;

pub(crate) const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
pub(crate) const ZSTD_MAGIC: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
pub(crate) const BOM: &[u8] = b"\xef\xbb\xbf";

/// The format of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Pickle,
    Json,
    Rmm,
    Own,
    /// A description of a file that is not a trace.
    Other(String),
}

/// Returns the format of a file that begins with `start`. The file is longer only if `start` has
/// [`LOOK`] bytes.
pub(crate) fn kind(start: &[u8]) -> Kind {
    let text = start.strip_prefix(BOM).unwrap_or(start).trim_ascii_start();
    match start {
        [] => return Kind::Other("an empty file".to_owned()),
        // Protocols 2 to 5 start with this opcode; 0 and 1 start with the container.
        [0x80, ..] => return Kind::Pickle,
        _ if start.starts_with(ZSTD_MAGIC) => return Kind::Other(describe(start)),
        _ if start.starts_with(own::MAGIC) => return Kind::Own,
        _ if rmm_header(text) => return Kind::Rmm,
        _ => {}
    }
    match text {
        [b'{' | b'[', ..] => Kind::Json,
        [b'(' | b'}' | b']' | b')', ..] => Kind::Pickle,
        // Python's `GLOBAL`: the pickle reader refuses it with its own message.
        [b'c', rest @ ..] if is_global(rest) => Kind::Pickle,
        _ => Kind::Other(describe(start)),
    }
}

/// Returns whether the first line names the columns of an RMM log.
fn rmm_header(text: &[u8]) -> bool {
    let line = text.split(|&byte| byte == b'\n').next().unwrap_or(text);
    let has = |name: &[u8]| {
        line.split(|&byte| byte == b',')
            .any(|cell| cell.trim_ascii().trim_ascii_quotes().eq_ignore_ascii_case(name))
    };
    [&b"action"[..], b"pointer", b"size"].into_iter().all(has)
}

trait Quotes {
    fn trim_ascii_quotes(&self) -> &Self;
}

impl Quotes for [u8] {
    fn trim_ascii_quotes(&self) -> &Self {
        self.strip_prefix(b"\"").and_then(|cell| cell.strip_suffix(b"\"")).unwrap_or(self)
    }
}

/// Returns whether the operands of `GLOBAL` follow: two lines, a module and a name.
fn is_global(rest: &[u8]) -> bool {
    let name = |line: &[u8]| {
        !line.is_empty()
            && line.iter().all(|byte| byte.is_ascii_alphanumeric() || b"_.".contains(byte))
    };
    let mut lines = rest.split(|&byte| byte == b'\n');
    lines.next().is_some_and(name) && lines.next().is_some_and(name)
}

/// Other files that users are likely to pass by mistake.
const MAGICS: &[(&[u8], &str)] = &[
    (b"PK\x03\x04", "a zip archive (torch.save writes one; a snapshot comes from _dump_snapshot)"),
    (b"\xfd7zXZ\0", "an xz file; unpack it first"),
    (b"BZh", "a bzip2 file; unpack it first"),
    (b"\x04\x22\x4d\x18", "an lz4 file; unpack it first"),
    (b"version https://git-lfs", "a Git LFS pointer; fetch the file itself with `git lfs pull`"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF", "an HDF5 file"),
    (b"PAR1", "a Parquet file"),
    (b"SQLite format 3", "an SQLite database (Nsight Systems exports one)"),
    (b"\x7fELF", "a program"),
    (b"%PDF", "a PDF"),
    (b"\x89PNG", "a picture"),
    (b"GGUF", "a GGUF model"),
    (b"\xff\xfe", "UTF-16 text; save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text; save it as UTF-8"),
];

fn describe(start: &[u8]) -> String {
    if start.starts_with(GZIP_MAGIC) {
        return "a gzip file inside another packed file; unpack it once".to_owned();
    }
    if start.starts_with(ZSTD_MAGIC) {
        return "a zstd file inside another packed file; unpack it once".to_owned();
    }
    if let Some((_, name)) = MAGICS.iter().find(|(magic, _)| start.starts_with(magic)) {
        return (*name).to_owned();
    }
    if start.get(8) == Some(&b'{') && start.get(3..8) == Some(&[0; 5]) {
        return "a safetensors file".to_owned();
    }
    if start.get(257..262) == Some(b"ustar") {
        return "a tar archive; unpack it first".to_owned();
    }
    let text = start.trim_ascii_start();
    if text.first() == Some(&b'<') {
        return "HTML or XML (was a web page saved instead of the file?)".to_owned();
    }
    if text.is_empty() {
        return "nothing but white space".to_owned();
    }
    let line = text.split(|&byte| byte == b'\n').next().unwrap_or(text);
    let shown = &line[..line.len().min(32)];
    if shown.iter().all(|byte| matches!(byte, b' '..=b'~' | b'\t' | b'\r' | 0x80..)) {
        return format!("text that begins with `{}`", String::from_utf8_lossy(shown).trim_end());
    }
    let mut bytes = "a file that begins with the bytes".to_owned();
    for byte in &start[..start.len().min(8)] {
        let _ = write!(bytes, " {byte:02x}");
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_detected_by_content() {
        let rmm = b"Thread,Time,Action,Pointer,Size,Stream\n";
        let cases: [(&[u8], Kind); 12] = [
            (b"\x80\x04}", Kind::Pickle),
            (b"(dp0\n", Kind::Pickle),
            (b"}q\x00", Kind::Pickle),
            (b"cos\nsystem\n", Kind::Pickle),
            (b"{\"segments\": []}", Kind::Json),
            (b"\n \t{", Kind::Json),
            (b"\xef\xbb\xbf{", Kind::Json),
            (b"[]", Kind::Json),
            (rmm, Kind::Rmm),
            (b"\"action\", \"Size\" ,pointer\r\n", Kind::Rmm),
            (b"CUSHION\x01", Kind::Own),
            (b"", Kind::Other("an empty file".to_owned())),
        ];
        for (start, expected) in cases {
            assert_eq!(kind(start), expected, "{start:?}");
        }
    }

    #[test]
    fn other_files_are_described() {
        let tensors = b"\x40\0\0\0\0\0\0\0{\"a\":{}}";
        let cases: [(&[u8], &str); 9] = [
            (b"PK\x03\x04", "a zip archive"),
            (b"\x1f\x8b\x08", "a gzip file inside another"),
            (b"(\xb5/\xfd", "a zstd file inside another"),
            (b"<!DOCTYPE html>", "HTML"),
            (b" \n ", "white space"),
            (tensors, "safetensors"),
            (b"hello there\nyou", "text that begins with `hello there`"),
            (b"\x00\x01\x02", "the bytes 00 01 02"),
            (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        ];
        for (start, expected) in cases {
            let Kind::Other(found) = kind(start) else { panic!("{start:?}") };
            assert!(found.contains(expected), "{found}");
        }
    }
}
