//! A map for a few thousand small entries: a `Vec` that is sorted by key.
//!
//! It has the order of a `BTreeMap` at a fraction of its compile time: each `BTreeMap` is some
//! 8,000 lines of LLVM IR per pair of types, and the runtime would have a dozen.
//!
//! | operation | cost |
//! |---|---|
//! | `get`, `get_mut` | binary search |
//! | `insert` of a new largest key | amortised constant |
//! | other `insert`, `remove` | moves the entries behind: 16 KB for the first of a thousand small ones |
//! | iteration | in the order of the keys |
//!
//! Put large values in a `Box`.

/// See the head of the file.
pub struct SortedMap<K, V>(Vec<(K, V)>);

impl<K, V> Default for SortedMap<K, V> {
    fn default() -> Self {
        SortedMap::new()
    }
}

impl<K, V> SortedMap<K, V> {
    pub const fn new() -> SortedMap<K, V> {
        SortedMap(Vec::new())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns the entries in the order of their keys.
    pub fn entries(&self) -> &[(K, V)] {
        &self.0
    }

    /// Returns the keys and the values, which may be changed, in the order of the keys.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        self.0.iter_mut().map(|(key, value)| (&*key, value))
    }

    /// Keeps the entries for which `is_kept` returns true.
    pub fn retain(&mut self, is_kept: impl Fn(&K, &V) -> bool) {
        self.0.retain(|(key, value)| is_kept(key, value));
    }
}

impl<K: Ord, V> SortedMap<K, V> {
    /// Returns `Ok` with the index of `key`, or `Err` with the index at which to insert it.
    fn search(&self, key: &K) -> Result<usize, usize> {
        match self.0.last() {
            Some((last, _)) if last < key => Err(self.0.len()),
            _ => self.0.binary_search_by(|(known, _)| known.cmp(key)),
        }
    }

    pub fn contains_key(&self, key: &K) -> bool {
        self.search(key).is_ok()
    }

    pub fn get(&self, key: &K) -> Option<&V> {
        self.search(key).ok().map(|i| &self.0[i].1)
    }

    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.search(key).ok().map(|i| &mut self.0[i].1)
    }

    /// Returns the value of `key`. If there is none, `make` makes it.
    pub fn get_or_insert_with(&mut self, key: K, make: impl FnOnce() -> V) -> &mut V {
        let i = self.search(&key).unwrap_or_else(|i| {
            self.0.insert(i, (key, make()));
            i
        });
        &mut self.0[i].1
    }

    /// Sets the value of `key`.
    pub fn insert(&mut self, key: K, value: V) {
        match self.search(&key) {
            Ok(i) => self.0[i].1 = value,
            Err(i) => self.0.insert(i, (key, value)),
        }
    }

    /// Removes `key`. Returns its value.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        self.search(key).ok().map(|i| self.0.remove(i).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::rng::Rng;
    use std::collections::BTreeMap;

    #[test]
    fn sorted_map_has_the_entries_of_a_btree_map_in_the_same_order() {
        let (mut map, mut model) = (SortedMap::new(), BTreeMap::new());
        let mut rng = Rng::from_seed(1);
        for n in 0..2000 {
            let key = rng.next() % 64;
            match rng.next() % 4 {
                0 => {
                    map.insert(key, n);
                    model.insert(key, n);
                }
                1 => assert_eq!(map.remove(&key), model.remove(&key)),
                2 => {
                    let made = *model.entry(key).or_insert(n);
                    assert_eq!(*map.get_or_insert_with(key, || n), made);
                }
                _ if n % 50 == 0 => {
                    map.retain(|key, _| key % 3 != 0);
                    model.retain(|key, _| key % 3 != 0);
                }
                _ => {
                    assert_eq!(map.get(&key), model.get(&key));
                    assert_eq!(map.get_mut(&key), model.get_mut(&key));
                    assert_eq!(map.contains_key(&key), model.contains_key(&key));
                }
            }
            let entries = map.entries().iter().copied();
            assert!(entries.eq(model.iter().map(|(&key, &value)| (key, value))));
        }
        assert!(map.iter_mut().eq(model.iter_mut()));
        map.clear();
        assert!(map.is_empty());
    }
}
