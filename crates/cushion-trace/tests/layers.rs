//! The folders of `src` import only from folders below them.

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    /// Each folder with the folders that it may import from. Lower folders come first.
    const LAYERS: [(&str, &[&str]); 7] = [
        ("model", &[]),
        ("format", &["model"]),
        ("read", &["model", "format"]),
        ("write", &["model", "format"]),
        ("program", &["model"]),
        ("replay", &["model", "program"]),
        ("infer", &["model", "program", "replay"]),
    ];

    /// Helpers for unit tests, which may import from everywhere.
    const TESTING: &str = "testing";

    fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, into);
            } else if path.extension().is_some_and(|ext| ext == "rs") {
                into.push(path);
            }
        }
    }

    /// Returns the lines of a file without comments and without its unit tests, which come last.
    fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
        let lines = text.lines().take_while(|line| *line != "#[cfg(test)]").enumerate();
        lines.map(|(number, line)| (number + 1, line.split("//").next().unwrap_or(line)))
    }

    /// Returns the imports of a file against the order, each with its line.
    fn wrong_imports(text: &str, folder: &str, below: &[&str]) -> Vec<String> {
        let mut wrong = Vec::new();
        for (number, line) in code(text) {
            for path in line.split("crate::").skip(1) {
                let end = path.find(|c: char| !c.is_ascii_lowercase() && c != '_');
                let target = &path[..end.unwrap_or(path.len())];
                if target != folder && !below.contains(&target) {
                    wrong.push(format!("{number}: `{}`", line.trim()));
                }
            }
        }
        wrong
    }

    #[test]
    fn imports_point_down() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut files = Vec::new();
        sources(&root, &mut files);
        files.sort();
        let mut wrong = Vec::new();
        let mut seen = 0;
        for file in files {
            let path = file.strip_prefix(&root).unwrap();
            let folder = path.iter().next().unwrap().to_str().unwrap();
            if path == Path::new("lib.rs") || folder == TESTING || path.ends_with("tests.rs") {
                continue;
            }
            let layer = LAYERS.iter().find(|(name, _)| *name == folder);
            let (_, below) = layer.unwrap_or_else(|| panic!("{}: in no layer", path.display()));
            let text = fs::read_to_string(&file).unwrap();
            let found = wrong_imports(&text, folder, below);
            wrong.extend(found.iter().map(|line| format!("{}:{line}", path.display())));
            seen += 1;
        }
        assert!(seen > 40, "only {seen} files");
        assert!(wrong.is_empty(), "imports against the order:\n{}", wrong.join("\n"));
    }

    #[test]
    fn the_layers_have_no_cycle() {
        for (index, (name, below)) in LAYERS.iter().enumerate() {
            for target in *below {
                let place = LAYERS.iter().position(|(name, _)| name == target);
                assert!(place.is_some_and(|place| place < index), "{name} imports from {target}");
            }
        }
    }

    #[test]
    fn an_import_against_the_order_is_found() {
        let text = "use crate::model::Event;\n// use crate::infer::x;\nuse crate::replay::Run;\n";
        assert_eq!(wrong_imports(text, "program", &["model"]), ["3: `use crate::replay::Run;`"]);
        assert_eq!(wrong_imports("use crate::{read, write};", "read", &["model"]).len(), 1);
        assert_eq!(wrong_imports("use crate::Program;", "read", &["model"]).len(), 1);
        let tests = "#[cfg(test)]\nmod tests {\n    use crate::infer::x;\n}\n";
        assert!(wrong_imports(tests, "model", &[]).is_empty());
    }
}
