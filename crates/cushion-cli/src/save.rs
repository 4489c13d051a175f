//! Writing a file, so that nobody ever sees half of it: beside its place first, then moved there.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use anyhow::bail;

/// Writes the file at `path` with `write`, whole or not at all.
pub(crate) fn save<R>(
    path: &Path,
    write: impl FnOnce(&mut File) -> io::Result<R>,
) -> anyhow::Result<R> {
    // A link stays a link: what it points to is replaced.
    let place = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if fs::metadata(&place).is_ok_and(|what| !what.is_file()) {
        // A device or a pipe is written to, not replaced; a folder is an error.
        return Ok(write(&mut File::options().write(true).open(&place)?)?);
    }
    let folder = match place.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    if !folder.is_dir() {
        bail!("there is no folder {}", folder.display());
    }
    let mut builder = tempfile::Builder::new();
    builder.prefix(".cushion-");
    #[cfg(unix)]
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
}
