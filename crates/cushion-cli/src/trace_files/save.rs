//! Writes a file atomically: to a temporary file in the same folder, which is then renamed.
//!
//! The path is checked before the work begins: a result that cannot be written is useless, and a
//! result that overwrites an input destroys it.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context as _, bail};

/// The argument for standard input or output.
pub(crate) const STANDARD: &str = "-";

/// Checks that a file can be written at `path` and is not one of `inputs`. Leaves no file there.
pub(crate) fn check(path: &Path, inputs: &[&Path]) -> anyhow::Result<()> {
    look(path, inputs).with_context(|| cannot(path))
}

fn look(path: &Path, inputs: &[&Path]) -> anyhow::Result<()> {
    if let Ok(there) = fs::metadata(path) {
        if there.is_dir() {
            bail!("it is a folder: name a file in it");
        }
        if !there.is_file() {
            return Ok(()); // A device or a pipe: opening it would already use it.
        }
        for input in inputs {
            // An input that is missing or unreadable is reported when it is read.
            if of_input(input).is_ok_and(|input| is_same(&input, &there)) {
                bail!(
                    "it is the same file as the input {}, which would be lost: name another file",
                    input.display()
                );
            }
        }
    }
    let place = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let folder = folder_of(&place)?;
    // The only reliable check is to create a file: it has no name, and is removed at once.
    tempfile::tempfile_in(folder)
        .with_context(|| format!("no file can be created in the folder {}", folder.display()))?;
    Ok(())
}

fn of_input(path: &Path) -> io::Result<Metadata> {
    if path == Path::new(STANDARD) {
        return File::from(io::stdin().as_fd().try_clone_to_owned()?).metadata();
    }
    fs::metadata(path)
}

/// Returns whether two paths, with links resolved, are one file.
fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

fn folder_of(place: &Path) -> anyhow::Result<&Path> {
    let folder = match place.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    match fs::metadata(folder) {
        Ok(there) if there.is_dir() => Ok(folder),
        Ok(_) => bail!("{} is not a folder", folder.display()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!("there is no folder {}", folder.display())
        }
        Err(error) => Err(error).with_context(|| format!("the folder {}", folder.display())),
    }
}

fn cannot(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

/// Writes the file at `path` with `write`, whole or not at all.
pub(crate) fn save<R>(
    path: &Path,
    write: impl FnOnce(&mut File) -> io::Result<R>,
) -> anyhow::Result<R> {
    put(path, write).with_context(|| cannot(path))
}

fn put<R>(path: &Path, write: impl FnOnce(&mut File) -> io::Result<R>) -> anyhow::Result<R> {
    // A link stays a link: its target is replaced.
    let place = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if fs::metadata(&place).is_ok_and(|what| !what.is_file()) {
        // A device or a pipe is written to, not replaced; a folder is an error.
        return Ok(write(&mut File::options().write(true).open(&place)?)?);
    }
    let folder = folder_of(&place)?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".cushion-");
    {
        use std::os::unix::fs::PermissionsExt as _;
        // The permissions of any new file: the umask reduces them.
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    let mut file = builder.tempfile_in(folder)?;
    let done = write(file.as_file_mut())?;
    file.persist(&place)?;
    Ok(done)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_file_is_written_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.html");
        let put = |path: &Path, bytes: &[u8]| save(path, |file| file.write_all(bytes));
        put(&path, b"one").unwrap();
        put(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert!(put(&folder.path().join("no/such.html"), b"x").is_err());
        let failed = save(&path, |file| {
            file.write_all(b"half of it")?;
            Err::<(), _>(io::Error::other("the disk is full"))
        });
        assert!(failed.is_err());
        assert_eq!(fs::read(&path).unwrap(), b"two");
        // A folder has that name: no temporary file is left behind.
        fs::create_dir(folder.path().join("b.html")).unwrap();
        assert!(put(&folder.path().join("b.html"), b"x").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_path_is_checked_before_it_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("input"), b"precious").unwrap();
        std::os::unix::fs::symlink(at("input"), at("soft")).unwrap();
        fs::hard_link(at("input"), at("hard")).unwrap();
        let input = at("input");
        for same in [at("input"), at("./input"), at("soft"), at("hard")] {
            let told = format!("{:#}", check(&same, &[&at("other"), &input]).unwrap_err());
            assert!(told.contains("the same file as the input"), "{told}");
        }
        check(&at("other"), &[&input]).unwrap();
        check(&at("input"), &[&at("other")]).unwrap();
        check(Path::new("/dev/null"), &[Path::new("/dev/null")]).unwrap();
        for (path, expected) in [
            (at("no/such"), "there is no folder"),
            (at("input/below"), "is not a folder"),
            (folder.path().to_owned(), "it is a folder: name a file in it"),
        ] {
            let told = format!("{:#}", check(&path, &[&input]).unwrap_err());
            assert!(told.starts_with("cannot write ") && told.contains(expected), "{told}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "no file is left");
    }
}
