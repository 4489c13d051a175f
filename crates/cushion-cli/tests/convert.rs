//! `cushion convert`, run as a command.

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::path::{Path, PathBuf};
    use std::process::{Command, Output, Stdio};

    use cushion_trace::{Limits, Snapshot, inconsistencies, open, read};

    fn traces() -> PathBuf {
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces"))
    }

    fn all_traces() -> Vec<PathBuf> {
        let mut found: Vec<PathBuf> = [traces(), traces().join("corners")]
            .iter()
            .flat_map(|folder| fs::read_dir(folder).unwrap())
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.to_string_lossy().ends_with(".pickle.gz"))
            .collect();
        found.sort();
        assert!(found.len() > 20, "{found:?}");
        found
    }

    fn trace(name: &str) -> PathBuf {
        traces().join(format!("{name}.pickle.gz"))
    }

    fn cushion(args: &[&Path]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_cushion")).arg("convert").args(args).output().unwrap()
    }

    fn text(bytes: &[u8]) -> String {
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    /// Converts a trace, and returns the messages.
    fn convert(from: &Path, to: &Path) -> String {
        let output = cushion(&[from, to]);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{told}");
        assert!(output.stdout.is_empty());
        told
    }

    fn load(path: &Path) -> Snapshot {
        open(path, &Limits::default()).unwrap()
    }

    /// For every shipped trace: Cushion's own format, and a pickle made from it, lose nothing, and
    /// no event has to be left out for the viewer.
    #[test]
    fn formats_round_trip() {
        let folder = tempfile::tempdir().unwrap();
        let (own, pickle) = (folder.path().join("a.cushion"), folder.path().join("b.pickle"));
        for trace in all_traces() {
            let original = load(&trace);
            assert_eq!(inconsistencies(&original), [], "{}", trace.display());
            let told = convert(&trace, &own);
            assert_eq!(load(&own), original, "{}", trace.display());
            let events: usize = original.devices.iter().map(cushion_trace::Events::len).sum();
            assert!(told.ends_with(&format!(", {events} events\n")), "{told}");
            let told = convert(&own, &pickle);
            assert_eq!(told.lines().count(), 1, "{told}");
            assert_eq!(load(&pickle), original, "{}", trace.display());
        }
    }

    #[test]
    fn a_trace_is_at_most_a_tenth_of_its_pickle() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("a.cushion");
        for trace in all_traces() {
            let mut pickle = Vec::new();
            let file = fs::File::open(&trace).unwrap();
            let mut unzipped = flate2::read::GzDecoder::new(file);
            std::io::Read::read_to_end(&mut unzipped, &mut pickle).unwrap();
            convert(&trace, &own);
            let size = fs::metadata(&own).unwrap().len();
            assert!(size * 10 <= pickle.len() as u64, "{}: {size}", trace.display());
            // It is also clearly smaller than gzip alone makes the pickle.
            let gzip = fs::metadata(&trace).unwrap().len();
            assert!(size * 10 <= gzip * 6, "{}: {size}, gzip {gzip}", trace.display());
        }
    }

    #[test]
    fn replay_prints_the_same_for_every_format() {
        let folder = tempfile::tempdir().unwrap();
        let original = trace("corners/capped");
        let replay = |path: &Path| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_cushion"));
            let output = command.args(["replay", "--json"]).arg(path).output().unwrap();
            text(&output.stdout).replace(&path.display().to_string(), "")
        };
        let expected = replay(&original);
        assert_eq!(expected.lines().count(), 3);
        for name in ["a.cushion", "a.pickle", "a.pkl", "a.pickle.gz", "a.CUSHION.gz"] {
            let path = folder.path().join(name);
            convert(&original, &path);
            assert_eq!(replay(&path), expected, "{name}");
        }
    }

    #[test]
    fn the_output_name_selects_the_format() {
        let folder = tempfile::tempdir().unwrap();
        let original = trace("corners/churn");
        for (name, start) in [
            ("a.cushion", &[0x1f, 0x8b][..]),
            ("a.cushion.gz", &[0x1f, 0x8b]),
            ("a.pickle", &[0x80, 4]),
            ("a.pkl", &[0x80, 4]),
            ("a.pickle.gz", &[0x1f, 0x8b]),
            ("a.json", b"{\"segments\":[{"),
        ] {
            let path = folder.path().join(name);
            convert(&original, &path);
            assert!(fs::read(&path).unwrap().starts_with(start), "{name}");
        }
        let odd = folder.path().join("a.trace");
        let told = text(&cushion(&[&original, &odd]).stderr);
        assert!(told.contains("give --to cushion, pickle or json"), "{told}");
        assert!(!odd.exists());
        convert_to(&original, &odd, "json");
        assert_eq!(fs::read(&odd).unwrap(), fs::read(folder.path().join("a.json")).unwrap());
        let json: serde_json::Value = serde_json::from_slice(&fs::read(&odd).unwrap()).unwrap();
        assert_eq!(json["device_traces"][0].as_array().unwrap().len(), 2458);
    }

    fn convert_to(from: &Path, to: &Path, format: &str) {
        let format = format!("--to={format}");
        let output = cushion(&[from, to, Path::new(&format)]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }

    #[test]
    fn standard_input_and_output() {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cushion"));
        let mut child = command
            .args(["convert", "-", "-", "--to", "cushion"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let bytes = fs::read(trace("corners/pools")).unwrap();
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert!(text(&output.stderr).starts_with("cushion: - (14.10 KiB) -> - ("));
        let back = read(&output.stdout[..], &Limits::default()).unwrap();
        assert_eq!(back, load(&trace("corners/pools")));
    }

    /// The first events of this trace cannot be undone: it frees a block that was never allocated.
    #[test]
    fn events_the_viewer_cannot_show_are_left_out_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let [broken, own, json] =
            ["broken.cushion", "own.cushion", "out.json"].map(|name| folder.path().join(name));
        let mut snapshot = load(&trace("corners/churn"));
        let lost = snapshot.devices[0].iter().position(|e| e.action.name() == "segment_alloc");
        let mut stray = snapshot.devices[0].get(lost.unwrap()).unwrap();
        stray.addr += 1 << 45;
        let events: Vec<_> = snapshot.devices[0].iter().collect();
        let mixed =
            events[..100].iter().copied().chain([stray]).chain(events[100..].iter().copied());
        snapshot.devices[0] = mixed.collect();
        let file = fs::File::create(&broken).unwrap();
        cushion_trace::write_snapshot(&snapshot, cushion_trace::FileFormat::Cushion, file).unwrap();

        let told = convert(&broken, &json);
        assert!(told.contains(", 2358 events\n"), "{told}");
        assert!(told.contains("left out 101 events that PyTorch's viewer"), "{told}");
        let why = "device 0, event 100, ";
        assert!(told.contains(why) && told.contains("does not exist later"), "{told}");
        convert(&broken, &own);
        assert_eq!(load(&own), snapshot);
    }

    #[test]
    fn bad_input_leaves_no_output() {
        let folder = tempfile::tempdir().unwrap();
        let [bad, missing, out] =
            ["bad.pickle", "missing", "out.cushion"].map(|name| folder.path().join(name));
        fs::write(&bad, b"GARBAGE").unwrap();
        fs::write(&out, b"as it was").unwrap();
        for (input, expected) in [(&bad, "bad.pickle: "), (&missing, "missing: ")] {
            let output = cushion(&[input, &out]);
            assert_eq!(output.status.code(), Some(2));
            let told = text(&output.stderr);
            assert!(told.contains(expected), "{told}");
        }
        assert_eq!(fs::read(&out).unwrap(), b"as it was");
        let nowhere = folder.path().join("no such folder").join("out.cushion");
        let output = cushion(&[&trace("corners/pools"), &nowhere]);
        assert_eq!(output.status.code(), Some(2));
        let told = text(&output.stderr);
        assert!(told.contains("cannot write") && told.contains("there is no folder"), "{told}");
        // No partial file is left.
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[cfg(unix)]
    #[test]
    fn links_and_devices_are_written_through() {
        use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, symlink};

        let folder = tempfile::tempdir().unwrap();
        let [link, real, plain] =
            ["link.cushion", "real", "plain"].map(|name| folder.path().join(name));
        fs::write(&real, b"").unwrap();
        fs::write(&plain, b"").unwrap();
        symlink(&real, &link).unwrap();
        convert(&trace("corners/pools"), &link);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(load(&real), load(&trace("corners/pools")));
        // It has the permissions of any other file.
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&real), mode(&plain));
        convert_to(&trace("corners/pools"), Path::new("/dev/null"), "pickle");
        assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    }

    /// Python reads the written files, and finds the same as in the original.
    #[test]
    fn python_reads_the_written_files() {
        let script = traces().join("../viz/same.py");
        let python = Command::new("python3").arg("--version").output();
        if !python.is_ok_and(|output| output.status.success()) {
            println!("SKIPPED: there is no python3");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        for name in ["stream_offload.expandable", "graphs_serving", "corners/pools_capped"] {
            for output in ["a.pickle", "a.json", "a.pickle.gz"] {
                let path = folder.path().join(output);
                convert(&trace(name), &path);
                let mut command = Command::new("python3");
                let output = command.arg(&script).arg(trace(name)).arg(&path).output().unwrap();
                let told = text(&output.stdout) + &text(&output.stderr);
                assert!(output.status.success(), "{name}: {told}");
            }
        }
    }
}
