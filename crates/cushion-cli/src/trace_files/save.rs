//! Writing a file, so that nobody ever sees half of it: beside its place first, then moved there.
//!
//! Where it goes is looked at before the work begins: work whose result cannot be written is in vain, and
//! a result over one of its own inputs destroys what cannot be made again.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context as _, bail};

/// What stands for standard input or output.
pub(crate) const STANDARD: &str = "-";

/// Looks whether a file can be written at `path` that is none of `inputs`; nothing is left there.
pub(crate) fn check(path: &Path, inputs: &[&Path]) -> anyhow::Result<()> {
    look(path, inputs).with_context(|| cannot(path))
}

fn look(path: &Path, inputs: &[&Path]) -> anyhow::Result<()> {
    if let Ok(there) = fs::metadata(path) {
        if there.is_dir() {
            bail!("it is a folder: name a file in it");
        }
        if !there.is_file() {
            return Ok(()); // A device or a pipe: to open it is to begin.
        }
        for input in inputs {
            // One that is not there, or cannot be looked at, is told of when it is read.
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
    // What the system allows is asked by doing it: the file has no name, and is gone at once.
    tempfile::tempfile_in(folder)
        .with_context(|| format!("no file can be made in the folder {}", folder.display()))?;
    Ok(())
}

fn of_input(path: &Path) -> io::Result<Metadata> {
    if path == Path::new(STANDARD) {
        return File::from(io::stdin().as_fd().try_clone_to_owned()?).metadata();
    }
    fs::metadata(path)
}

/// Whether two paths, links followed, lead to one file.
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
        Ok(_) => bail!("{} is no folder", folder.display()),
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
    // A link stays a link: what it points to is replaced.
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
        // Those of any new file: the umask takes away what it does elsewhere.
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
        // A folder of that name is in the way: no draft is left behind.
        fs::create_dir(folder.path().join("b.html")).unwrap();
        assert!(put(&folder.path().join("b.html"), b"x").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_place_is_looked_at_before_it_is_written_to() {
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
            (at("input/below"), "is no folder"),
            (folder.path().to_owned(), "it is a folder: name a file in it"),
        ] {
            let told = format!("{:#}", check(&path, &[&input]).unwrap_err());
            assert!(told.starts_with("cannot write ") && told.contains(expected), "{told}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "nothing is left");
    }
}
