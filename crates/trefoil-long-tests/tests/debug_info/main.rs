//! The lines and functions that `trefoil_base::symbols` finds, against those that addr2line finds.
//!
//! Each test compiles programs, or takes its own, and looks up the start of every function and
//! [`ADDRESSES`] addresses in the code by both. A test says so and passes if the compiler is
//! missing or does not know an option.
//!
//! The readers differ on purpose in these cases:
//!
//! - Several functions or lines at one address, where nothing says which is right: code that the
//!   linker has removed and left in the table at address 0. No address here is there.
//! - Rows of code that the linker has removed after rows that it has kept: addr2line adds the rows
//!   before to the next sequence. trefoil_base::symbols drops them.
//! - More than 256 nested inlined calls: trefoil_base::symbols leaves out the innermost.
//! - Damaged tables: addr2line finds nothing in the whole program, unit or function.
//!   trefoil_base::symbols uses what precedes the damage.
//! - A `.dwo` file whose number is not that of the program's unit: addr2line uses it, and tells
//!   functions of another build. trefoil_base::symbols takes it as missing.

mod programs;
mod reference;

use programs::{C_SOURCES, Folder, RUST_SOURCE};
use reference::Reference;
use std::path::Path;
use std::time::Instant;
use trefoil_base::symbols::{Elf, SymbolFile};

/// How many addresses of each program are looked up, besides the starts of functions.
const ADDRESSES: u64 = 20_000;

/// A call at an address: its name, file and line.
type Call = (Option<String>, String, u32);

/// What must have been found, so that two readers that find nothing do not pass.
#[derive(Clone, Copy, PartialEq)]
enum Expected {
    /// Inlined calls, with files and lines.
    InlinedCalls,
    /// Names from the table of symbols.
    NamesOnly,
}

/// Compares both readers.
fn compare(what: &str, program: &Path, expected: Expected) {
    let bytes: &'static [u8] = std::fs::read(program).unwrap().leak();
    let elf = Elf::parse(bytes).unwrap();
    let text = elf.section(".text").unwrap();
    let functions = elf.symbols().filter(|symbol| symbol.is_function);
    let mut addresses: Vec<u64> = functions.map(|function| function.address).collect();
    let functions = addresses.len();
    // A prime, so that the addresses are at all distances from the starts of instructions.
    let step = (text.size / ADDRESSES).max(1) | 1;
    addresses.extend((0..ADDRESSES).map(|index| text.address + index * step % text.size));

    let begin = Instant::now();
    let mut file = SymbolFile::map(program, program, |_| true).unwrap();
    let mut reference = Reference::new(bytes, program);
    let opened = begin.elapsed();
    let (mut lines, mut inlined, mut different) = (0, 0, 0);
    for &address in &addresses {
        let mut calls: Vec<Call> = Vec::new();
        file.calls(address, &mut |call| {
            let name = call.name.map(|name| String::from_utf8_lossy(name).into_owned());
            calls.push((name, call.file.to_owned(), call.line));
        });
        let mut right = reference.calls(address);
        for call in &mut right {
            if call.0.is_none() {
                let name = file.function(address);
                call.0 = name.map(|name| String::from_utf8_lossy(name).into_owned());
            }
        }
        if right.is_empty()
            && let Some(name) = file.function(address)
        {
            right.push((Some(String::from_utf8_lossy(name).into_owned()), String::new(), 0));
        }
        lines += usize::from(calls.iter().any(|call| call.2 != 0));
        inlined += usize::from(calls.len() > 1);
        if calls != right {
            different += 1;
            if different <= 5 {
                eprintln!("{what}: {address:#x}\n  found    {calls:?}\n  expected {right:?}");
            }
        }
    }
    let count = addresses.len();
    eprintln!(
        "{what}: {count} addresses ({functions} functions), {lines} with lines, {inlined} with \
         inlined calls, opened in {opened:.1?}, compared in {:.1?}",
        begin.elapsed()
    );
    assert_eq!(different, 0, "{what}: differences");
    if expected == Expected::InlinedCalls {
        assert!(lines > count / 3, "{what}: only {lines} lines");
        assert!(inlined > 20, "{what}: only {inlined} inlined calls");
    } else {
        assert_eq!(inlined, 0, "{what}");
    }
}

#[test]
fn calls_of_this_program_are_those_of_addr2line() {
    compare("this program", &std::env::current_exe().unwrap(), Expected::InlinedCalls);
}

#[test]
fn calls_of_c_programs_are_those_of_addr2line() {
    let folder = Folder::new("c");
    for options in [
        &["-g", "-O2", "-gdwarf-2", "-gstrict-dwarf"][..],
        &["-g", "-O2", "-gdwarf-2"],
        &["-g", "-O2", "-gdwarf-3"],
        &["-g", "-O2", "-gdwarf-4"],
        &["-g", "-O2", "-gdwarf-5"],
        &["-g", "-O2", "-gdwarf-5", "-gdwarf64"],
        &["-g", "-O2", "-gdwarf-4", "-gdwarf64"],
        &["-g", "-O3", "-gdwarf-5", "-ffunction-sections", "-Wl,--gc-sections"],
        &["-g", "-O3", "-gdwarf-4", "-ffunction-sections", "-Wl,--gc-sections"],
        &["-g", "-O2", "-flto"],
        &["-g", "-O2", "-gdwarf-4", "-flto", "-no-pie"],
        &["-g", "-O2", "-gdwarf-4", "-fdebug-types-section"],
        &["-g", "-O2", "-gdwarf-5", "-fdebug-types-section"],
        &["-g", "-O2", "-gno-as-locview-support", "-gno-as-loc-support"],
        &["-g3", "-Os", "-gdwarf-5"],
    ] {
        let Some(program) = folder.compile_c(C_SOURCES, options) else { continue };
        compare(&format!("cc {}", options.join(" ")), &program, Expected::InlinedCalls);
    }
    if let Some(program) = folder.compile_c(C_SOURCES, &["-g0", "-O2"]) {
        compare("cc -g0", &program, Expected::NamesOnly);
    }
}

#[test]
fn calls_of_c_programs_with_split_debug_information_are_those_of_addr2line() {
    let folder = Folder::new("split");
    for options in [
        &["-g", "-O2", "-gdwarf-4", "-gsplit-dwarf"][..],
        &["-g", "-O2", "-gdwarf-5", "-gsplit-dwarf"],
        &["-g", "-O3", "-gdwarf-4", "-gsplit-dwarf", "-ffunction-sections"],
        &["-g", "-O3", "-gdwarf-5", "-gsplit-dwarf", "-ffunction-sections"],
        &["-g", "-O2", "-gdwarf-5", "-gsplit-dwarf", "-gdwarf64"],
        &["-g", "-O2", "-gdwarf-5", "-gsplit-dwarf", "-fdebug-types-section"],
    ] {
        let Some(program) = folder.compile_c(C_SOURCES, options) else { continue };
        let what = format!("cc {}", options.join(" "));
        compare(&what, &program, Expected::InlinedCalls);
        if let Some(package) = folder.pack(&program) {
            let hidden = folder.hide_split_files();
            compare(&format!("{what}, packed"), &program, Expected::InlinedCalls);
            std::fs::remove_file(package).unwrap();
            hidden.show();
        }
        let hidden = folder.hide_split_files();
        compare(&format!("{what} (files missing)"), &program, Expected::NamesOnly);
        hidden.show();
    }
}

#[test]
fn a_split_file_of_another_build_is_not_used() {
    let folder = Folder::new("stale");
    for version in ["-gdwarf-4", "-gdwarf-5"] {
        let options = ["-g", "-O2", version, "-gsplit-dwarf"];
        let Some(program) = folder.compile_c(C_SOURCES, &options) else { continue };
        let old = folder.hide_split_files();
        let changed = C_SOURCES.map(|(name, source)| {
            (name, source.replace("deeper", "changed").replace("recursive", "changed"))
        });
        let changed = changed.each_ref().map(|(name, source)| (*name, &source[..]));
        let kept = program.with_extension("kept");
        std::fs::rename(&program, &kept).unwrap();
        folder.compile_c(changed, &options).unwrap();
        compare(version, &program, Expected::InlinedCalls);
        let mut file = SymbolFile::map(&kept, &kept, |_| true).unwrap();
        let bytes = std::fs::read(&kept).unwrap();
        let text = Elf::parse(&bytes).unwrap().section(".text").unwrap();
        let mut calls = 0;
        for address in text.address..text.address + text.size {
            file.calls(address, &mut |call| {
                let name = String::from_utf8_lossy(call.name.unwrap_or_default());
                assert!(!name.contains("changed"), "{name}");
                calls += 1;
            });
        }
        assert!(calls > 0);
        drop(old);
    }
}

#[test]
fn calls_of_rust_programs_are_those_of_addr2line() {
    let folder = Folder::new("rust");
    for options in [
        &["-g"][..],
        &["-g", "-O"],
        &["-g", "-Copt-level=3", "-Clto=fat", "-Ccodegen-units=1"],
        &["-Cdebuginfo=line-tables-only"],
        &["-O", "-Cdebuginfo=line-tables-only"],
        &["-O", "-Cdebuginfo=1", "-Clto=fat"],
        &["-g", "-O", "-Csplit-debuginfo=packed"],
        &["-g", "-O", "-Csplit-debuginfo=unpacked"],
        &["-g", "-O", "-Cdwarf-version=5"],
        &["-g", "-O", "-Cdwarf-version=5", "-Csplit-debuginfo=packed"],
        &["-g", "-O", "-Cdwarf-version=5", "-Csplit-debuginfo=unpacked"],
        &["-g", "-O", "-Clink-args=-Wl,--gc-sections -no-pie", "-Crelocation-model=static"],
    ] {
        let Some(program) = folder.compile_rust(RUST_SOURCE, options) else { continue };
        compare(&format!("rustc {}", options.join(" ")), &program, Expected::InlinedCalls);
    }
}
