//! Lists the processes that hold memory of a device, with names that help to find them.

use std::cmp::Reverse;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use crate::driver::CudaDriver;
use crate::nvml::{Entry, Nvml};

/// A process that holds memory of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuProcess {
    /// The process ID as the driver reports it: see [`GpuProcesses::is_self_known`].
    pub pid: u32,
    /// The name, as in `python train.py`: at most 40 characters, all printable, because any user
    /// can name a process. `None` if it cannot be found out.
    pub name: Option<String>,
    /// The bytes held, including CUDA's own. `None` if the driver does not report them.
    pub bytes: Option<u64>,
}

/// The processes that hold memory of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuProcesses {
    /// The processes that the driver reports, largest first, unknown sizes last. Empty if the
    /// driver cannot tell. In a container, newer drivers omit processes outside of it.
    pub all: Vec<GpuProcess>,
    /// Whether the driver uses the same process IDs as this process. If so, this process is not in
    /// `all`. If not, as in a container with an older driver, which reports the IDs of the host,
    /// this process is in `all` under an unknown ID; no names are looked up then, because the IDs
    /// belong to other processes here.
    pub is_self_known: bool,
}

impl CudaDriver {
    /// Returns the other processes that hold memory of this device. It queries the driver and the
    /// system, which takes some milliseconds (longer the first time): do not call it on the hot
    /// path or under a lock.
    #[must_use]
    pub fn processes(&self) -> GpuProcesses {
        let entries = self
            .api()
            .uuid(self.device())
            .ok()
            .and_then(|uuid| Nvml::load()?.processes(uuid))
            .unwrap_or_default();
        sorted_out(entries, std::process::id())
    }
}

/// Removes this process and sorts the rest. A [`CudaDriver`] holds a context, so this process is
/// always among `entries`, under its own ID or another.
fn sorted_out(mut entries: Vec<Entry>, own: u32) -> GpuProcesses {
    let is_self_known = entries.iter().any(|entry| entry.pid == own);
    entries.retain(|entry| entry.pid != own);
    entries.sort_by_key(|entry| (Reverse(entry.bytes), entry.pid));
    let named = |Entry { pid, bytes }| {
        let name = if is_self_known { name_of(pid) } else { None };
        GpuProcess { pid, name, bytes }
    };
    GpuProcesses { all: entries.into_iter().map(named).collect(), is_self_known }
}

// ---- names ----

/// The longest name, in characters.
const LONGEST: usize = 40;

/// How much of a command line is read. The process can make it any length.
const READ: u64 = 4096;

fn name_of(pid: u32) -> Option<String> {
    let folder = Path::new("/proc").join(pid.to_string());
    let read = |file: &str| {
        let mut start = Vec::new();
        File::open(folder.join(file)).ok()?.take(READ).read_to_end(&mut start).ok()?;
        Some(start)
    };
    let command = read("cmdline").and_then(|line| command(&line));
    // A process that is ending has no command line.
    command.or_else(|| printable(&String::from_utf8_lossy(&read("comm")?)))
}

/// Returns the program and, for Python, the script. Other arguments are left out: they may be
/// secrets, and messages are logged.
fn command(line: &[u8]) -> Option<String> {
    let mut words = line.split(|&byte| byte == 0).map(String::from_utf8_lossy);
    let first = words.next()?;
    let program = last_part(&first);
    let script = program.starts_with("python").then(|| {
        // `-m module` becomes `module`. Code after `-c` is not a name.
        let script = words.find(|word| word.starts_with("-c") || !word.starts_with('-'))?;
        Some(if script.starts_with("-c") { "-c".to_owned() } else { last_part(&script).to_owned() })
    });
    match script.flatten() {
        Some(script) => printable(&format!("{program} {script}")),
        None => printable(program),
    }
}

/// Returns the file name of a path. A program may have replaced its command line by a title, which
/// is kept as it is.
fn last_part(word: &str) -> &str {
    if word.starts_with(['/', '.']) { word.rsplit('/').next().unwrap_or(word) } else { word }
}

/// Makes a text printable: no line breaks, and no characters that move a terminal's cursor or
/// reverse the text.
fn printable(text: &str) -> Option<String> {
    let is_plain = |c: char| c == ' ' || c.is_ascii_graphic() || c.is_alphanumeric();
    let text = text.trim().chars().take(LONGEST);
    let text: String = text.map(|c| if is_plain(c) { c } else { '?' }).collect();
    let text = text.trim_end();
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_named_by_its_program_and_script() {
        for (line, name) in [
            ("/usr/bin/python3\0/home/me/train.py\0--token=secret\0", "python3 train.py"),
            ("python\0-u\0train.py\0", "python train.py"),
            (
                "/opt/venv/bin/python3.11\0-m\0torch.distributed.run\0x\0",
                "python3.11 torch.distributed.run",
            ),
            ("python3\0-c\0import secrets\0", "python3 -c"),
            ("python3\0-cimport secrets\0", "python3 -c"),
            ("python3\0", "python3"),
            ("python3\0-i\0", "python3"),
            ("./llama-server\0--api-key\0secret\0", "llama-server"),
            ("/bin/sleep\0one hour\0", "sleep"),
            ("ray::Worker.run\0\0\0\0", "ray::Worker.run"),
            ("sshd: me@pts/0\0", "sshd: me@pts/0"),
        ] {
            assert_eq!(command(line.as_bytes()).as_deref(), Some(name), "{line:?}");
        }
        for line in ["", "\0", "\0\0\0", "/\0", " \0"] {
            assert_eq!(command(line.as_bytes()), None, "{line:?}");
        }
    }

    #[test]
    fn names_are_printable() {
        let name = command("a\nb\x1b[2J\u{202e}c\u{200b}d\u{7}\u{9b}\u{2028}e é\0".as_bytes());
        assert_eq!(name.as_deref(), Some("a?b?[2J?c?d???e é"));
        assert_eq!(command(b"\xff\xfe\0").as_deref(), Some("??"));
        let long = "é".repeat(10_000);
        assert_eq!(printable(&long).map(|name| name.chars().count()), Some(LONGEST));
    }

    #[test]
    fn processes_are_sorted_by_size_then_id() {
        let entry = |(pid, bytes)| Entry { pid, bytes };
        let entries =
            [(9, None), (4, Some(5)), (3, Some(5)), (8, Some(u64::MAX - 1)), (7, Some(0))];
        let found = sorted_out(entries.map(entry).to_vec(), 1);
        let pids: Vec<u32> = found.all.iter().map(|process| process.pid).collect();
        assert_eq!((pids, found.is_self_known), (vec![8, 3, 4, 7, 9], false));
    }
}
