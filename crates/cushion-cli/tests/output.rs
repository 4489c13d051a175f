//! Output paths: a command never overwrites its input, and checks the path before the work.

#[cfg(test)]
mod support;

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::path::Path;
    use std::process::{Command, Output, Stdio};

    use super::support::{event, write_snapshot};

    /// Makes a folder with a trace, a link and a hard link to it, and another trace.
    fn folder() -> (tempfile::TempDir, Vec<u8>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.pickle");
        write_snapshot(&path, &[event("alloc", 1 << 30, 5000, None)]);
        write_snapshot(&folder.path().join("y.pickle"), &[event("alloc", 1 << 30, 700, None)]);
        symlink("x.pickle", folder.path().join("soft.pickle")).unwrap();
        fs::hard_link(&path, folder.path().join("hard.pickle")).unwrap();
        let bytes = fs::read(path).unwrap();
        (folder, bytes)
    }

    fn cushion(folder: &Path, args: &[&str], stdin: Stdio) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cushion"));
        command.current_dir(folder).args(args).stdin(stdin).output().unwrap()
    }

    /// Runs a command that must be refused, and returns its message.
    fn refused(folder: &Path, args: &[&str], stdin: Stdio) -> String {
        let output = cushion(folder, args, stdin);
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {told}");
        assert!(output.stdout.is_empty(), "{args:?}");
        assert_eq!(told.lines().count(), 1, "{args:?}: {told}");
        told
    }

    #[test]
    fn output_never_overwrites_input() {
        let (folder, bytes) = folder();
        let here = folder.path();
        let full = here.join("x.pickle").display().to_string();
        for same in ["x.pickle", "./x.pickle", "soft.pickle", "hard.pickle", &full] {
            for args in [
                &["convert", "x.pickle", same][..],
                &["convert", "soft.pickle", same],
                &["report", "x.pickle", "-o", same],
                &["report", "y.pickle", "--receipts", "x.pickle", "-o", same],
                &["replay", "x.pickle", "--receipts", same],
                &["replay", "y.pickle", "x.pickle", "--receipts", same],
            ] {
                let told = refused(here, args, Stdio::null());
                assert!(told.contains("the same file as the input"), "{args:?}: {told}");
                assert_eq!(fs::read(here.join("x.pickle")).unwrap(), bytes, "{args:?}");
            }
        }
        // Standard input is an input too.
        for args in [&["convert", "-", "x.pickle"][..], &["report", "-", "-o", "x.pickle"]] {
            let file = File::open(here.join("x.pickle")).unwrap();
            let told = refused(here, args, file.into());
            assert!(told.contains("the same file as the input -"), "{told}");
            assert_eq!(fs::read(here.join("x.pickle")).unwrap(), bytes, "{args:?}");
        }
        assert!(fs::symlink_metadata(here.join("soft.pickle")).unwrap().is_symlink());
        // Another file is replaced.
        let output = cushion(here, &["convert", "x.pickle", "y.pickle"], Stdio::null());
        assert_eq!(output.status.code(), Some(0));
    }

    /// The input is not a trace: a message about the output shows that the output was checked
    /// first.
    #[test]
    fn an_unwritable_path_is_reported_before_the_work() {
        let (folder, _) = folder();
        let here = folder.path();
        fs::create_dir(here.join("sub.cushion")).unwrap();
        fs::create_dir(here.join("locked")).unwrap();
        fs::set_permissions(here.join("locked"), fs::Permissions::from_mode(0o555)).unwrap();
        fs::write(here.join("bad"), b"GARBAGE").unwrap();
        // Root may write there too.
        let is_root = File::create(here.join("locked/probe")).is_ok();
        for (place, expected) in [
            ("no/such/out.cushion", "there is no folder no/such"),
            ("bad/out.cushion", "bad is not a folder"),
            ("sub.cushion", "it is a folder: name a file in it"),
            ("locked/out.cushion", "no file can be made in the folder"),
        ] {
            if is_root && place.starts_with("locked") {
                continue;
            }
            for args in [
                &["convert", "bad", place][..],
                &["report", "bad", "-o", place],
                &["replay", "bad", "--receipts", place],
            ] {
                let told = refused(here, args, Stdio::null());
                let start = format!("cushion: cannot write {place}: ");
                assert!(told.starts_with(&start) && told.contains(expected), "{told}");
            }
        }
        fs::set_permissions(here.join("locked"), fs::Permissions::from_mode(0o755)).unwrap();
    }
}
