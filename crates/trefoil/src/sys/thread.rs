//! Threads of the runtime, by pthread_create.
//!
//! Not by std: a std thread maps an alternate signal stack in its first moments and aborts the process if
//! there is no address space for it. Here everything that can fail has failed before the thread exists.

use std::ffi::c_void;
use std::io;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

type Body = Box<dyn FnOnce() + Send>;

/// Starts a detached thread with a stack of so many bytes. A panic in it aborts.
pub(crate) fn spawn(
    name: String,
    stack_bytes: usize,
    f: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let body: Body = Box::new(move || {
        let name = std::ffi::CString::new(name).unwrap_or_default();
        let _ = rustix::thread::set_name(&name);
        f();
    });
    let body = Box::into_raw(Box::new(body));
    let mut attr = MaybeUninit::uninit();
    let mut thread = MaybeUninit::uninit();
    // SAFETY: an attribute object of our own, initialised and destroyed here; the body is handed over.
    let rc = unsafe {
        libc::pthread_attr_init(attr.as_mut_ptr());
        libc::pthread_attr_setstacksize(attr.as_mut_ptr(), stack_bytes);
        libc::pthread_attr_setdetachstate(attr.as_mut_ptr(), libc::PTHREAD_CREATE_DETACHED);
        let rc = libc::pthread_create(thread.as_mut_ptr(), attr.as_ptr(), run, body.cast());
        libc::pthread_attr_destroy(attr.as_mut_ptr());
        rc
    };
    if rc == 0 {
        return Ok(());
    }
    // SAFETY: there is no thread that would take it.
    drop(unsafe { Box::from_raw(body) });
    Err(io::Error::from_raw_os_error(rc))
}

extern "C" fn run(body: *mut c_void) -> *mut c_void {
    // SAFETY: what `spawn` handed over, once.
    let body = unsafe { Box::from_raw(body.cast::<Body>()) };
    body();
    null_mut()
}
