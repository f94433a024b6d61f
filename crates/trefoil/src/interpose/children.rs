//! Calls that start a child process: a simulation closes none of its files meanwhile
//! (`simnet/children.rs`). They do nothing else than libc's, and neither does `fork`, which
//! `pthread_atfork` watches.

use crate::simnet::children;
use libc::{c_char, c_int, pid_t, posix_spawn_file_actions_t, posix_spawnattr_t};

interpose! {
    /// libc's function.
    fn posix_spawn(pid: *mut pid_t, path: *const c_char,
        actions: *const posix_spawn_file_actions_t, attr: *const posix_spawnattr_t,
        argv: *const *mut c_char, envp: *const *mut c_char) -> c_int;
    with real => children::start(|| real(pid, path, actions, attr, argv, envp))
}

interpose! {
    /// libc's function.
    fn posix_spawnp(pid: *mut pid_t, file: *const c_char,
        actions: *const posix_spawn_file_actions_t, attr: *const posix_spawnattr_t,
        argv: *const *mut c_char, envp: *const *mut c_char) -> c_int;
    with real => children::start(|| real(pid, file, actions, attr, argv, envp))
}
