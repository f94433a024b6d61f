//! The Unix socket of `TREFOIL_OBSERVE=unix`: its folder, and who may open it.

use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use trefoil::net::{UnixListener, UnixStream};
use trefoil::observer::{has_no_listener, listen_privately, own_uid, peer_uid};

/// Makes the folder if needed, and listens in it. Returns the path too.
pub(crate) fn bind() -> io::Result<(UnixListener, PathBuf)> {
    /// A socket exists shortly before it listens. Another server of this process that starts
    /// meanwhile must not take it for one that was left behind.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = folder(std::env::var_os("XDG_RUNTIME_DIR"));
    prepare_folder(&folder)?;
    let path = folder.join(format!("{}.sock", std::process::id()));
    remove_sockets_of_ended_processes(&folder);
    let listener = listen_privately(&path).map_err(|e| match e.kind() {
        io::ErrorKind::AddrInUse => {
            io::Error::new(e.kind(), format!("{} is in use", path.display()))
        }
        kind => io::Error::new(kind, format!("{}: {e}", path.display())),
    })?;
    Ok((UnixListener::from_std(listener)?, path))
}

/// Returns `$XDG_RUNTIME_DIR/trefoil`, or else `/tmp/trefoil-UID`. The variable may be of another
/// user: `sudo` can keep it.
fn folder(runtime_dir: Option<OsString>) -> PathBuf {
    let is_own =
        |dir: &PathBuf| fs::metadata(dir).is_ok_and(|it| it.is_dir() && it.uid() == own_uid());
    match runtime_dir.map(PathBuf::from) {
        Some(dir) if dir.is_absolute() && is_own(&dir) => dir.join("trefoil"),
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

/// A process that is killed leaves its socket behind, and this process may get the same id. A
/// process that cannot be seen in `/proc` may be alive: in another container that shares the
/// folder, or if `/proc` hides it. So a socket is removed only if nothing listens there.
fn remove_sockets_of_ended_processes(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let own = std::process::id();
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let pid = path
            .file_name()
            .and_then(|name| name.to_str()?.strip_suffix(".sock")?.parse::<u32>().ok());
        let may_have_ended = |pid: u32| pid == own || !Path::new(&format!("/proc/{pid}")).exists();
        if pid.is_some_and(may_have_ended) && has_no_listener(&path) {
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
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn another_user_is_refused() {
        assert!(is_allowed_uid(1000, 1000));
        assert!(is_allowed_uid(0, 1000));
        assert!(!is_allowed_uid(1001, 1000));
        assert!(!is_allowed_uid(1000, 0));
    }

    #[test]
    fn the_runtime_folder_of_another_user_is_not_used() {
        let fallback = PathBuf::from(format!("/tmp/trefoil-{}", own_uid()));
        assert_eq!(folder(None), fallback);
        assert_eq!(folder(Some("relative".into())), fallback);
        assert_eq!(folder(Some("/nowhere/at/all".into())), fallback);
        let own = std::env::temp_dir().join(format!("trefoil-runtime-{}", std::process::id()));
        fs::create_dir_all(&own).unwrap();
        assert_eq!(folder(Some(own.clone().into())), own.join("trefoil"));
        fs::remove_dir(&own).unwrap();
        if own_uid() != 0 {
            assert_eq!(folder(Some("/".into())), fallback);
            return;
        }
        let name = format!("trefoil-foreign-{}", std::process::id());
        let foreign = std::env::temp_dir().join(name);
        fs::create_dir_all(&foreign).unwrap();
        if std::os::unix::fs::chown(&foreign, Some(12345), None).is_ok() {
            assert_eq!(folder(Some(foreign.clone().into())), fallback);
        }
        fs::remove_dir(&foreign).unwrap();
    }

    #[test]
    fn a_socket_is_removed_only_if_nothing_listens_there() {
        let folder = std::env::temp_dir().join(format!("trefoil-sockets-{}", std::process::id()));
        prepare_folder(&folder).unwrap();
        // Above the largest id that Linux gives: neither process is seen in /proc.
        let (live, ended) = (folder.join("99999991.sock"), folder.join("99999992.sock"));
        let no_socket = folder.join("99999993.sock");
        let listener = listen_privately(&live).unwrap();
        assert_eq!(fs::metadata(&live).unwrap().mode() & 0o777, 0o600);
        drop(listen_privately(&ended).unwrap());
        fs::write(&no_socket, "").unwrap();
        remove_sockets_of_ended_processes(&folder);
        assert!(live.exists(), "a process listens there");
        assert!(!ended.exists(), "no process listens there");
        drop(listener);
        fs::remove_dir_all(&folder).unwrap();
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
