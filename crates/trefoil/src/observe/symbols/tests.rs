use super::*;
use crate::observe::unwind::{OwnAddress, own_stack};
use trefoil_base::symbols::{Elf, frame_kind};

#[test]
fn this_file_belongs_to_the_runtime() {
    assert_eq!(frame_kind("here", &format!("/{}", file!())), FrameKind::Runtime);
}

/// Returns the names, files and lines at an address of this process.
fn calls_at(address: u64) -> Vec<(String, String, u32)> {
    let mut calls = Vec::new();
    Resolver::lock().calls(address, &mut |call| {
        calls.push((call.name.map(demangle).unwrap_or_default(), call.file.into(), call.line));
    });
    calls
}

/// Returns the address of the instruction that has called this function.
#[inline(never)]
fn caller() -> u64 {
    let mut addresses = [OwnAddress::Call(0); 3];
    assert_eq!(own_stack(&mut addresses), 3);
    addresses[2].address()
}

#[inline(always)]
fn inlined() -> (u64, u32) {
    (caller(), line!())
}

#[inline(never)]
fn outer() -> (u64, u32, u32) {
    let (address, inner) = inlined();
    (std::hint::black_box(address), inner, line!() - 1)
}

#[test]
fn an_address_has_the_inlined_call_and_its_caller() {
    let (address, inner, outer) = outer();
    let calls = calls_at(address);
    let [(inlined, file, line), (caller, _, caller_line)] = &calls[..] else { panic!("{calls:?}") };
    assert!(inlined.ends_with("inlined") && caller.ends_with("outer"), "{calls:?}");
    assert!(file.ends_with("symbols/tests.rs"), "{file}");
    assert_eq!((*line, *caller_line), (inner, outer));
}

#[test]
fn an_address_in_no_object_has_no_call() {
    let heap = Box::new(0u8);
    for address in [0, 1, &raw const *heap as u64, u64::MAX] {
        assert_eq!(calls_at(address), []);
    }
}

#[test]
fn an_address_in_the_vdso_has_its_function() {
    // SAFETY: reads the auxiliary vector.
    let vdso = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) };
    if vdso == 0 {
        return; // In an emulator of user programs.
    }
    // SAFETY: the vdso is mapped in whole pages, and never unmapped.
    let bytes = unsafe { std::slice::from_raw_parts(vdso as *const u8, 4096) };
    let e_shoff = u64::from_le_bytes(*bytes[40..].first_chunk().unwrap());
    let all = e_shoff as usize + 64 * usize::from(bytes[60]);
    // SAFETY: as above; the table of sections is the end of it.
    let elf = Elf::parse(unsafe { std::slice::from_raw_parts(vdso as *const u8, all) }).unwrap();
    let gettime = elf.symbols().find(|symbol| symbol.name.ends_with(b"clock_gettime")).unwrap();
    let calls = calls_at(vdso + gettime.address + 1);
    assert!(calls[0].0.ends_with("clock_gettime"), "{calls:?}");
}

/// Loads a copy of a library that nothing else loads. Returns its handle and the address of a
/// function in it.
fn load_library(path: &std::path::Path) -> (*mut std::ffi::c_void, u64) {
    let folder = if cfg!(target_arch = "x86_64") { "x86_64" } else { "aarch64" };
    let candidates = [
        format!("/usr/lib/{folder}-linux-gnu/libresolv.so.2"),
        format!("/lib/{folder}-linux-gnu/libresolv.so.2"),
        "/lib/libresolv.so.2".into(),
        "/usr/lib64/libresolv.so.2".into(),
        "/usr/lib/libresolv.so.2".into(),
    ];
    let is_copied = candidates.iter().any(|library| std::fs::copy(library, path).is_ok());
    assert!(is_copied, "glibc's libresolv is not in {candidates:?}");
    let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the names end with a zero. The library has no constructors that matter.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        assert!(!handle.is_null());
        let function = libc::dlsym(handle, c"ns_parse_ttl".as_ptr());
        assert!(!function.is_null());
        (handle, function as u64)
    }
}

#[test]
fn a_library_that_is_loaded_later_has_names_until_it_is_unloaded() {
    let folder = std::env::temp_dir();
    let path = folder.join(format!("trefoil-loaded-later-{}.so", std::process::id()));
    assert!(!calls_at(calls_at as *const () as u64).is_empty());
    let (handle, function) = load_library(&path);
    let calls = calls_at(function);
    assert!(calls[0].0.ends_with("ns_parse_ttl"), "{calls:?}");
    // SAFETY: the handle of `dlopen`, of a library that nothing uses.
    assert_eq!(unsafe { libc::dlclose(handle) }, 0);
    assert_eq!(calls_at(function), []);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_library_whose_file_was_replaced_has_no_names() {
    let folder = std::env::temp_dir();
    let path = folder.join(format!("trefoil-replaced-{}.so", std::process::id()));
    let other = path.with_extension("other");
    let (_, function) = load_library(&path);
    std::fs::copy("/proc/self/exe", &other).unwrap();
    std::fs::rename(&other, &path).unwrap();
    assert_eq!(calls_at(function), []);
    std::fs::remove_file(path).unwrap();
}
