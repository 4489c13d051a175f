//! The rooms of the crate: each folder uses those below it and none above.

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::{Path, PathBuf};

    /// The rooms, from the top. `testing` is for tests and may use everything.
    const ROOMS: [&str; 14] = [
        "engine", "shortage", "core", "demand", "policy", "memory", "backing", "streams", "heap",
        "ledger", "outcome", "options", "driver", "base",
    ];

    fn source() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
    }

    /// All source files below a folder.
    fn files(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                files(&path, found);
            } else if path.extension().is_some_and(|it| it == "rs") {
                found.push(path);
            }
        }
    }

    /// The room that a file belongs to: the folder, or the file of the same name beside it.
    fn room_of(path: &Path) -> String {
        let inside = path.strip_prefix(source()).unwrap();
        let first = inside.components().next().unwrap().as_os_str().to_str().unwrap();
        first.trim_end_matches(".rs").to_owned()
    }

    /// The code of a file without its tests and comments.
    fn code(path: &Path) -> String {
        let text = fs::read_to_string(path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap().to_owned();
        let is_code = |line: &&str| !line.trim_start().starts_with("//");
        code.lines().filter(is_code).collect::<Vec<_>>().join("\n")
    }

    /// The first names of all paths in code that begin with `crate::`.
    fn used(code: &str) -> Vec<String> {
        let name = |rest: &str| {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            rest[..end].to_owned()
        };
        code.split("crate::").skip(1).map(name).collect()
    }

    #[test]
    fn rooms_use_only_those_below_them() {
        let level: BTreeMap<&str, usize> =
            ROOMS.iter().enumerate().map(|(at, it)| (*it, at)).collect();
        let mut found = Vec::new();
        files(&source(), &mut found);
        let mut checked = 0;
        let mut wrong = Vec::new();
        for path in found {
            let room = room_of(&path);
            let is_test = path.file_stem().is_some_and(|it| it == "tests");
            let Some(&own) = level.get(room.as_str()).filter(|_| !is_test) else { continue };
            checked += 1;
            for used in used(&code(&path)) {
                match level.get(used.as_str()) {
                    Some(&below) if below >= own => {}
                    _ => wrong.push(format!("{} uses {used}", path.display())),
                }
            }
        }
        assert!(checked > 60, "only {checked} files were found");
        assert!(wrong.is_empty(), "arrows point down only:\n{}", wrong.join("\n"));
    }

    #[test]
    fn every_folder_is_a_room() {
        let mut folders: Vec<String> = fs::read_dir(source())
            .unwrap()
            .map(|entry| room_of(&entry.unwrap().path()))
            .filter(|name| name != "lib" && name != "testing")
            .collect();
        folders.sort();
        folders.dedup();
        let mut rooms = ROOMS.map(str::to_owned).to_vec();
        rooms.sort();
        assert_eq!(folders, rooms);
    }

    /// Only the backing makes the driver's memory calls, and only the streams record and query events.
    #[test]
    fn only_their_rooms_call_the_driver() {
        const MEMORY: [&str; 11] = [
            "alloc",
            "free",
            "reserve",
            "unreserve",
            "create",
            "create_host",
            "release",
            "map",
            "unmap",
            "set_access",
            "memory_info",
        ];
        const EVENTS: [&str; 5] = [
            "event_create",
            "event_record",
            "event_query",
            "event_synchronize",
            "stream_synchronize",
        ];
        let mut found = Vec::new();
        files(&source(), &mut found);
        let mut wrong = Vec::new();
        for path in found {
            let room = room_of(&path);
            if !ROOMS.contains(&room.as_str()) || room == "driver" {
                continue;
            }
            let code = code(&path);
            let calls = |call: &&&str| code.contains(&format!("driver.{call}("));
            if room != "backing" {
                wrong.extend(MEMORY.iter().filter(calls).map(|it| format!("{room} calls {it}")));
            }
            if room != "streams" {
                wrong.extend(EVENTS.iter().filter(calls).map(|it| format!("{room} calls {it}")));
            }
        }
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}
