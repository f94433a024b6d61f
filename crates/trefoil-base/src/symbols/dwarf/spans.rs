//! `Span`: the entry of every sorted table. `KeyTable`: such a table that grows.
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

/// How many new keys are searched one after another, besides a part of those that are sorted.
const NEW_KEYS_MIN: usize = 64;
const SORTED_PER_NEW_KEY: usize = 64;

/// Finds an index by a key. Keys can be added at any time.
#[derive(Default)]
pub(crate) struct KeyTable {
    sorted: Vec<Span>,
    /// Those that were added since the others were sorted.
    new: Vec<Span>,
}

impl KeyTable {
    /// Returns the index of a key.
    pub(crate) fn get(&self, key: u64) -> Option<u32> {
        let sorted = find_last(&self.sorted, 0, key).map(|at| self.sorted[at]);
        if let Some(found) = sorted.filter(|span| span.key == key) {
            return Some(found.owner);
        }
        self.new.iter().find(|span| span.key == key).map(|span| span.owner)
    }

    /// Adds a key that is not in the table.
    pub(crate) fn insert(&mut self, key: u64, index: u32) {
        self.new.push(Span { depth: 0, key, end: 0, owner: index });
        if self.new.len() > NEW_KEYS_MIN + self.sorted.len() / SORTED_PER_NEW_KEY {
            self.sorted.append(&mut self.new);
            sort(&mut self.sorted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_found_from_when_it_is_added() {
        let mut table = KeyTable::default();
        // A multiple of an odd number: all keys differ.
        let key = |index: u32| u64::from(index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for index in 0..10_000 {
            assert_eq!(table.get(key(index)), None);
            table.insert(key(index), index);
            for known in [0, index / 2, index] {
                assert_eq!(table.get(key(known)), Some(known));
            }
        }
        assert!(table.new.len() < 300 && table.sorted.len() > 9_700);
    }
}
