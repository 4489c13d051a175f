//! Each folder of `src/` uses only itself and the folders below it. The library itself has no test
//! executable, so this reads the sources.

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    /// From the bottom to the top. `lib.rs` is above them all.
    const ORDER: [&str; 7] =
        ["process", "python", "pytorch", "history", "shortage", "entry", "module"];

    fn source() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
    }

    /// The modules at the top of the crate that a text names after `crate::`.
    fn named(text: &str) -> Vec<String> {
        let mut names = Vec::new();
        for (at, _) in text.match_indices("crate::") {
            let rest = &text[at + "crate::".len()..];
            match rest.strip_prefix('{') {
                None => names.push(first_word(rest)),
                Some(group) => names.extend(in_group(group)),
            }
        }
        names
    }

    /// The first words of a group such as `a::b, c::{d, e}}`.
    fn in_group(group: &str) -> Vec<String> {
        let (mut names, mut depth, mut begins) = (Vec::new(), 0, 0);
        for (at, character) in group.char_indices() {
            match character {
                '{' => depth += 1,
                ',' if depth == 0 => {
                    names.push(first_word(&group[begins..at]));
                    begins = at + 1;
                }
                '}' if depth == 0 => {
                    names.push(first_word(&group[begins..at]));
                    break;
                }
                '}' => depth -= 1,
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

    /// The names in a file of `folder` that stand for no folder below it, nor for itself.
    fn against_the_order(folder: &str, text: &str) -> Vec<String> {
        let place = |name: &str| ORDER.iter().position(|it| *it == name);
        let own = place(folder);
        let is_wrong = |name: &String| place(name).is_none_or(|it| own.is_none_or(|own| it > own));
        named(text).into_iter().filter(is_wrong).collect()
    }

    #[test]
    fn every_folder_has_its_place() {
        let entries = fs::read_dir(source()).unwrap().map(|entry| entry.unwrap());
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        let mut expected = [&ORDER[..], &["lib.rs"]].concat();
        expected.sort_unstable();
        assert_eq!(names, expected);
    }

    #[test]
    fn no_folder_uses_one_above_it() {
        let mut files = 0;
        for folder in ORDER {
            for entry in fs::read_dir(source().join(folder)).unwrap() {
                let path = entry.unwrap().path();
                let text = fs::read_to_string(&path).unwrap();
                let wrong = against_the_order(folder, &text);
                assert!(wrong.is_empty(), "{} uses {wrong:?}", path.display());
                // A path through the parent of a folder would go unseen.
                assert!(!text.contains("super::super"), "{}", path.display());
                let is_top = path.ends_with("mod.rs");
                assert!(!is_top || !text.contains("super::"), "{}", path.display());
                files += 1;
            }
        }
        assert!(files > 30, "only {files} files were read");
    }

    #[test]
    fn an_import_against_the_order_is_seen() {
        let seen = |text: &str| against_the_order("history", text);
        assert_eq!(seen("use crate::python::gil;\nuse crate::history::kept;"), [""; 0]);
        assert_eq!(seen("use crate::entry::plugin;"), ["entry"]);
        assert_eq!(seen("    crate::shortage::receipts::begin();"), ["shortage"]);
        let group = "use crate::{\n    process::{lock, symbols},\n    module::fork,\n    lock,\n};";
        assert_eq!(seen(group), ["module", "lock"]);
    }
}
