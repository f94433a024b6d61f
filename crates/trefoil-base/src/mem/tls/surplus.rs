//! Takes all that is left of glibc's static TLS, so that no library that is loaded later gets a
//! part of it.
//!
//! ```text
//!   tp - below             tp - below_used                  tp
//!    |       surplus        |  modules that start-up loaded  |  struct pthread |
//!    |  image of this file  |                                |
//!    ◀──── the stack of a goroutine grows over this
//! ```
//! (On variant I the surplus is at the other end, above the modules, and goroutines do not have
//! it.)
//!
//! glibc gives every thread some 1.7 to 2.1 KiB more of static TLS than start-up needs (the
//! *surplus*). A library that is loaded later gets a place there, in every thread, if its TLS has
//! the initial-exec model, and often if it has TLS descriptors. So a goroutine's stack may lie
//! there only if no library can get such a place any more. [`take_all`] sees to that: it loads a
//! tiny library, made here, that has nothing but TLS, of a size so that the loader refuses one byte
//! more. From then on the loader
//!
//! - refuses every initial-exec library, with an error of its own ("cannot allocate memory in
//!   static TLS block"),
//! - gives every other library dynamic TLS,
//!
//! also if libc itself loads the library (NSS, gconv), which no interposed `dlopen` sees.
//!
//! Invariants:
//! 1. No code accesses the TLS of an image: it has no code and exports no symbol. So the memory may
//!    be used for something else. Images are in a namespace of their own (`dlmopen`): `modules.rs`,
//!    debuggers and backtraces do not see them.
//! 2. Images stay loaded for ever: glibc takes a place back only if it is the last one and its
//!    library is closed.
//! 3. A refusal counts only if the loader gives the reason that it gives for an image that is too
//!    large for any surplus, and accepts the same image without TLS right afterwards. Otherwise
//!    memory, descriptors or `/proc` may be what is missing.
//!
//! # Rejected
//! - To compute the size of the surplus: glibc exports neither it nor what is used of it. To
//!   measure it takes some fifteen loads of 15 µs.
//! - To leave the images that the measurement loaded: each makes the DTV of every goroutine longer.
//! - The program's own namespace: gdb warned of a library without a file once per image and load.
//! - The path `/proc/self/fd/N`: a debugger that knows namespaces opens libraries by their names,
//!   and its own descriptor N may be a pipe. The path of a thread that has ended leads nowhere.
//! - A check in the interposed `dlopen`: it comes too late, and libc's own loads do not pass there.

use crate::arch;
use crate::sys::syscalls;
use crate::sys::thread::spawn_std;
use std::ffi::{CStr, CString, c_int, c_void};
use std::fs::File;
use std::io::Write;
use std::mem::{offset_of, size_of};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The first image that is tried, in bytes. glibc's surplus is 1.7 to 2.1 KiB, unless a tunable
/// enlarges it.
const LARGEST_IMAGE: u64 = 1024;
/// An image that no surplus has room for.
const IMPOSSIBLE_IMAGE: u64 = 1 << 40;
/// More images than this are not loaded: a surplus of 64 KiB is not a surplus, but a mistake.
const IMAGES_MAX: usize = 64;

/// The DTV indices of the images, once the surplus is taken.
static TAKEN: OnceLock<Vec<usize>> = OnceLock::new();

/// Takes the whole surplus. If it fails, a part may be taken, and libraries may still get the rest.
///
/// # Errors
/// A text that names what the kernel or the loader refused.
pub(super) fn take_all() -> Result<(), String> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if is_taken() {
        return Ok(());
    }
    // On a thread of its own, because images are loaded by its path.
    let loaded = Arc::new(OnceLock::new());
    let result = loaded.clone();
    let taker =
        spawn_std("trefoil-tls", None, Box::new(move || _ = result.set(load_until_refused())));
    let _ = taker.map_err(|e| format!("no thread: {e}"))?.join();
    let loaded = Arc::into_inner(loaded).and_then(OnceLock::into_inner);
    let images = loaded.ok_or("loading panicked")??;
    let _ = TAKEN.set(images);
    Ok(())
}

/// Returns whether the surplus is taken: the loader refuses libraries with initial-exec TLS.
pub(super) fn is_taken() -> bool {
    TAKEN.get().is_some()
}

/// Returns whether this is the DTV index of an image.
pub(super) fn is_image(module: usize) -> bool {
    TAKEN.get().is_some_and(|images| images.contains(&module))
}

/// Loads one image of the size that is left, so that the loader refuses one more byte.
fn load_until_refused() -> Result<Vec<usize>, String> {
    let mut images = Images(Vec::new());
    loop {
        let left = measure()?;
        if left == 0 {
            break;
        }
        // Another thread may have loaded or closed a library since the measurement: then this
        // fails, or a rest is left.
        images.load(left)?;
    }
    // Invariant 2.
    let images = std::mem::take(&mut images.0).into_iter();
    images.map(LoadedImage::keep).collect()
}

/// Returns how many bytes of the surplus are left.
fn measure() -> Result<u64, String> {
    let mut images = Images(Vec::new());
    // What the loader says if an image is too large (invariant 3).
    let refusal = match load(libc::LM_ID_NEWLM, Tls::Bytes(IMPOSSIBLE_IMAGE)) {
        Ok(_) => return Err("the surplus has no end".into()),
        Err(text) => reason(&text).to_owned(),
    };
    let (mut total, mut size) = (0, LARGEST_IMAGE);
    while size > 0 {
        match images.load(size) {
            Ok(()) => total += size,
            Err(text) if reason(&text) == refusal => size /= 2,
            Err(text) => return Err(text),
        }
    }
    // Invariant 3.
    load(images.namespace(), Tls::None)?;
    Ok(total)
}

/// Returns the part of a loader's error that does not name the file.
fn reason(text: &str) -> &str {
    text.rsplit(": ").next().unwrap_or(text)
}

/// Loaded images, in the order of their places. They are unloaded when they are dropped, the last
/// one first: glibc takes back only the last place.
struct Images(Vec<LoadedImage>);

impl Images {
    /// Loads one more image.
    fn load(&mut self, size: u64) -> Result<(), String> {
        if self.0.len() == IMAGES_MAX {
            return Err("the surplus has no end".into());
        }
        let image = load(self.namespace(), Tls::Bytes(size))?;
        self.0.push(image);
        Ok(())
    }

    /// Returns their namespace, or that a new one is needed.
    fn namespace(&self) -> libc::Lmid_t {
        self.0.first().map_or(libc::LM_ID_NEWLM, |image| image.namespace)
    }
}

impl Drop for Images {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

/// What an image asks the loader for.
#[derive(Clone, Copy)]
enum Tls {
    None,
    /// Static TLS of this size.
    Bytes(u64),
}

/// A loaded image, which is unloaded when it is dropped. Its file stays open, because the loader
/// identifies a library by its path, and the next image would have the same.
struct LoadedImage {
    handle: Handle,
    namespace: libc::Lmid_t,
    _file: File,
}

impl LoadedImage {
    /// Leaves the image loaded for ever. Returns its DTV index.
    fn keep(self) -> Result<usize, String> {
        let mut index = 0usize;
        // SAFETY: a handle of dlmopen; this request writes a size_t.
        let rc = unsafe { dlinfo(self.handle.0, RTLD_DI_TLS_MODID, (&raw mut index).cast()) };
        if rc != 0 || index == 0 {
            return Err("an image has no TLS".into());
        }
        std::mem::forget(self.handle);
        Ok(index)
    }
}

/// A handle of the loader, which is closed when it is dropped.
struct Handle(*mut c_void);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: a handle of dlmopen, closed once.
        unsafe { libc::dlclose(self.0) };
    }
}

/// Writes an image into a file in memory and loads it.
fn load(namespace: libc::Lmid_t, tls: Tls) -> Result<LoadedImage, String> {
    let file = syscalls::memfd_create(c"trefoil-tls").map_err(|e| format!("memfd: {e}"))?;
    let mut file = File::from(file);
    file.write_all(Image::new(tls).bytes()).map_err(|e| format!("memfd: {e}"))?;
    let path = format!("/proc/self/task/{}/fd/{}", syscalls::gettid(), file.as_raw_fd());
    let path = CString::new(path).map_err(|e| e.to_string())?;
    let mut namespace = namespace;
    // SAFETY: the image has no code, so loading it calls nothing. The request writes an Lmid_t.
    unsafe {
        let handle = libc::dlmopen(namespace, path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        if handle.is_null() || dlinfo(handle, RTLD_DI_LMID, (&raw mut namespace).cast()) != 0 {
            return Err(loader_error());
        }
        Ok(LoadedImage { handle: Handle(handle), namespace, _file: file })
    }
}

const RTLD_DI_LMID: c_int = 1;
const RTLD_DI_TLS_MODID: c_int = 9;

unsafe extern "C" {
    fn dlinfo(handle: *mut c_void, request: c_int, arg: *mut c_void) -> c_int;
}

/// Returns the loader's text for the failure of the last call on this thread.
fn loader_error() -> String {
    // SAFETY: null, or a string that is valid until the next call of the loader on this thread.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            return "the loader gives no reason".into();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

// -------------------------------------------------------------------------------------------------

/// A shared object: the least that the loader accepts. All of it is data, in one writable segment.
#[repr(C)]
struct Image {
    header: libc::Elf64_Ehdr,
    segments: [libc::Elf64_Phdr; 4],
    dynamic: [Dynamic; 9],
    /// The symbol with the number 0, which every table has.
    symbols: [u64; 3],
    strings: [u8; 8],
    relocation: Relocation,
    /// What the relocation writes: the place of the image's TLS.
    place: u64,
}

/// An `Elf64_Dyn`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Dynamic {
    tag: u64,
    value: u64,
}

/// An `Elf64_Rela`.
#[repr(C)]
struct Relocation {
    at: u64,
    kind: u64,
    addend: u64,
}

const RELOCATION_BYTES: u64 = size_of::<Relocation>() as u64;
const SYMBOL_BYTES: u64 = 24;

const DT_NULL: u64 = 0;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_RELA: u64 = 7;
const DT_RELASZ: u64 = 8;
const DT_RELAENT: u64 = 9;
const DT_STRSZ: u64 = 10;
const DT_SYMENT: u64 = 11;
const DT_FLAGS: u64 = 30;
const DF_STATIC_TLS: u64 = 16;

impl Image {
    fn new(tls: Tls) -> Image {
        const RW: u32 = libc::PF_R | libc::PF_W;
        let whole = size_of::<Image>() as u64;
        let segment = |p_type, from: usize, file_bytes, memory_bytes, p_align| libc::Elf64_Phdr {
            p_type,
            p_flags: RW,
            p_offset: from as u64,
            p_vaddr: from as u64,
            p_paddr: from as u64,
            p_filesz: file_bytes,
            p_memsz: memory_bytes,
            p_align,
        };
        let (dynamic, place) = (offset_of!(Image, dynamic), offset_of!(Image, place));
        let dynamic_bytes = size_of::<[Dynamic; 9]>() as u64;
        // An alignment of 1: no byte of the surplus is lost in front of it.
        let (tls_bytes, relocations, flags) = match tls {
            Tls::None => (0, 0, 0),
            Tls::Bytes(bytes) => (bytes, RELOCATION_BYTES, DF_STATIC_TLS),
        };
        let entry = |tag, value| Dynamic { tag, value };
        Image {
            header: libc::Elf64_Ehdr {
                e_ident: ident(),
                e_type: libc::ET_DYN,
                e_machine: arch::ELF_MACHINE,
                e_version: libc::EV_CURRENT,
                e_entry: 0,
                e_phoff: offset_of!(Image, segments) as u64,
                e_shoff: 0,
                e_flags: 0,
                e_ehsize: size_of::<libc::Elf64_Ehdr>() as u16,
                e_phentsize: size_of::<libc::Elf64_Phdr>() as u16,
                e_phnum: 4,
                e_shentsize: size_of::<libc::Elf64_Shdr>() as u16,
                e_shnum: 0,
                e_shstrndx: 0,
            },
            segments: [
                // Aligned to the largest page of any kernel.
                segment(libc::PT_LOAD, 0, whole, whole, 64 << 10),
                segment(libc::PT_DYNAMIC, dynamic, dynamic_bytes, dynamic_bytes, 8),
                segment(libc::PT_TLS, place, 0, tls_bytes, 1),
                // Without it the loader would make stacks executable.
                segment(libc::PT_GNU_STACK, 0, 0, 0, 16),
            ],
            dynamic: [
                entry(DT_STRTAB, offset_of!(Image, strings) as u64),
                entry(DT_STRSZ, 1),
                entry(DT_SYMTAB, offset_of!(Image, symbols) as u64),
                entry(DT_SYMENT, SYMBOL_BYTES),
                entry(DT_RELA, offset_of!(Image, relocation) as u64),
                entry(DT_RELASZ, relocations),
                entry(DT_RELAENT, RELOCATION_BYTES),
                entry(DT_FLAGS, flags),
                entry(DT_NULL, 0),
            ],
            symbols: [0; 3],
            strings: [0; 8],
            relocation: Relocation { at: place as u64, kind: arch::ELF_TLS_OFFSET, addend: 0 },
            place: 0,
        }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: plain numbers without padding between them (checked below).
        unsafe { std::slice::from_raw_parts((&raw const *self).cast(), size_of::<Image>()) }
    }
}

const _: () = assert!(
    size_of::<Image>() == 64 + 4 * 56 + 9 * 16 + 24 + 8 + 24 + 8,
    "the fields must leave no padding"
);

/// Returns the first bytes of a 64-bit little-endian ELF file.
fn ident() -> [u8; 16] {
    let mut ident = [0; 16];
    ident[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    ident
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loader_refuses_static_tls_once_the_surplus_is_taken() {
        take_all().unwrap();
        assert!(is_taken());
        for size in [1, 8, 64, 512] {
            for namespace in [libc::LM_ID_BASE, libc::LM_ID_NEWLM] {
                let refused = load(namespace, Tls::Bytes(size)).err().expect("no byte is left");
                assert!(refused.contains("static TLS"), "{refused}");
            }
        }
        take_all().unwrap();
    }

    #[test]
    fn images_are_not_among_the_libraries_of_the_program() {
        take_all().unwrap();
        crate::sys::objects::for_each(|info, _| {
            // SAFETY: a string of the loader, valid during the call.
            let name = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
            assert!(!name.starts_with(b"/proc/"), "{}", name.escape_ascii());
        });
    }
}
