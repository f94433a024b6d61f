//! A hash map that compiles quickly, for code that is not on a hot path.
//!
//! Each pair of types in a `HashMap` of std is 1,500 to 3,000 lines of LLVM IR, and the runtime has
//! thirty. Here the table is compiled once, for all types: it finds the place of an entry in a `Vec`
//! by the hash of its key, and compares keys by an indirect call.
//!
//! The order of iteration is that of insertion, until an entry is removed: the last one then takes
//! its place. So the same operations give the same order in every run, as simulations need.
//!
//! The hash is quick and has no secret, so keys that were chosen for it can make a map slow: use it
//! for ids, addresses and texts of the program and its own files.

use std::borrow::Borrow;
use std::hash::{Hash, Hasher};
use std::ops::Index;

/// A hash map: see the head of the file.
#[derive(Clone)]
pub struct Map<K, V> {
    entries: Vec<(K, V)>,
    table: Table,
}

impl<K, V> Default for Map<K, V> {
    fn default() -> Self {
        Map::new()
    }
}

impl<K, V> Map<K, V> {
    pub const fn new() -> Map<K, V> {
        Map { entries: Vec::new(), table: Table { slots: Vec::new() } }
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn clear(&mut self) {
        self.entries.clear();
        self.table.slots.clear();
    }

    /// Returns the entries in the order of the map.
    pub fn entries(&self) -> &[(K, V)] {
        &self.entries
    }

    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.entries.iter().map(|(key, _)| key)
    }

    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.entries.iter().map(|(_, value)| value)
    }

    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.entries.iter_mut().map(|(_, value)| value)
    }
}

impl<K: Hash + Eq, V> Map<K, V> {
    /// Returns the place of `key`, and its slot in the table.
    fn find<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<(usize, usize)>
    where
        K: Borrow<Q>,
    {
        let is_key = |place: usize| self.entries[place].0.borrow() == key;
        self.table.find(hash(key), &is_key)
    }

    pub fn contains_key<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.find(key).is_some()
    }

    pub fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        let (place, _) = self.find(key)?;
        Some(&self.entries[place].1)
    }

    pub fn get_mut<Q: Hash + Eq + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        let (place, _) = self.find(key)?;
        Some(&mut self.entries[place].1)
    }

    /// Returns the value of `key`. If there is none, `make` makes it.
    pub fn get_or_insert_with(&mut self, key: K, make: impl FnOnce() -> V) -> &mut V {
        let place = match self.find(&key) {
            Some((place, _)) => place,
            None => self.push(key, make()),
        };
        &mut self.entries[place].1
    }

    /// Returns the value of `key`. If there is none, it gets the default one.
    pub fn get_or_default(&mut self, key: K) -> &mut V
    where
        V: Default,
    {
        self.get_or_insert_with(key, V::default)
    }

    /// Sets the value of `key`. Returns the one that it had.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        match self.find(&key) {
            Some((place, _)) => Some(std::mem::replace(&mut self.entries[place].1, value)),
            None => {
                self.push(key, value);
                None
            }
        }
    }

    /// Removes `key`. Returns its value.
    pub fn remove<Q: Hash + Eq + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let (place, slot) = self.find(key)?;
        self.table.remove(slot);
        let last = self.entries.len() - 1;
        if place != last {
            self.table.move_entry(hash(&self.entries[last].0), last, place);
        }
        Some(self.entries.swap_remove(place).1)
    }

    /// Keeps the entries for which `is_kept` returns true, in their order.
    pub fn retain(&mut self, mut is_kept: impl FnMut(&K, &V) -> bool) {
        // First, so that the table names no entry that is gone if `is_kept` panics.
        self.table.slots.clear();
        self.entries.retain(|(key, value)| is_kept(key, value));
        for (place, (key, _)) in self.entries.iter().enumerate() {
            self.table.insert(hash(key), place);
        }
    }

    /// Adds an entry whose key is not in the map. Returns its place.
    fn push(&mut self, key: K, value: V) -> usize {
        let place = self.entries.len();
        self.table.insert(hash(&key), place);
        self.entries.push((key, value));
        place
    }
}

impl<K, V> IntoIterator for Map<K, V> {
    type Item = (K, V);
    type IntoIter = std::vec::IntoIter<(K, V)>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}

impl<K: Hash + Eq, V> FromIterator<(K, V)> for Map<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut map = Map::new();
        entries.into_iter().for_each(|(key, value)| _ = map.insert(key, value));
        map
    }
}

impl<K: Hash + Eq + Borrow<Q>, Q: Hash + Eq + ?Sized, V> Index<&Q> for Map<K, V> {
    type Output = V;

    fn index(&self, key: &Q) -> &V {
        self.get(key).expect("no entry with this key")
    }
}

/// Keys without values, in the order of insertion.
pub struct Set<K>(Map<K, ()>);

impl<K> Default for Set<K> {
    fn default() -> Self {
        Set::new()
    }
}

impl<K> Set<K> {
    pub const fn new() -> Set<K> {
        Set(Map::new())
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn iter(&self) -> impl Iterator<Item = &K> {
        self.0.keys()
    }
}

impl<K: Hash + Eq> Set<K> {
    pub fn contains(&self, key: &K) -> bool {
        self.0.contains_key(key)
    }

    /// Adds a key. Returns whether it is new.
    pub fn insert(&mut self, key: K) -> bool {
        self.0.insert(key, ()).is_none()
    }
}

impl<K: Hash + Eq> FromIterator<K> for Set<K> {
    fn from_iter<I: IntoIterator<Item = K>>(keys: I) -> Self {
        let mut set = Set::new();
        keys.into_iter().for_each(|key| _ = set.insert(key));
        set
    }
}

/// Finds places by hash: open addressing with linear probing.
///
/// Invariants:
/// 1. The number of slots is zero or a power of two, and at least an eighth of them is free.
/// 2. Between the slot that a hash points at and the slot in which it is, none is free.
#[derive(Clone)]
struct Table {
    slots: Vec<Slot>,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    hash: u32,
    /// The place of the entry, plus 1. 0 in a free slot.
    entry: u32,
}

const SLOTS_MIN: usize = 8;

impl Table {
    /// Returns the place and the slot of the entry with this hash for which `is_key` returns true.
    fn find(&self, hash: u32, is_key: &dyn Fn(usize) -> bool) -> Option<(usize, usize)> {
        let mask = self.slots.len().checked_sub(1)?;
        let mut at = hash as usize & mask;
        loop {
            let slot = self.slots[at];
            if slot.entry == 0 {
                return None;
            }
            let place = slot.entry as usize - 1;
            if slot.hash == hash && is_key(place) {
                return Some((place, at));
            }
            at = (at + 1) & mask;
        }
    }

    /// Adds an entry that is not in the table. The places in the table are those below `place`.
    fn insert(&mut self, hash: u32, place: usize) {
        let entry = u32::try_from(place + 1).expect("a map has less than 2^32 entries");
        if (place + 1) * 8 > self.slots.len() * 7 {
            let count = (self.slots.len() * 2).max(SLOTS_MIN);
            let old = std::mem::replace(&mut self.slots, vec![Slot::default(); count]);
            for slot in old {
                if slot.entry != 0 {
                    self.put(slot);
                }
            }
        }
        self.put(Slot { hash, entry });
    }

    /// Puts a slot's contents into the first free slot.
    fn put(&mut self, slot: Slot) {
        let mask = self.slots.len() - 1;
        let mut at = slot.hash as usize & mask;
        while self.slots[at].entry != 0 {
            at = (at + 1) & mask;
        }
        self.slots[at] = slot;
    }

    /// Frees a slot. The slots behind it move up, as invariant 2 demands.
    fn remove(&mut self, slot: usize) {
        let mask = self.slots.len() - 1;
        let mut free = slot;
        let mut at = slot;
        loop {
            at = (at + 1) & mask;
            let next = self.slots[at];
            if next.entry == 0 {
                break;
            }
            let home = next.hash as usize & mask;
            // Whether `free` is between its home and where it is now.
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(free) & mask) {
                self.slots[free] = next;
                free = at;
            }
        }
        self.slots[free] = Slot::default();
    }

    /// Notes that the entry at `from` is at `to` now.
    fn move_entry(&mut self, hash: u32, from: usize, to: usize) {
        if let Some((_, slot)) = self.find(hash, &|place| place == from) {
            self.slots[slot].entry = to as u32 + 1;
        }
    }
}

fn hash<Q: Hash + ?Sized>(key: &Q) -> u32 {
    let mut hasher = Mixer(0);
    key.hash(&mut hasher);
    // The upper half of a product is mixed better.
    (hasher.finish() >> 32) as u32
}

/// Multiplies by an odd number with irregular bits, and folds the product.
struct Mixer(u64);

impl Mixer {
    fn mix(&mut self, word: u64) {
        const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
        let product = u128::from(self.0.rotate_left(23) ^ word ^ FACTOR) * u128::from(FACTOR);
        self.0 = product as u64 ^ (product >> 64) as u64;
    }
}

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.mix(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, n: u8) {
        self.mix(n.into());
    }

    fn write_u32(&mut self, n: u32) {
        self.mix(n.into());
    }

    fn write_u64(&mut self, n: u64) {
        self.mix(n);
    }

    fn write_usize(&mut self, n: usize) {
        self.mix(n as u64);
    }

    fn finish(&self) -> u64 {
        self.0.wrapping_mul(0xff51_afd7_ed55_8ccd) ^ self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::rng::Rng;
    use std::collections::{HashMap, HashSet};

    fn assert_same(map: &Map<u64, u64>, model: &HashMap<u64, u64>) {
        assert_eq!((map.len(), map.is_empty()), (model.len(), model.is_empty()));
        let entries: HashMap<u64, u64> = map.entries().iter().copied().collect();
        assert_eq!(entries, *model);
        for (key, value) in model {
            assert_eq!(map[key], *value);
        }
    }

    #[test]
    fn map_has_the_entries_of_a_hash_map() {
        let mut rng = Rng::from_seed(1);
        // Few keys, so that they are removed and found again; and keys whose low bits are equal.
        for (keys, shift) in [(8, 0), (64, 0), (1000, 0), (64, 40), (1000, 12)] {
            let (mut map, mut model) = (Map::new(), HashMap::new());
            for n in 0..4000 {
                let key = (rng.next() % keys) << shift;
                match rng.next() % 5 {
                    0 => assert_eq!(map.insert(key, n), model.insert(key, n)),
                    1 => assert_eq!(map.remove(&key), model.remove(&key)),
                    2 => {
                        let made = *model.entry(key).or_insert(n);
                        assert_eq!(*map.get_or_insert_with(key, || n), made);
                    }
                    3 if n % 50 == 0 => {
                        map.retain(|key, _| key % 3 != 0);
                        model.retain(|key, _| key % 3 != 0);
                    }
                    _ => {
                        assert_eq!(map.get(&key), model.get(&key));
                        assert_eq!(map.get_mut(&key), model.get_mut(&key));
                        assert_eq!(map.contains_key(&key), model.contains_key(&key));
                    }
                }
                if n % 64 == 0 {
                    assert_same(&map, &model);
                }
            }
            assert_same(&map, &model);
            map.clear();
            assert!(map.is_empty() && map.get(&1).is_none());
        }
    }

    #[test]
    fn entries_are_in_the_order_of_their_insertion() {
        let texts = ["b", "a", "", "a long text, of more than one word", "c"];
        let mut map: Map<Box<str>, usize> = texts.iter().map(|&text| (text.into(), 0)).collect();
        *map.get_or_default("a".into()) += 1;
        map.values_mut().for_each(|value| *value += 1);
        assert!(map.keys().map(|key| &**key).eq(texts));
        assert!(map.values().copied().eq([1, 2, 1, 1, 1]));
        assert_eq!(map.get("c"), Some(&1));
        map.retain(|key, _| !key.is_empty());
        let left: Vec<_> = map.into_iter().map(|(key, _)| key).collect();
        assert_eq!(left, ["b", "a", texts[3], "c"].map(Box::from));
    }

    #[test]
    fn set_says_which_keys_are_new() {
        let mut set: Set<(usize, u64)> = [(1, 2), (3, 4), (1, 2)].into_iter().collect();
        assert_eq!(set.iter().count(), 2);
        assert!(set.contains(&(1, 2)) && !set.contains(&(2, 1)));
        assert!(set.insert((2, 1)) && !set.insert((2, 1)));
        set.clear();
        assert!(!set.contains(&(1, 2)));
    }

    /// Linear probing is quick only if the hashes of similar keys are spread.
    #[test]
    fn similar_keys_have_different_hashes() {
        for shift in [0, 3, 6, 12, 20, 32, 48] {
            let hashes: HashSet<u32> = (0..4096_u64).map(|n| hash(&(n << shift)) % 8192).collect();
            // Of 4,096 random numbers below 8,192, some 3,223 are different.
            assert!(hashes.len() > 3000, "{} for shift {shift}", hashes.len());
        }
    }
}
