//! The documentation of every public type, trait, macro and free function has an example.
//!
//! The test reads the sources as text, line by line. It starts at `lib.rs` and follows `pub mod`
//! and `pub use`, so it finds what a reader of the documentation finds. It relies on the form that
//! rustfmt gives to items: an item of a module begins in the first column, and its documentation
//! stands directly above it. What the scan cannot follow (a glob, an inline module with contents, a
//! name without an item) makes the test fail with a message, so no item is left out silently.
//!
//! Not required: examples of methods, constants and modules; anything under `#[doc(hidden)]`; items
//! of other crates, except `trefoil_macros`.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// The words that begin an item which needs an example.
const KINDS: [&str; 6] = ["struct", "enum", "trait", "union", "fn", "type"];

/// The tags of code blocks that rustdoc compiles as examples. A block with any other tag (`text`,
/// `toml`, `compile_fail`, `ignore`) does not show how to use an item.
const EXAMPLE_TAGS: [&str; 4] = ["rust", "no_run", "should_panic", "standalone_crate"];

/// A public item, as a reader of the documentation finds it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Item {
    file: String,
    /// Counted from 1.
    line: usize,
    kind: String,
    /// With the public path: `chan::Sender`.
    name: String,
    has_example: bool,
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {} {}", self.file, self.line, self.kind, self.name)
    }
}

/// A source file.
struct Source {
    path: PathBuf,
    lines: Vec<String>,
}

impl Source {
    fn read(path: PathBuf) -> Source {
        let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Source { path, lines: text.lines().map(str::to_owned).collect() }
    }

    /// Reads the file of a module: `[]` is `lib.rs`, `["chan", "select"]` is `chan/select/mod.rs`.
    fn of_module(module: &[String]) -> Source {
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let Some((last, parents)) = module.split_last() else {
            return Source::read(src.join("lib.rs"));
        };
        let folder = parents.iter().fold(src, |path, name| path.join(name));
        let file = folder.join(format!("{last}.rs"));
        Source::read(if file.exists() { file } else { folder.join(last).join("mod.rs") })
    }

    /// Returns the path from the folder of all crates.
    fn short_path(&self) -> String {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace");
        self.path.strip_prefix(crates).unwrap_or(&self.path).display().to_string()
    }

    fn item(&self, line: usize, kind: &str, name: String, has_example: bool) -> Item {
        Item { file: self.short_path(), line: line + 1, kind: kind.to_owned(), name, has_example }
    }

    /// Returns the attributes and doc comments directly above a line, from top to bottom.
    fn attributes(&self, line: usize) -> &[String] {
        let mut first = line;
        while first > 0 {
            let above = self.lines[first - 1].trim();
            if above.starts_with("///") || above.starts_with("#[") {
                first -= 1;
            } else if above.ends_with(']') && !above.starts_with("//") {
                // The last line of an attribute of several lines.
                let is_head = |l: &String| l.trim().starts_with("#[");
                match self.lines[..first].iter().rposition(is_head) {
                    Some(head) => first = head,
                    None => break,
                }
            } else {
                break;
            }
        }
        &self.lines[first..line]
    }

    fn is_hidden(&self, line: usize) -> bool {
        self.attributes(line).iter().any(|l| l.contains("doc(hidden)"))
    }

    fn has_example(&self, line: usize) -> bool {
        has_example(&documentation(self.attributes(line)))
    }

    /// Returns whether the file declares this module, public or not.
    fn declares_module(&self, name: &str) -> bool {
        let end = format!("mod {name};");
        self.lines.iter().any(|l| !l.starts_with("//") && l.ends_with(&end))
    }

    /// Returns the `use` declarations that begin with one of these words: line and text.
    fn uses(&self, starts: &[&str]) -> Vec<(usize, String)> {
        let is_use = |l: &str| starts.iter().any(|start| l.starts_with(start));
        let all = self.lines.iter().enumerate().filter(|(_, l)| is_use(l));
        all.map(|(at, _)| {
            let mut text = String::new();
            for line in &self.lines[at..] {
                text.push_str(line.trim());
                if line.ends_with(';') {
                    break;
                }
            }
            (at, text)
        })
        .collect()
    }
}

/// Returns the text of doc comments and `#[doc = …]` attributes.
fn documentation(attributes: &[String]) -> String {
    let mut text = String::new();
    let mut in_doc_attribute = false;
    for line in attributes.iter().map(|l| l.trim()) {
        if let Some(comment) = line.strip_prefix("///") {
            text.push_str(comment.strip_prefix(' ').unwrap_or(comment));
            text.push('\n');
            continue;
        }
        in_doc_attribute |= line.starts_with("#[doc =");
        if in_doc_attribute {
            // The contents of the string literals: every second piece between quotes.
            let literals: String = line.split('"').skip(1).step_by(2).collect();
            text.push_str(&literals.replace("\\n", "\n"));
        }
        if line.ends_with(']') {
            if in_doc_attribute {
                text.push('\n');
            }
            in_doc_attribute = false;
        }
    }
    text
}

/// Returns whether the text has a code block that rustdoc compiles as an example.
fn has_example(text: &str) -> bool {
    let mut in_block = false;
    for line in text.lines() {
        let Some(tags) = line.trim().strip_prefix("```") else { continue };
        in_block = !in_block;
        let is_example = |tag: &str| EXAMPLE_TAGS.contains(&tag) || tag.starts_with("edition");
        if in_block && tags.split([',', ' ']).filter(|tag| !tag.is_empty()).all(is_example) {
            return true;
        }
    }
    false
}

/// Returns the kind and the name in the head of an item: `pub unsafe fn name<T>(…)`.
fn kind_and_name(line: &str) -> Option<(&str, &str)> {
    let mut words = line.strip_prefix("pub ")?.split(' ');
    let kind = words.find(|word| !matches!(*word, "unsafe" | "const" | "async"))?;
    let name = words.next()?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
    KINDS.contains(&kind).then_some((kind, &name[..end]))
}

/// Splits `pub use a::b::{C, D};` into the path `["a", "b"]` and the names `["C", "D"]`. A renamed
/// item (`C as E`) counts with the name that it has in its own module.
fn path_and_names(text: &str) -> (Vec<String>, Vec<String>) {
    let tree = text.split_once("use ").expect("a use").1.trim_end_matches(';');
    assert!(!tree.contains('*'), "this test does not follow a glob: {text}");
    let (path, names) = match tree.split_once('{') {
        Some((path, names)) => (path.trim_end_matches("::"), names.trim_end_matches('}')),
        None => tree.rsplit_once("::").unwrap_or(("self", tree)),
    };
    assert!(!names.contains(['{', ':']), "this test does not follow nested braces: {text}");
    let name = |name: &str| name.split(" as ").next().unwrap_or(name).trim().to_owned();
    let names = names.split(',').map(name).filter(|name| !name.is_empty()).collect();
    (path.split("::").map(str::to_owned).collect(), names)
}

/// Returns the module of this crate that a path in a `use` of `module` names, or `None` for another
/// crate.
fn resolve(module: &[String], source: &Source, path: &[String]) -> Option<Vec<String>> {
    let (base, rest) = match path[0].as_str() {
        "crate" => (&[][..], &path[1..]),
        "self" => (module, &path[1..]),
        "super" => (&module[..module.len() - 1], &path[1..]),
        name if source.declares_module(name) => (module, path),
        _ => return None,
    };
    Some([base, rest].concat())
}

/// Everything that the test has found.
#[derive(Default)]
struct Scan {
    items: Vec<Item>,
}

impl Scan {
    fn of_the_crate() -> Scan {
        let mut scan = Scan::default();
        scan.module(&[]);
        scan.exported_macros(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
        scan.items.sort();
        scan.items.dedup();
        scan
    }

    /// Adds the public items of a public module, and of the public modules in it.
    fn module(&mut self, module: &[String]) {
        let source = Source::of_module(module);
        for (at, line) in source.lines.iter().enumerate() {
            if source.is_hidden(at) {
                continue;
            }
            if let Some((kind, name)) = kind_and_name(line) {
                let item = source.item(at, kind, public(module, name), source.has_example(at));
                self.items.push(item);
            } else if let Some(child) = line.strip_prefix("pub mod ") {
                match child.strip_suffix(';') {
                    Some(child) => self.module(&[module, &[child.to_owned()]].concat()),
                    None => {
                        assert!(child.ends_with("{}"), "this test does not follow `{line}`");
                    }
                }
            }
        }
        for (at, text) in source.uses(&["pub use "]) {
            if source.is_hidden(at) {
                continue;
            }
            let (path, names) = path_and_names(&text);
            for name in names {
                match resolve(module, &source, &path) {
                    Some(from) => self.named(&from, &name, public(module, &name)),
                    None if path[0] == "trefoil_macros" => self.attribute(&name),
                    None => {}
                }
            }
        }
    }

    /// Adds the item `name` of a module that need not be public.
    fn named(&mut self, module: &[String], name: &str, public: String) {
        let source = Source::of_module(module);
        for (at, line) in source.lines.iter().enumerate() {
            if let Some((kind, found)) = kind_and_name(line)
                && found == name
            {
                self.items.push(source.item(at, kind, public, source.has_example(at)));
                return;
            }
        }
        for (_, text) in source.uses(&["pub use ", "pub(crate) use ", "pub(super) use "]) {
            let (path, names) = path_and_names(&text);
            if names.iter().any(|n| n == name) {
                // An item of another crate is documented there.
                if let Some(from) = resolve(module, &source, &path) {
                    self.named(&from, name, public);
                }
                return;
            }
        }
        match made_by_macro(module, &source, name) {
            Some((at, has_example)) => {
                self.items.push(source.item(at, "item of a macro", public, has_example));
            }
            None => panic!("{} has no item `{name}`, but it is exported", source.short_path()),
        }
    }

    /// Adds an attribute macro of the crate `trefoil_macros`.
    fn attribute(&mut self, name: &str) {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace");
        let source = Source::read(crates.join("trefoil-macros/src/lib.rs"));
        let is_it = |l: &String| kind_and_name(l) == Some(("fn", name));
        let at = source.lines.iter().position(is_it).expect("the attribute is defined");
        self.items.push(source.item(at, "attribute", name.to_owned(), source.has_example(at)));
    }

    /// Adds the macros with `#[macro_export]`, which are public in whichever file they are.
    fn exported_macros(&mut self, folder: &Path) {
        for entry in fs::read_dir(folder).expect("the sources") {
            let path = entry.expect("the sources").path();
            if path.is_dir() {
                self.exported_macros(&path);
                continue;
            }
            let source = Source::read(path);
            for (at, line) in source.lines.iter().enumerate() {
                let Some(name) = line.strip_prefix("macro_rules! ") else { continue };
                let exported = source.attributes(at).iter().any(|l| l == "#[macro_export]");
                if exported && !source.is_hidden(at) {
                    let name = name.trim_end_matches(" {").to_owned();
                    self.items.push(source.item(at, "macro", name, source.has_example(at)));
                }
            }
        }
    }
}

/// Returns the path of an item as the documentation shows it.
fn public(module: &[String], name: &str) -> String {
    [module, &[name.to_owned()]].concat().join("::")
}

/// Finds an item that a macro of this crate makes: `halves!(TcpStream, ReadHalf, WriteHalf);` in
/// the source, `pub struct $read` in the macro. Its documentation is in the macro's body, or above
/// its name in the call. Returns the line of the call and whether there is an example.
fn made_by_macro(module: &[String], source: &Source, name: &str) -> Option<(usize, bool)> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut at = 0;
    while at < source.lines.len() {
        let head = &source.lines[at];
        let call = head.split_once('!').filter(|(m, rest)| {
            !m.is_empty() && m.chars().all(is_word) && rest.trim_start().starts_with(['(', '{'])
        });
        let Some((macro_name, _)) = call else {
            at += 1;
            continue;
        };
        // A call of one line ends with `;` or `}`; a longer one with such a line in the first
        // column.
        let ends = |l: &String| l.starts_with([')', '}']);
        let length = match head.ends_with([';', '}']) {
            true => 1,
            false => source.lines[at..].iter().position(ends)? + 1,
        };
        let lines = at..at + length;
        let code = |l: &String| l.split("//").next().unwrap_or("").to_owned();
        let text: String = source.lines[lines.clone()].iter().map(code).collect();
        let arguments: Vec<&str> = text.split(|c| !is_word(c)).filter(|w| !w.is_empty()).collect();
        if let Some(position) = arguments[1..].iter().position(|&word| word == name) {
            let names_it =
                |&l: &usize| code(&source.lines[l]).split(|c| !is_word(c)).any(|w| w == name);
            let line = lines.clone().find(names_it)?;
            let in_call = line > at && source.has_example(line);
            return Some((line, in_call || macro_has_example(module, macro_name, position)));
        }
        at += length;
    }
    None
}

/// Returns whether the macro documents, with an example, the item that it names by its argument at
/// `position`. The macro is in the module of the call or in one above it, or in a module `macros`
/// of these.
fn macro_has_example(module: &[String], macro_name: &str, position: usize) -> bool {
    let definition = format!("macro_rules! {macro_name} {{");
    let modules = (0..=module.len()).rev().flat_map(|depth| {
        let above = &module[..depth];
        let macros = [above, &["macros".to_owned()]].concat();
        let has_macros = Source::of_module(above).declares_module("macros");
        std::iter::once(above.to_vec()).chain(has_macros.then_some(macros))
    });
    for module in modules {
        let source = Source::of_module(&module);
        let Some(start) = source.lines.iter().position(|l| *l == definition) else { continue };
        // `$stream:ident, $read:ident`: the names in front of the colons, in order.
        let mut parameters = source.lines[start + 1].split('$').skip(1);
        let Some(parameter) = parameters.nth(position).and_then(|p| p.split(':').next()) else {
            return false;
        };
        let made = format!("${parameter}");
        let body = &source.lines[start..];
        let end = body.iter().position(|l| l == "}").unwrap_or(body.len());
        return body[..end].iter().enumerate().any(|(at, line)| {
            let words: Vec<&str> = line.trim().split([' ', '<', '(', ';']).collect();
            let is_item = words.len() > 2 && words[0] == "pub" && KINDS.contains(&words[1]);
            is_item && words[2] == made && source.has_example(start + at)
        });
    }
    false
}

#[test]
fn every_public_type_trait_macro_and_function_has_an_example() {
    let scan = Scan::of_the_crate();
    let all = scan.items.len();
    let missing: Vec<String> =
        scan.items.iter().filter(|item| !item.has_example).map(Item::to_string).collect();
    assert!(
        missing.is_empty(),
        "{} of {all} public items have no example in their documentation:\n{}",
        missing.len(),
        missing.join("\n")
    );
}

#[test]
fn the_scan_follows_modules_re_exports_aliases_and_macros() {
    let scan = Scan::of_the_crate();
    for name in [
        "go",                // a function of a private module
        "Runtime",           // a struct
        "main",              // an attribute of another crate
        "select",            // an exported macro
        "debug::Profile",    // `pub use crate::…` of a public module
        "chan::Select",      // through two re-exports
        "net::UnixReadHalf", // made by a macro
        "net::Transfer",     // a trait
        "sync::Mutex",       // a type alias
    ] {
        let found = scan.items.iter().filter(|item| item.name == name).count();
        assert_eq!(found, 1, "{name}");
    }
    for hidden in ["__select", "chan::select::Arm", "MustNotCompile"] {
        assert!(scan.items.iter().all(|item| item.name != hidden), "{hidden}");
    }
}

#[test]
fn only_code_that_compiles_counts_as_an_example() {
    for example in ["```\nf();\n```", "```rust\nf();\n```", "A list:\n\n```no_run\nf();\n```"] {
        assert!(has_example(example), "{example}");
    }
    for other in [
        "`f()`",
        "```text\nf()\n```",
        "```compile_fail,E0277\nf();\n```",
        "```ignore\nf();\n```",
        // The end of a block does not begin another one.
        "```toml\na = 1\n```\n",
    ] {
        assert!(!has_example(other), "{other}");
    }
}

#[test]
fn documentation_has_doc_comments_and_doc_attributes() {
    let lines = ["/// One.", "#[derive(Debug)]", "#[doc = concat!(", "\"``\", \"`\\n\"", ")]"];
    let lines = lines.map(str::to_owned);
    assert_eq!(documentation(&lines), "One.\n```\n\n");
}
