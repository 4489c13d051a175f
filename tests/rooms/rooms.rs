//! The rooms of a crate: folders of `src` with one subject each, of which each uses those below it
//! and none above. The tests of three crates include this file.

use std::fs;
use std::path::{Path, PathBuf};

/// The rooms of one crate.
pub(crate) struct Rooms<'a> {
    /// The folder of the crate.
    pub(crate) of: &'a str,
    /// Their names, from the top. A room uses itself and those after it.
    pub(crate) order: &'a [&'a str],
    /// Folders that may use everything: helpers for tests.
    pub(crate) free: &'a [&'a str],
}

impl Rooms<'_> {
    fn source(&self) -> PathBuf {
        Path::new(self.of).join("src")
    }

    /// Returns all source files but the tests, each with its room.
    pub(crate) fn files(&self) -> Vec<(String, PathBuf)> {
        let mut found = Vec::new();
        add_files(&self.source(), &mut found);
        found.sort();
        let in_room = found.into_iter().map(|path| (self.room_of(&path), path));
        in_room.filter(|(room, path)| room != "lib" && !path.ends_with("tests.rs")).collect()
    }

    /// Returns the room of a file: the folder, or the file of the same name beside it.
    fn room_of(&self, path: &Path) -> String {
        let inside = path.strip_prefix(self.source()).unwrap();
        let first = inside.iter().next().unwrap().to_str().unwrap();
        first.trim_end_matches(".rs").to_owned()
    }

    /// Fails if a file is in no room, or uses a room above its own.
    pub(crate) fn check(&self) {
        let files = self.files();
        assert!(files.len() > 25, "only {} files were found", files.len());
        let mut wrong = Vec::new();
        for (room, path) in &files {
            if !self.free.contains(&room.as_str()) {
                let used = self.wrongly_used(room, &code(path));
                wrong.extend(used.iter().map(|used| format!("{} uses `{used}`", path.display())));
            }
        }
        assert!(wrong.is_empty(), "arrows point down only:\n{}", wrong.join("\n"));
    }

    /// Returns what code of a room names after `crate::` that is neither the room nor below it.
    pub(crate) fn wrongly_used(&self, room: &str, code: &str) -> Vec<String> {
        let place = |name: &str| self.order.iter().position(|it| *it == name);
        let own = place(room).unwrap_or_else(|| panic!("{room} is not a room of {}", self.of));
        let is_wrong = |name: &String| place(name).is_none_or(|it| it < own);
        used(code).into_iter().filter(is_wrong).collect()
    }
}

fn add_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            add_files(&path, found);
        } else if path.extension().is_some_and(|it| it == "rs") {
            found.push(path);
        }
    }
}

/// Returns the code of a file without its comments and without its tests, which come last.
pub(crate) fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    let without_comment = |line: &str| line.split("//").next().unwrap().to_owned();
    code.lines().map(without_comment).collect::<Vec<_>>().join("\n")
}

/// Returns the first names of all paths that begin with `crate::`, in groups too.
fn used(code: &str) -> Vec<String> {
    let mut names = Vec::new();
    for rest in code.split("crate::").skip(1) {
        match rest.strip_prefix('{') {
            None => names.push(first_word(rest)),
            Some(group) => names.extend(first_words(group)),
        }
    }
    names
}

/// Returns the first words of a group such as `a::b, c::{d, e}}`.
fn first_words(group: &str) -> Vec<String> {
    let (mut names, mut depth, mut begins) = (Vec::new(), 0, 0);
    for (at, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                names.push(first_word(&group[begins..at]));
                begins = at + 1;
                if character == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

fn first_word(text: &str) -> String {
    let is_in_word = |it: &char| it.is_alphanumeric() || *it == '_';
    text.trim_start().chars().take_while(is_in_word).collect()
}
