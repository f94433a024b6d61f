//! Checks ARCHITECTURE.md: imports go only down, and the files and functions that the page names
//! exist.
//!
//! The page lists the floors of the crates `trefoil` and `trefoil-base` from top to bottom, in its
//! block `text floors`. Modules on one line share a floor. The test reads every path `crate::…` in the sources and fails if one
//! leads to a higher floor, to another module of the same floor, or through the crate's root
//! (`crate::go` instead of `crate::goroutine::go`).
//!
//! The walks name functions as `file.rs::function`, relative to the sources of either crate.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The line with which the block in ARCHITECTURE.md begins.
const BLOCK: &str = "```text floors";

/// The number of each module's floor, counted from the top. A room inside a folder that has a
/// floor of its own is listed by its path: `sync/errgroup`.
struct Floors(HashMap<String, usize>);

impl Floors {
    fn parse(architecture: &str) -> Floors {
        let (_, after) = architecture.split_once(BLOCK).expect("ARCHITECTURE.md has no floors");
        let (block, _) = after.split_once("```").expect("the block of floors has no end");
        let mut floors = HashMap::new();
        for (number, line) in block.lines().filter(|line| !line.trim().is_empty()).enumerate() {
            // Two spaces or more separate the modules from the description.
            let modules = line.trim().split("  ").next().unwrap_or_default();
            for module in modules.split(' ') {
                let old = floors.insert(module.to_owned(), number);
                assert!(old.is_none(), "{module} stands on two floors");
            }
        }
        Floors(floors)
    }

    /// Returns the module that owns `path`, a path below `src/` without the file's extension.
    fn module_of<'a>(&self, path: &'a str) -> &'a str {
        let two = path.match_indices('/').nth(1).map_or(path, |(at, _)| &path[..at]);
        if self.0.contains_key(two) {
            return two;
        }
        path.split('/').next().unwrap_or(path)
    }
}

/// Adds all Rust sources below `folder` to `found`, except unit tests in files of their own.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests.rs") {
            found.push(path);
        }
    }
}

/// Returns the code of a file: without comments, and without the unit tests at its end.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let without_comment = |line: &str| match line.find("//") {
        Some(at) => line[..at].to_owned(),
        None => line.to_owned(),
    };
    text.lines().map(without_comment).collect::<Vec<_>>().join("\n")
}

/// Returns the first two segments of every path that begins with `crate::`, also of those in
/// braces.
fn imports(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        // `$crate::` in a macro names what the user's crate sees.
        if code[..at].ends_with('$') || code[..at].ends_with(|c: char| c.is_alphanumeric()) {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        if let Some(group) = rest.strip_prefix('{') {
            found.extend(members(group).into_iter().map(first_two));
        } else {
            found.push(first_two(rest));
        }
    }
    // `crate::name!` is a macro, which has no floor.
    found.retain(|path| !path.ends_with('!'));
    found
}

/// Returns the members of a group `a, b::{c, d}, e}` up to its closing brace.
fn members(group: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                found.push(group[start..at].trim());
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(group[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    found.retain(|member| !member.is_empty());
    found
}

/// Returns the first two segments of a path `a::b::c`, as `a/b`. Keeps the `!` of a macro.
fn first_two(path: &str) -> String {
    let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == ':' || c == '!';
    let path = path.split(|c| !is_part(c)).next().unwrap_or_default();
    let mut segments = path.split("::");
    let first = segments.next().unwrap_or_default();
    match segments.next() {
        Some(second) if !second.is_empty() => format!("{first}/{second}"),
        _ => first.to_owned(),
    }
}

/// Returns the names of the macros that a file defines.
fn macros(text: &str) -> impl Iterator<Item = &str> {
    text.split("macro_rules! ")
        .skip(1)
        .filter_map(|rest| rest.split_once(" {").map(|(name, _)| name))
}

/// Returns the text of ARCHITECTURE.md. In the published crate, prints that it is missing and
/// returns None.
fn architecture() -> Option<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ARCHITECTURE.md");
    let text = std::fs::read_to_string(page).ok();
    if text.is_none() {
        println!("skipped: ARCHITECTURE.md is not part of the published crate");
    }
    text
}

/// Returns the folders of the sources of both crates.
fn sources_of_both() -> [PathBuf; 2] {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    [own.join("src"), own.join("../trefoil-base/src")]
}

#[test]
fn every_import_leads_to_a_lower_floor() {
    let Some(architecture) = architecture() else { return };
    let floors = Floors::parse(&architecture);
    // Each file as its path without extension, and its text.
    let mut texts = Vec::new();
    for folder in sources_of_both() {
        let mut files = Vec::new();
        sources(&folder, &mut files);
        assert!(files.len() > 50, "only {} files below {}", files.len(), folder.display());
        texts.extend(files.iter().map(|file| {
            let name = file.strip_prefix(&folder).unwrap().with_extension("");
            (name, std::fs::read_to_string(file).unwrap())
        }));
    }
    // A macro has no floor.
    let macros: HashSet<&str> = texts.iter().flat_map(|(_, text)| macros(text)).collect();

    let mut breaks = String::new();
    for (name, text) in &texts {
        let name = name.to_str().unwrap().trim_end_matches("/mod");
        let module = floors.module_of(name);
        let Some(from) = floors.0.get(module) else {
            panic!("{name}.rs has no floor in ARCHITECTURE.md");
        };
        for import in imports(&code(text)) {
            let target = floors.module_of(&import);
            if target == module || macros.contains(target) {
                continue;
            }
            match floors.0.get(target) {
                Some(to) if to > from => {}
                Some(_) => {
                    writeln!(breaks, "{name}.rs imports {import}, which is not below").unwrap()
                }
                None => {
                    writeln!(breaks, "{name}.rs imports crate::{import} through the root").unwrap()
                }
            }
        }
    }
    assert!(breaks.is_empty(), "imports go only down:\n{breaks}");
}

#[test]
fn imports_are_found_in_groups_and_macros_are_not() {
    let code = code("use crate::{a, b::{c, d}, e::f::g}; // crate::no\ncrate::m!(); $crate::n::o;");
    assert_eq!(imports(&code), ["a", "b", "e/f"]);
    assert_eq!(imports("crate::sched::wait::block(x)"), ["sched/wait"]);
}

#[test]
fn files_and_functions_named_in_the_architecture_exist() {
    let Some(architecture) = architecture() else { return };
    let [src, base] = sources_of_both();
    let folders = [src.join("sched"), src.join("../../.."), src, base];
    let mut checked = 0;
    // Every second piece between backticks is code.
    for code in architecture.split('`').skip(1).step_by(2) {
        let (path, function) = code.split_once("::").unwrap_or((code, ""));
        let is_path = path.ends_with(".rs") || path.ends_with('/');
        if !is_path || path.contains(['{', ' ', '$']) {
            continue;
        }
        let mut files = folders.iter().map(|folder| folder.join(path));
        let Some(file) = files.find(|file| file.exists()) else {
            panic!("ARCHITECTURE.md names {path}, which does not exist");
        };
        if !function.is_empty() {
            let text = std::fs::read_to_string(file).unwrap();
            let defines = ["(", "<"].iter().any(|c| text.contains(&format!("fn {function}{c}")));
            assert!(defines, "ARCHITECTURE.md names {path}::{function}, which does not exist");
        }
        checked += 1;
    }
    assert!(checked > 40, "only {checked} paths were found");
}
