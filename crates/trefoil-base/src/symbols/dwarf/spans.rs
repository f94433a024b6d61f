//! `Span`: the entry of every sorted table.
//!
//! There is one type for all of them because the code that sorts is large, and is compiled once for
//! each type.

/// A part of a table, by address or by another key, and what it is of.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Span {
    /// How many calls enclose it. 0 except for inlined calls.
    pub(crate) depth: u32,
    /// What it is found by: its first address, unless the table says otherwise.
    pub(crate) key: u64,
    /// The address after its last, unless the table says otherwise.
    pub(crate) end: u64,
    /// What it is of: an index into another table.
    pub(crate) owner: u32,
}

/// Sorts a table that will not grow any more.
pub(crate) fn sort(spans: &mut Vec<Span>) {
    spans.shrink_to_fit();
    spans.sort_unstable();
}

/// Returns how many spans are at most at this depth and key.
pub(crate) fn count_up_to(spans: &[Span], depth: u32, key: u64) -> usize {
    spans.partition_point(|span| (span.depth, span.key) <= (depth, key))
}

/// Returns the index of the last span at this depth whose key is not greater.
pub(crate) fn find_last(spans: &[Span], depth: u32, key: u64) -> Option<usize> {
    let index = count_up_to(spans, depth, key).checked_sub(1)?;
    (spans[index].depth == depth).then_some(index)
}
