//! The Unix socket of `TREFOIL_OBSERVE=unix`: its folder, and who may open it.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use trefoil::net::{UnixListener, UnixStream};
use trefoil::observer::{own_uid, peer_uid};

/// Makes the folder if needed, and listens in it. Returns the path too.
pub(crate) fn bind() -> io::Result<(UnixListener, PathBuf)> {
    let folder = folder();
    prepare_folder(&folder)?;
    remove_sockets_of_ended_processes(&folder);
    let path = folder.join(format!("{}.sock", std::process::id()));
    if UnixStream::connect(&path).is_ok() {
        let text = format!("{} is in use", path.display());
        return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
    }
    // An earlier process had the same id.
    _ = fs::remove_file(&path);
    let listener = UnixListener::bind(&path)?;
    // The folder's mode has kept others out meanwhile.
    fs::set_permissions(&path, Permissions::from_mode(0o600))?;
    Ok((listener, path))
}

/// Returns `$XDG_RUNTIME_DIR/trefoil`, or else `/tmp/trefoil-UID`.
fn folder() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
        Some(dir) if dir.is_absolute() => dir.join("trefoil"),
        _ => PathBuf::from(format!("/tmp/trefoil-{}", own_uid())),
    }
}

/// Makes the folder, for this user only. Fails if it exists and is not like that: another user may
/// have made it in /tmp.
fn prepare_folder(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            return Err(io::Error::new(e.kind(), format!("{}: {e}", folder.display())));
        }
        _ => {}
    }
    // Not the target of a link.
    let found = fs::symlink_metadata(folder)?;
    if !found.is_dir() || found.uid() != own_uid() || found.mode() & 0o077 != 0 {
        let text = format!("{} must be a folder of this user, with mode 0700", folder.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    Ok(())
}

/// A process that is killed leaves its socket behind.
fn remove_sockets_of_ended_processes(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let pid = path
            .file_name()
            .and_then(|name| name.to_str()?.strip_suffix(".sock")?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            _ = fs::remove_file(path);
        }
    }
}

/// Returns whether the other end is of the same user, or root.
pub(crate) fn is_allowed(stream: &UnixStream) -> bool {
    peer_uid(stream).is_ok_and(|uid| is_allowed_uid(uid, own_uid()))
}

fn is_allowed_uid(peer: u32, own: u32) -> bool {
    peer == own || peer == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_user_is_refused() {
        assert!(is_allowed_uid(1000, 1000));
        assert!(is_allowed_uid(0, 1000));
        assert!(!is_allowed_uid(1001, 1000));
        assert!(!is_allowed_uid(1000, 0));
    }

    #[test]
    fn a_folder_that_others_may_enter_is_refused() {
        let folder = std::env::temp_dir().join(format!("trefoil-observe-{}", std::process::id()));
        prepare_folder(&folder).unwrap();
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        prepare_folder(&folder).unwrap();
        fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
        assert_eq!(prepare_folder(&folder).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        fs::remove_dir(&folder).unwrap();
        std::os::unix::fs::symlink("/tmp", &folder).unwrap();
        assert_eq!(prepare_folder(&folder).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        fs::remove_file(&folder).unwrap();
    }
}
