//! Debug information that is made by hand: rare, damaged, or made to confuse.

use super::constants::*;
use super::*;
use crate::symbols::testing::random_below;
use std::time::{Duration, Instant};

const DW_TAG_COMPILE_UNIT: u8 = 0x11;

/// What the numbers of abbreviations mean here.
const UNIT: u8 = 1;
const UNIT_WITH_RANGES: u8 = 2;
const FUNCTION: u8 = 3;
const DECLARATION: u8 = 4;
const ALIAS: u8 = 5;
const INLINED: u8 = 6;
const PARTIAL: u8 = 7;
const TYPES: u8 = 8;

/// Where the code of tests is.
pub(crate) const CODE: u64 = 0x1000;

fn abbrev() -> Vec<u8> {
    let mut section = Vec::new();
    let function = DW_TAG_SUBPROGRAM as u8;
    let inlined = DW_TAG_INLINED_SUBROUTINE as u8;
    let (low, high) = ((DW_AT_LOW_PC, DW_FORM_ADDR), (DW_AT_HIGH_PC, DW_FORM_DATA8));
    let origin = (DW_AT_ABSTRACT_ORIGIN, DW_FORM_REF_ADDR);
    let name = (DW_AT_NAME, DW_FORM_STRING);
    let lines = (DW_AT_STMT_LIST, DW_FORM_SEC_OFFSET);
    let call = [(DW_AT_CALL_FILE, DW_FORM_DATA1), (DW_AT_CALL_LINE, DW_FORM_DATA2)];
    let folder = (DW_AT_COMP_DIR, DW_FORM_STRING);
    for (code, tag, has_children, attributes) in [
        (UNIT, DW_TAG_COMPILE_UNIT, 1, &[folder, lines][..]),
        (UNIT_WITH_RANGES, DW_TAG_COMPILE_UNIT, 0, &[(DW_AT_RANGES, DW_FORM_SEC_OFFSET)]),
        (FUNCTION, function, 1, &[name, low, high]),
        (DECLARATION, function, 0, &[name]),
        (ALIAS, function, 0, &[origin, low, high]),
        (INLINED, inlined, 1, &[origin, low, high, call[0], call[1]]),
        (PARTIAL, DW_TAG_PARTIAL_UNIT as u8, 1, &[folder, lines]),
        (TYPES, DW_TAG_TYPE_UNIT as u8, 1, &[lines]),
    ] {
        section.extend([code, tag, has_children]);
        for &(name, form) in attributes {
            section.extend([name as u8, form as u8]);
        }
        section.extend([0, 0]);
    }
    section.push(0);
    section
}

/// Makes a unit, version 4, of these entries.
fn unit(entries: &[u8]) -> Vec<u8> {
    let mut unit = (7 + entries.len() as u32).to_le_bytes().to_vec();
    unit.extend([4, 0, 0, 0, 0, 0, 8]);
    unit.extend(entries);
    unit
}

/// Makes a unit, version 5, of this type and these entries. `more` is the rest of its header.
fn new_unit(unit_type: u8, more: &[u8], entries: &[u8]) -> Vec<u8> {
    let rest = [&[5, 0, unit_type, 8, 0, 0, 0, 0], more, entries].concat();
    [&(rest.len() as u32).to_le_bytes()[..], &rest].concat()
}

fn root() -> Vec<u8> {
    root_of(UNIT)
}

/// Makes the first entry of a unit, or of a part that several units share.
fn root_of(code: u8) -> Vec<u8> {
    let mut entry = vec![code];
    entry.extend(b"/folder\0");
    entry.extend([0; 4]);
    entry
}

fn function(name: &str, start: u64, size: u64) -> Vec<u8> {
    let mut entry = vec![FUNCTION];
    entry.extend(name.as_bytes());
    entry.push(0);
    entry.extend(start.to_le_bytes());
    entry.extend(size.to_le_bytes());
    entry
}

fn referring(code: u8, to: u32, start: u64, size: u64) -> Vec<u8> {
    let mut entry = vec![code];
    entry.extend(to.to_le_bytes());
    entry.extend(start.to_le_bytes());
    entry.extend(size.to_le_bytes());
    entry
}

fn inlined(of: u32, start: u64, size: u64, line: u16) -> Vec<u8> {
    let mut entry = referring(INLINED, of, start, size);
    entry.push(1);
    entry.extend(line.to_le_bytes());
    entry
}

/// Makes a line table of one file, for 32 bytes of code: the first 8 are of line 10, the others of
/// line 12.
fn line() -> Vec<u8> {
    let mut head = vec![1, 1, 1, -5i8 as u8, 14, 13];
    head.extend([0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1]);
    head.extend(b"src\0\0a.c\0\x01\0\0\0");
    let mut rest = vec![4, 0];
    rest.extend((head.len() as u32).to_le_bytes());
    rest.extend(head);
    rest.extend([0, 9, DW_LNE_SET_ADDRESS]);
    rest.extend(CODE.to_le_bytes());
    rest.extend([DW_LNS_ADVANCE_LINE, 9, DW_LNS_COPY]);
    // 8 bytes and 2 lines, as one opcode.
    rest.push(13 + (2 + 5) + 14 * 8);
    rest.extend([DW_LNS_ADVANCE_PC, 24, 0, 1, DW_LNE_END_SEQUENCE]);
    let mut section = (rest.len() as u32).to_le_bytes().to_vec();
    section.extend(rest);
    section
}

fn sections(info: Vec<u8>) -> DebugSections {
    let (abbrev, line) = (abbrev().leak(), line().leak());
    DebugSections { info: info.leak(), abbrev, line, ..DebugSections::default() }
}

/// Returns the calls at an address, as text.
fn calls(info: &mut DebugInfo, address: u64) -> Vec<String> {
    let Some(found) = info.find(address, &mut |_, _| {}) else { return Vec::new() };
    let text = |call: &FoundCall| {
        let name = String::from_utf8_lossy(call.name.unwrap_or(b"?"));
        format!("{name} {}:{}", info.path(&found, call), call.line)
    };
    found.calls.iter().map(text).collect()
}

/// A unit with a function and a call that was inlined into it, whose name is in a second unit.
fn two_units() -> Vec<u8> {
    let second = || unit(&[root(), vec![DECLARATION], b"callee\0\0".to_vec()].concat());
    let first = |callee: u32| {
        let call = inlined(callee, CODE + 8, 8, 11);
        unit(&[root(), function("caller", CODE, 32), call, vec![0, 0, 0]].concat())
    };
    let len = first(0).len();
    [first((len + 11 + root().len()) as u32), second()].concat()
}

#[test]
fn the_name_of_an_inlined_call_may_be_in_another_unit() {
    // The units name no addresses, so they are found by their line tables.
    let mut info = DebugInfo::new(sections(two_units()));
    assert_eq!(calls(&mut info, CODE), ["caller /folder/src/a.c:10"]);
    for _ in 0..2 {
        let inner = ["callee /folder/src/a.c:12", "caller /folder/src/a.c:11"];
        assert_eq!(calls(&mut info, CODE + 15), inner);
    }
    assert_eq!(calls(&mut info, CODE + 16), ["caller /folder/src/a.c:12"]);
    for address in [0, CODE - 1, CODE + 32, u64::MAX] {
        assert!(calls(&mut info, address).is_empty(), "{address:#x}");
    }
}

/// What dwz has moved out of units has the line table of one of them. Before version 5 only the
/// first entry says what kind of unit it is.
#[test]
fn units_without_code_hide_no_others_and_have_names_for_them() {
    const NAMED: &[u8] = b"\x04named\0\0";
    let partial = |entries: &[u8]| unit(&[&root_of(PARTIAL), entries].concat());
    let new_partial =
        |entries: &[u8]| new_unit(DW_UT_PARTIAL, &[], &[&root_of(PARTIAL), entries].concat());
    let types = |entries: &[u8]| {
        let root = [TYPES, 0, 0, 0, 0];
        new_unit(DW_UT_TYPE, &[7; 12], &[&root, entries].concat())
    };
    for first in [partial(NAMED), new_partial(NAMED), types(NAMED)] {
        let name = (first.len() - NAMED.len()) as u32;
        let second = unit(&[root(), referring(ALIAS, name, CODE, 32)].concat());
        let info = [first, second, types(&[0]), partial(&[0]), new_partial(&[0])].concat();
        assert_eq!(calls(&mut DebugInfo::new(sections(info)), CODE), ["named /folder/src/a.c:10"]);
    }
}

#[test]
fn a_unit_may_be_found_by_its_set_of_addresses() {
    let mut set = vec![2, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0];
    set.extend([CODE, 16, CODE + 100, 4, 0, 0].map(u64::to_le_bytes).as_flattened());
    let aranges = [(set.len() as u32).to_le_bytes().to_vec(), set].concat().leak();
    let entries = [root(), function("here", CODE, 32), vec![0], function("there", CODE + 100, 4)];
    let mut info = DebugInfo::new(DebugSections { aranges, ..sections(unit(&entries.concat())) });
    assert_eq!(calls(&mut info, CODE), ["here /folder/src/a.c:10"]);
    assert_eq!(calls(&mut info, CODE + 100), ["there :0"]);
    assert!(calls(&mut info, CODE + 16).is_empty(), "not in the set");
}

/// GNU ld writes 0 or 1 as the address of a function that it has left out. Of two ranges the one with
/// the lower end is tried first.
#[test]
fn code_that_was_left_out_hides_no_other() {
    let of_unit = |at: u32, start: u64, size: u64| {
        let mut set = vec![2, 0];
        set.extend(at.to_le_bytes());
        set.extend([8, 0, 0, 0, 0, 0]);
        set.extend([start, size, 0, 0].map(u64::to_le_bytes).as_flattened());
        [(set.len() as u32).to_le_bytes().to_vec(), set].concat()
    };
    for tombstone in [0, 1] {
        let left_out = unit(&[root(), function("left out", tombstone, CODE + 8)].concat());
        let present = unit(&[root(), function("present", CODE, 32)].concat());
        let set_of_left_out = of_unit(present.len() as u32, tombstone, CODE + 8);
        let sets = [of_unit(0, CODE, 32), set_of_left_out].concat();
        let sections = sections([present, left_out].concat());
        let mut info = DebugInfo::new(DebugSections { aranges: sets.leak(), ..sections });
        assert_eq!(calls(&mut info, CODE), ["present /folder/src/a.c:10"]);
    }
}

#[test]
fn lists_leave_out_what_the_linker_has_left_out() {
    let list = |numbers: &[u64]| {
        let numbers: Vec<_> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let info = unit(&[UNIT_WITH_RANGES, 0, 0, 0, 0]);
        DebugSections { ranges: numbers.leak(), ..sections(info) }
    };
    let new_list = |parts: &[&[u8]]| {
        let info = new_unit(DW_UT_COMPILE, &[], &[UNIT_WITH_RANGES, 0, 0, 0, 0]);
        DebugSections { rnglists: parts.concat().leak(), ..sections(info) }
    };
    let based = |base: u64| [&[DW_RLE_BASE_ADDRESS][..], &base.to_le_bytes()].concat();
    let from = |start: u64| [&[DW_RLE_START_LENGTH][..], &start.to_le_bytes(), &[9]].concat();
    let (pair, end) = ([DW_RLE_OFFSET_PAIR, 8, 24], [DW_RLE_END_OF_LIST]);
    let present = vec![(CODE + 8, CODE + 24)];
    let mut cases = vec![
        (list(&[1, 2 * CODE, CODE + 8, CODE + 24, 0, 0]), present.clone()),
        // Absolute addresses, after a base and a return to 0.
        (
            list(&[u64::MAX, CODE, 8, 24, u64::MAX, 0, 3, 4, 0, 0]),
            vec![(CODE + 8, CODE + 24), (3, 4)],
        ),
        (new_list(&[&based(CODE), &pair, &end]), present.clone()),
        (new_list(&[&from(CODE), &end]), vec![(CODE, CODE + 9)]),
    ];
    for tombstone in [0, 1, u64::MAX - 1, u64::MAX] {
        cases.push((new_list(&[&from(tombstone), &end]), Vec::new()));
        let parts = [&based(tombstone)[..], &pair, &based(CODE), &pair, &end];
        cases.push((new_list(&parts), present.clone()));
        if tombstone != 0 {
            let numbers = [u64::MAX, tombstone, 8, 24, u64::MAX, CODE, 8, 24, 0, 0];
            cases.push((list(&numbers), present.clone()));
        }
    }
    for (index, (sections, mut expected)) in cases.into_iter().enumerate() {
        let index_of_units = Index::read(&sections);
        let found: Vec<_> = index_of_units.ranges.iter().map(|it| (it.end, it.key)).collect();
        expected.sort_unstable();
        assert_eq!(found, expected, "case {index}");
    }
}

#[test]
fn lines_leave_out_what_the_linker_has_left_out() {
    for tombstone in [0, 1, u64::MAX - 1, u64::MAX] {
        // Its size must not matter: as large as it can be.
        let mut program = vec![0, 9, DW_LNE_SET_ADDRESS];
        program.extend(tombstone.to_le_bytes());
        program.extend([DW_LNS_COPY, DW_LNS_ADVANCE_PC, 0xff, 0xff, 0x7f, DW_LNS_COPY]);
        program.extend([0, 1, DW_LNE_END_SEQUENCE]);
        let mut line = line();
        line.extend(program);
        let length = line.len() as u32 - 4;
        line[..4].copy_from_slice(&length.to_le_bytes());
        let info = unit(&[root(), function("here", CODE, 32)].concat());
        let sections = DebugSections { line: line.leak(), ..sections(info) };
        let index = Index::read(&sections);
        let found: Vec<_> = index.ranges.iter().map(|it| (it.end, it.key)).collect();
        assert_eq!(found, [(CODE, CODE + 32)], "{tombstone:#x}");
        assert_eq!(calls(&mut DebugInfo::new(sections), CODE), ["here /folder/src/a.c:10"]);
    }
}

/// Attributes of some forms take no bytes of an entry.
#[test]
fn many_attributes_without_bytes_cost_little_time() {
    const DW_FORM_FLAG_PRESENT: u8 = 0x19;
    let mut abbrev = abbrev();
    abbrev.pop();
    abbrev.extend([99, DW_TAG_SUBPROGRAM as u8, 0]);
    abbrev.extend([0x3f, DW_FORM_FLAG_PRESENT].repeat(100_000));
    abbrev.extend([0, 0, 0]);
    let info = unit(&[root(), function("here", CODE, 32), vec![99; 100_000]].concat());
    let sections = DebugSections { abbrev: abbrev.leak(), ..sections(info) };
    let begin = Instant::now();
    assert_eq!(calls(&mut DebugInfo::new(sections), CODE), ["here /folder/src/a.c:10"]);
    assert!(begin.elapsed() < Duration::from_secs(5), "it took {:?}", begin.elapsed());
}

#[test]
fn references_in_a_circle_are_no_name() {
    let own = 11 + root().len() as u32;
    let entries = [root(), referring(ALIAS, own, CODE, 32)].concat();
    let mut info = DebugInfo::new(sections(unit(&entries)));
    assert_eq!(calls(&mut info, CODE), ["? /folder/src/a.c:10"]);
}

#[test]
fn deep_entries_need_no_stack_and_deep_calls_are_left_out() {
    let mut entries = [root(), function("outermost", CODE, 32)].concat();
    for line in 1..=60_000 {
        entries.extend(inlined(0, CODE, 32, line));
    }
    let mut info = DebugInfo::new(sections(unit(&entries)));
    let calls = calls(&mut info, CODE);
    assert!((100..1000).contains(&calls.len()), "{}", calls.len());
    assert_eq!(calls.last().unwrap(), "outermost /folder/src/a.c:1");
}

#[test]
fn a_list_that_many_units_share_does_not_multiply() {
    const RANGES: usize = 20_000;
    let mut ranges = Vec::new();
    for index in 0..RANGES as u64 {
        ranges.extend([2 * index + 2, 2 * index + 3].map(u64::to_le_bytes).as_flattened());
    }
    ranges.extend([0; 16]);
    let info = unit(&[UNIT_WITH_RANGES, 0, 0, 0, 0]).repeat(RANGES);
    let mut info = DebugInfo::new(DebugSections { ranges: ranges.leak(), ..sections(info) });
    assert!(info.find(2, &mut |_, _| {}).is_none());
    let index = info.index.as_ref().unwrap();
    assert_eq!(index.units.len(), RANGES);
    assert!((RANGES..=16 * (RANGES + 1)).contains(&index.ranges.len()), "{}", index.ranges.len());
}

#[test]
fn an_address_is_looked_up_in_some_of_the_units_that_claim_it() {
    let unit_of = |index: u32| {
        let list = (32 * index).to_le_bytes();
        unit(&[&[UNIT_WITH_RANGES][..], &list].concat())
    };
    let units = (0..10 * UNITS_PER_LOOKUP_MAX as u32).flat_map(unit_of).collect();
    let list = [CODE, CODE + 8, 0, 0].map(u64::to_le_bytes);
    let ranges = list.as_flattened().repeat(10 * UNITS_PER_LOOKUP_MAX).leak();
    let mut info = DebugInfo::new(DebugSections { ranges, ..sections(units) });
    assert!(calls(&mut info, CODE).is_empty());
    let index = info.index.as_ref().unwrap();
    assert_eq!(index.ranges.len(), 10 * UNITS_PER_LOOKUP_MAX);
    let looked_up = index.units.iter().filter(|unit| unit.unit.is_some()).count();
    assert_eq!(looked_up, UNITS_PER_LOOKUP_MAX);
}

#[test]
fn units_that_share_tables_read_them_once() {
    const UNITS: u64 = 500;
    let unit_of = |index: u64| {
        let root = [&[UNIT][..], format!("/{index}\0").as_bytes(), &[0; 4]].concat();
        let function = function(&format!("function {index}"), CODE + 4 * index, 4);
        unit(&[root, function, vec![0, 0]].concat())
    };
    let units: Vec<_> = (0..UNITS).flat_map(unit_of).collect();
    // All of them have the same lines. The sets tell which code is whose.
    let mut aranges = Vec::new();
    let mut unit_start = 0;
    for index in 0..UNITS {
        let mut set = vec![44, 0, 0, 0, 2, 0];
        set.extend((unit_start as u32).to_le_bytes());
        set.extend([8, 0, 0, 0, 0, 0]);
        set.extend([CODE + 4 * index, 4, 0, 0].map(u64::to_le_bytes).as_flattened());
        aranges.extend(set);
        unit_start += unit_of(index).len();
    }
    let whole = DebugSections { aranges: aranges.leak(), ..sections(units) };
    let mut info = DebugInfo::new(whole);
    for index in (0..UNITS).chain([1, 0, 1]) {
        let expected = match index {
            0..2 => format!("function {index} /{index}/src/a.c:10"),
            2..8 => format!("function {index} /{index}/src/a.c:12"),
            _ => format!("function {index} :0"),
        };
        assert_eq!(calls(&mut info, CODE + 4 * index), [expected]);
    }
    let counts = info.index.as_ref().unwrap().tables.counts();
    assert_eq!(counts, (usize::from(TYPES), 1));
}

/// Each unit has the rest of one table: what all of them would keep is the square of its size.
#[test]
fn parts_that_tables_have_in_common_do_not_multiply() {
    const UNITS: usize = 3_000;
    let whole = sections(Vec::new());
    let mut abbrev = Vec::new();
    let mut info = Vec::new();
    for _ in 0..UNITS {
        let mut unit = unit(&[&[UNIT, b'/', 0, 0, 0, 0, 0][..], &[0]].concat());
        unit[6..10].copy_from_slice(&(abbrev.len() as u32).to_le_bytes());
        info.extend(unit);
        abbrev.extend([UNIT, DW_TAG_COMPILE_UNIT, 0, DW_AT_COMP_DIR as u8, DW_FORM_STRING as u8]);
        abbrev.extend([DW_AT_STMT_LIST as u8, DW_FORM_SEC_OFFSET as u8, 0, 0]);
    }
    abbrev.push(0);
    let whole = DebugSections { info: info.leak(), abbrev: abbrev.leak(), ..whole };
    let mut index = Index::read(&whole);
    assert_eq!(index.units.len(), UNITS);
    for unit in 0..UNITS {
        let _ = index.find_in_unit(&whole, unit, CODE, &mut |_, _| {});
    }
    let (abbreviations, lines) = index.tables.counts();
    assert!((UNITS..16 * UNITS).contains(&abbreviations), "{abbreviations}");
    assert_eq!(lines, 1);
}

/// Names and abstract functions that `dwz -m` has moved to a third file, which is not read.
#[test]
fn what_is_in_a_file_of_dwz_is_unknown_and_hides_nothing() {
    let (low, high) = ((DW_AT_LOW_PC, DW_FORM_ADDR), (DW_AT_HIGH_PC, DW_FORM_DATA8));
    let place = |start: u64| [start, 8].map(u64::to_le_bytes).concat();
    for (name_form, other_form) in
        [(DW_FORM_GNU_STRP_ALT, DW_FORM_GNU_REF_ALT), (DW_FORM_STRP_SUP, DW_FORM_REF_SUP4)]
    {
        let (name, folder) = ((DW_AT_NAME, name_form), (DW_AT_COMP_DIR, name_form));
        let lines = (DW_AT_STMT_LIST, DW_FORM_SEC_OFFSET);
        let linkage_name = (DW_AT_LINKAGE_NAME, name_form);
        let abbrev = abbreviations(&[
            (1, DW_TAG_COMPILE_UNIT, 1, &[name, folder, lines]),
            // DW_TAG_imported_unit.
            (2, 0x3d, 0, &[(0x18, other_form)]),
            (3, 0x2e, 0, &[(DW_AT_ABSTRACT_ORIGIN, other_form), low, high]),
            (4, 0x2e, 0, &[name, low, high]),
            (5, 0x2e, 0, &[(DW_AT_NAME, DW_FORM_STRING), linkage_name, low, high]),
        ]);
        let alt = [0xaa; 4];
        let entries = [
            &[&[1][..], &alt, &alt, &[0; 4]].concat()[..],
            &[&[2][..], &alt].concat(),
            &[&[3][..], &alt, &place(CODE)].concat(),
            &[&[4][..], &alt, &place(CODE + 8)].concat(),
            &[&b"\x05here\0"[..], &alt, &place(CODE + 16)].concat(),
            &[0],
        ];
        let mut info =
            DebugInfo::new(DebugSections { abbrev, ..sections(unit(&entries.concat())) });
        assert_eq!(calls(&mut info, CODE), ["? src/a.c:10"]);
        assert_eq!(calls(&mut info, CODE + 8), ["? src/a.c:12"]);
        assert_eq!(calls(&mut info, CODE + 16), ["here src/a.c:12"]);
    }
}

#[test]
fn long_texts_are_no_names_and_no_paths() {
    for (len, is_found) in [(1 << 18, true), ((1 << 18) + 1, false)] {
        let name = "n".repeat(len);
        let mut info = DebugInfo::new(sections(unit(&[root(), function(&name, CODE, 8)].concat())));
        let expected = if is_found { &name } else { "?" };
        assert_eq!(calls(&mut info, CODE), [format!("{expected} /folder/src/a.c:10")]);
    }
    for (len, is_found) in [(4096 - "//src/a.c".len(), true), (4096, false)] {
        let folder = "f".repeat(len);
        let root = [&[UNIT, b'/'][..], folder.as_bytes(), &[0; 5]].concat();
        let mut info = DebugInfo::new(sections(unit(&[root, function("here", CODE, 8)].concat())));
        let path = if is_found { format!("/{folder}/src/a.c") } else { String::new() };
        assert_eq!(calls(&mut info, CODE), [format!("here {path}:10")]);
    }
}

/// The sections of a file, by their names.
pub(crate) type NamedSections = Vec<(&'static str, &'static [u8])>;

fn by_name(sections: &NamedSections) -> impl FnMut(&str) -> &'static [u8] {
    |name| sections.iter().find(|section| section.0 == name).map_or(&[], |section| section.1)
}

/// How the other half of a unit differs from what is wanted.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Wrong {
    Nothing,
    Id,
    NoId,
    Tag,
    /// Only version 5 has types of units.
    UnitType,
}

/// An abbreviation: its code and tag, whether it has children (1), and names and forms of attributes.
type Abbreviation<'a> = (u8, u8, u8, &'a [(u16, u16)]);

fn abbreviations(all: &[Abbreviation<'_>]) -> &'static [u8] {
    let mut section = Vec::new();
    for &(code, tag, has_children, attributes) in all {
        section.extend([code, tag, has_children]);
        for number in attributes.iter().flat_map(|&(name, form)| [name, form]) {
            match number {
                0..0x80 => section.push(number as u8),
                _ => section.extend([
                    number as u8 | 0x80,
                    (number >> 7) as u8 & 0x7f | 0x80,
                    (number >> 14) as u8,
                ]),
            }
        }
        section.extend([0, 0]);
    }
    section.push(0);
    section.leak()
}

/// Makes a program whose unit is in `file`, and that file: a function `right` from [`CODE`] on, if
/// each table is that of the right file, and is read from where it starts.
pub(crate) fn split_program(version: u8, file: &str, wrong: Wrong) -> [NamedSections; 2] {
    const ID: u64 = 0x0123_4567_89ab_cdef;
    let own_id = if wrong == Wrong::Id { ID ^ 1 << 63 } else { ID };
    let tag = if wrong == Wrong::Tag { DW_TAG_PARTIAL_UNIT as u8 } else { DW_TAG_COMPILE_UNIT };
    let (string, data8) = (DW_FORM_STRING, DW_FORM_DATA8);
    let place = [(DW_AT_LOW_PC, DW_FORM_ADDR), (DW_AT_HIGH_PC, data8)];
    let ids: &[_] = if wrong == Wrong::NoId { &[] } else { &[(DW_AT_GNU_DWO_ID, data8)] };
    let (skeleton, abbrev, own_abbrev);
    if version == 5 {
        let base = (DW_AT_ADDR_BASE, DW_FORM_SEC_OFFSET);
        skeleton = [&[base, (DW_AT_DWO_NAME, string)], &place[..]].concat();
        let function = [(DW_AT_NAME, DW_FORM_STRX1), (DW_AT_RANGES, DW_FORM_RNGLISTX)];
        own_abbrev = abbreviations(&[(1, tag, 1, &[]), (2, 0x2e, 0, &function)]);
    } else {
        let offset = DW_FORM_SEC_OFFSET;
        let bases = [(DW_AT_GNU_ADDR_BASE, offset), (DW_AT_GNU_RANGES_BASE, offset)];
        let other = [(DW_AT_GNU_DWO_NAME, string), (DW_AT_GNU_DWO_ID, data8)];
        skeleton = [&bases[..1], &other[..1], &place, &other[1..], &bases[1..]].concat();
        let function = [(DW_AT_NAME, DW_FORM_GNU_STR_INDEX), (DW_AT_RANGES, offset)];
        own_abbrev = abbreviations(&[(1, tag, 1, ids), (2, 0x2e, 0, &function)]);
    }
    abbrev = abbreviations(&[(1, DW_TAG_COMPILE_UNIT, 0, &skeleton)]);
    let place = [CODE, 32].map(u64::to_le_bytes);
    let entry = [&[1, 8, 0, 0, 0], file.as_bytes(), &[0], place.as_flattened()].concat();
    let numbers = |numbers: &[u64]| -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    };
    let function = [2, 0, 0, 0, 0, 0, 0];
    let (mut info, mut own_info, own_strings, own_lists);
    // What comes first is the header of the table, or of other units.
    let lists = [&[9; 12][..], &[4, 0, 0, 0, DW_RLE_END_OF_LIST]].concat();
    if version == 5 {
        info = new_unit(DW_UT_SKELETON, &ID.to_le_bytes(), &entry);
        let unit_type = if wrong == Wrong::UnitType { DW_UT_SKELETON } else { DW_UT_SPLIT_COMPILE };
        own_info =
            new_unit(unit_type, &own_id.to_le_bytes(), &[&[1], &function[..3], &[0]].concat());
        own_strings = vec![8, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0, 0];
        own_lists =
            [&[9; 12][..], &[4, 0, 0, 0, DW_RLE_STARTX_LENGTH, 0, 32, DW_RLE_END_OF_LIST]].concat();
    } else {
        info = unit(&[&entry[..], &ID.to_le_bytes(), &[16, 0, 0, 0]].concat());
        let root = [&[1][..], &own_id.to_le_bytes()].concat();
        let root = if wrong == Wrong::NoId { &[1] } else { &root[..] };
        own_info = unit(&[root, &function[..6], &[0]].concat());
        own_strings = vec![6, 0, 0, 0];
        own_lists = Vec::new();
    }
    // Others precede both: they must not be taken for them.
    info.splice(0..0, new_unit(DW_UT_PARTIAL, &[], &[0]));
    own_info.splice(0..0, new_unit(DW_UT_TYPE, &[0; 12], &[0]));
    let program: NamedSections = vec![
        (".debug_info", info.leak()),
        (".debug_abbrev", abbrev),
        (".debug_addr", numbers(&[7, CODE]).leak()),
        (".debug_ranges", numbers(&[1, 2, 0, 32, 0, 0]).leak()),
        (".debug_rnglists", lists.leak()),
        (".debug_str", b"wrong\0wrong\0wrong\0"),
        (".debug_str_offsets", &[0; 12]),
    ];
    let other: NamedSections = vec![
        (".debug_info.dwo", own_info.leak()),
        (".debug_abbrev.dwo", own_abbrev),
        (".debug_rnglists.dwo", own_lists.leak()),
        (".debug_str.dwo", b"wrong\0right\0"),
        (".debug_str_offsets.dwo", own_strings.leak()),
        // A file may have both kinds of sections. These are of no use.
        (".debug_info", b"\x03\0\0\0\x04\0\0"),
        (".debug_addr", &[0xee; 64]),
        (".debug_ranges", &[0xee; 64]),
        (".debug_str", b"wrong\0wrong\0wrong\0"),
    ];
    [program, other]
}

#[test]
fn the_other_half_of_a_unit_is_read_from_its_file_and_the_right_tables() {
    use Wrong::{Id, NoId, Nothing, Tag, UnitType};
    for (version, wrong) in
        [(4, Nothing), (5, Nothing), (4, Id), (5, Id), (4, NoId), (4, Tag), (5, Tag), (5, UnitType)]
    {
        let [program, other] = split_program(version, "file.dwo", wrong);
        let mut info = DebugInfo::new(DebugSections::of_program(&mut by_name(&program)));
        let mut loads = 0;
        for address in [CODE, CODE + 31, CODE] {
            let found = info.find(address, &mut |unit, is_wanted| {
                loads += 1;
                assert_eq!(unit.file, Some(&b"file.dwo"[..]));
                let sections = DebugSections::of_split_file(&mut by_name(&other));
                assert_eq!(is_wanted(&sections), wrong == Nothing, "version {version}, {wrong:?}");
            });
            let name = found.and_then(|found| found.calls[0].name);
            let expected = (wrong == Nothing).then_some(&b"right"[..]);
            assert_eq!(name, expected, "version {version}, {wrong:?}");
        }
        assert_eq!(loads, 1);
    }
}

#[test]
fn damaged_sections_cost_lines_or_names() {
    const LIMIT: Duration = Duration::from_secs(1);
    let whole = sections(two_units());
    let mut random = random_below();
    let begin = Instant::now();
    let (mut rounds, mut found) = (0, 0);
    while begin.elapsed() < LIMIT && rounds < 20_000 {
        rounds += 1;
        let mut damaged = whole;
        let section = match random(3) {
            0 => &mut damaged.info,
            1 => &mut damaged.abbrev,
            _ => &mut damaged.line,
        };
        // Leaked: a few hundred bytes each.
        let mut bytes = section.to_vec();
        for _ in 0..1 + random(3) {
            let at = random(bytes.len());
            match random(4) {
                0 => bytes[at] ^= 1 << random(8),
                1 => bytes[at] = random(256) as u8,
                2 => bytes[at..].iter_mut().take(10).for_each(|byte| *byte = 0xff),
                _ => bytes.truncate(at.max(1)),
            }
        }
        *section = bytes.leak();
        let mut info = DebugInfo::new(damaged);
        for address in [0, 1, CODE, CODE + 8, CODE + 31, u64::MAX - 1, u64::MAX] {
            found += calls(&mut info, address).len();
        }
    }
    assert!(found > rounds, "{found} of {rounds}");
}
