//! Programs that the tests compile.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Two files that inline functions of each other if the linker optimizes.
pub(crate) const C_SOURCES: [(&str, &str); 2] = [
    (
        "main.c",
        r#"
#include "inlined.h"
#include <stdio.h>
#include <stdlib.h>
extern int other(int, const char *);
static __attribute__((noinline)) int recursive(int n) {
    return n < 2 ? n : recursive(n - 1) + mix(n);
}
__attribute__((cold, noinline)) static void fail(int n) { fprintf(stderr, "%d\n", n); exit(n); }
static int partly_cold(int n) {
    if (__builtin_expect(n > 1000, 0)) { fail(mix(n)); }
    int sum = 0;
    for (int i = 0; i < n; i++) { sum += twice_mixed(i) ^ sum << 1; if (sum == 77) fail(i); }
    return sum;
}
int unused(int n) { return partly_cold(n) + mix(n); }
#line 1000 "/generated/else where.c"
int main(int argc, char **argv) {
    int sum = partly_cold(argc);
    for (int i = 0; i < argc; i++) sum += other(i, argv[i]) + recursive(i);
    return sum + twice_mixed(sum);
}
"#,
    ),
    (
        "sub/other.c",
        r#"
#include "../inlined.h"
#include <string.h>
static inline int deeper(int n) { { int m = mix(n); { return twice_mixed(m) + m; } } }
int other(int n, const char *text) {
    int sum = 0;
    for (; *text; text++) sum = deeper(sum + *text) + (int)strlen(text);
    switch (sum & 7) { case 1: return deeper(n); case 3: return mix(sum); case 5: return -n; }
    return sum;
}
int never_called(int n) { return deeper(n) * deeper(n + 1); }
"#,
    ),
];

const HEADER: &str = r#"
static inline __attribute__((always_inline)) int mix(int n) { n ^= n >> 3; return n * 31 + 7; }
static inline __attribute__((always_inline)) int twice_mixed(int n) {
    int once = mix(n);
    return mix(once) + once;
}
"#;

/// Uses generics, closures and much of std that is inlined.
pub(crate) const RUST_SOURCE: &str = r#"
use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
trait Shape { fn area(&self) -> f64; fn name(&self) -> String { "shape".into() } }
struct Square(f64);
struct Circle { radius: f64 }
impl Shape for Square { fn area(&self) -> f64 { self.0 * self.0 } }
impl Shape for Circle {
    fn area(&self) -> f64 { self.radius.powi(2) * 3.14 }
    fn name(&self) -> String { format!("circle of {}", self.radius) }
}
fn show<T: Display>(all: &[T]) -> String {
    let texts = all.iter().map(|one| one.to_string()).filter(|text| !text.is_empty());
    texts.collect::<Vec<_>>().join(",")
}
mod inner {
    pub fn count(words: &str) -> super::BTreeMap<&str, usize> {
        let mut counts = super::BTreeMap::new();
        for word in words.split_whitespace() { *counts.entry(word).or_insert(0) += 1; }
        counts
    }
}
fn main() {
    let shapes: Vec<Box<dyn Shape>> = vec![Box::new(Square(2.0)), Box::new(Circle { radius: 1.0 })];
    let total: f64 = shapes.iter().map(|shape| shape.area()).sum();
    let mut map = HashMap::new();
    for (index, shape) in shapes.iter().enumerate() { map.insert(index, shape.name()); }
    let words = std::env::args().collect::<Vec<_>>().join(" ");
    let thread = std::thread::spawn(move || inner::count(&words).len());
    println!("{total} {map:?} {} {}", show(&[1, 2, 3]), thread.join().unwrap());
}
"#;

/// A folder for programs, which is removed at the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("debug_info_{name}_{}", std::process::id()));
        fs::create_dir_all(path.join("sub")).unwrap();
        Folder(path)
    }

    /// Compiles and links a C program. Returns None if there is no compiler, or if it does not
    /// know the options.
    pub(crate) fn compile_c(
        &self,
        sources: [(&str, &str); 2],
        options: &[&str],
    ) -> Option<PathBuf> {
        fs::write(self.0.join("inlined.h"), HEADER).unwrap();
        let compiler = std::env::var("CC").unwrap_or("cc".to_owned());
        for (name, source) in sources {
            fs::write(self.0.join(name), source).unwrap();
            let object = Path::new(name).with_extension("o");
            let mut command = Command::new(&compiler);
            command.args(options).arg("-c").arg(name).arg("-o").arg(object);
            self.run(command)?;
        }
        let mut command = Command::new(&compiler);
        command.args(options).args(["main.o", "sub/other.o", "-o", "program"]);
        self.run(command)?;
        Some(self.0.join("program"))
    }

    /// Compiles a Rust program. Returns None if there is no compiler, or if it does not know the
    /// options.
    pub(crate) fn compile_rust(&self, source: &str, options: &[&str]) -> Option<PathBuf> {
        fs::write(self.0.join("program.rs"), source).unwrap();
        let _ = fs::remove_file(self.0.join("program.dwp"));
        let mut command = Command::new(std::env::var("RUSTC").unwrap_or("rustc".to_owned()));
        // The paths of `.dwo` files are relative to the folder that the compiler runs in.
        command.args(options).args(["--edition=2024", "program.rs", "-o", "program"]);
        self.run(command)?;
        Some(self.0.join("program"))
    }

    /// Makes a `.dwp` file beside the program.
    pub(crate) fn pack(&self, program: &Path) -> Option<PathBuf> {
        let mut command = Command::new("dwp");
        command.arg("-e").arg(program).args(["-o", "program.dwp"]);
        self.run(command)?;
        Some(self.0.join("program.dwp"))
    }

    /// Renames all `.dwo` files until the result is told to show them.
    pub(crate) fn hide_split_files(&self) -> Hidden {
        let mut paths = Vec::new();
        for folder in [self.0.clone(), self.0.join("sub")] {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().is_some_and(|extension| extension == "dwo") {
                    fs::rename(&path, hidden(&path)).unwrap();
                    paths.push(path);
                }
            }
        }
        assert!(!paths.is_empty(), "no .dwo files");
        Hidden(paths)
    }

    fn run(&self, mut command: Command) -> Option<()> {
        command.current_dir(&self.0);
        let output = match command.output() {
            Ok(output) => output,
            Err(error) => {
                eprintln!("left out: {command:?}: {error}");
                return None;
            }
        };
        if !output.status.success() {
            let message = String::from_utf8_lossy(&output.stderr);
            eprintln!("left out: {command:?}: {}", message.lines().next().unwrap_or_default());
            return None;
        }
        Some(())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Files that were renamed.
pub(crate) struct Hidden(Vec<PathBuf>);

impl Hidden {
    /// Gives the files their names again.
    pub(crate) fn show(self) {
        for path in self.0 {
            fs::rename(hidden(&path), path).unwrap();
        }
    }
}

fn hidden(path: &Path) -> OsString {
    let mut name = path.to_owned().into_os_string();
    name.push(".hidden");
    name
}
