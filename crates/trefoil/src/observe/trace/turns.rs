//! The *turns* of goroutines and tasks: the times in which one of them ran on a P. They are sorted
//! by P and time, so a binary search finds those between two times.
//!
//! A recording of many short goroutines has a million turns, and each goroutine may have been queued
//! during most of them. If there are so many between two times, they are not summed up: a segment
//! tree finds the longest.

use super::lives::{Life, State};
use crate::sys::map::Map;
use crate::sys::sort::sort_by;
use std::ops::Range;

/// The most turns that are summed up by goroutine. If there are more, only the longest are used.
const SUMMED_MAX: usize = 1024;

/// One goroutine or task runs on one P.
struct Turn {
    begin: u64,
    end: u64,
    id: u64,
}

impl Turn {
    /// Returns how long it lasted between two times.
    fn nanos_between(&self, from: u64, to: u64) -> u64 {
        self.end.min(to).saturating_sub(self.begin.max(from))
    }
}

/// The turns of one P.
struct TurnsOfP {
    /// Sorted by `begin`.
    turns: Vec<Turn>,
    /// For each turn, the latest end of all up to it. Times are not exact, so turns may overlap.
    latest_end: Vec<u64>,
    /// A segment tree over the turns: the node n is above 2n and 2n + 1, and the second half are the
    /// turns themselves. Each node is the place of the longest turn below it.
    longest: Vec<usize>,
}

impl TurnsOfP {
    fn new(mut turns: Vec<Turn>) -> TurnsOfP {
        sort_by(&mut turns, |a, b| (a.begin, a.end, a.id).cmp(&(b.begin, b.end, b.id)));
        let mut latest = 0;
        let ends = turns.iter().map(|turn| {
            latest = turn.end.max(latest);
            latest
        });
        let latest_end = ends.collect();
        let count = turns.len();
        let mut longest: Vec<usize> = (0..2 * count).map(|n| n.saturating_sub(count)).collect();
        for n in (1..count).rev() {
            longest[n] = longer(&turns, longest[2 * n], longest[2 * n + 1]);
        }
        TurnsOfP { turns, latest_end, longest }
    }

    /// Returns the places of the turns between two times, and maybe of some that are not.
    fn between(&self, from: u64, to: u64) -> Range<usize> {
        let first = self.latest_end.partition_point(|&end| end <= from);
        first..self.turns.partition_point(|turn| turn.begin < to).max(first)
    }

    /// Returns the place of the longest turn in a range that is not empty.
    fn longest_in(&self, range: Range<usize>) -> usize {
        let count = self.turns.len();
        let (mut low, mut high, mut best) = (range.start + count, range.end + count, range.start);
        while low < high {
            if low % 2 == 1 {
                best = longer(&self.turns, best, self.longest[low]);
                low += 1;
            }
            if high % 2 == 1 {
                high -= 1;
                best = longer(&self.turns, best, self.longest[high]);
            }
            (low, high) = (low / 2, high / 2);
        }
        best
    }
}

/// Returns which of two places has the longer turn.
fn longer(turns: &[Turn], a: usize, b: usize) -> usize {
    let nanos = |at: usize| turns[at].nanos_between(0, u64::MAX);
    if nanos(b) > nanos(a) { b } else { a }
}

/// What ran between two times.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Ran {
    /// For how long, and which goroutine or task; the longest first.
    pub(super) longest: Vec<(u64, u64)>,
    pub(super) others: Others,
}

/// How much more ran.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Others {
    /// So many goroutines and tasks.
    Goroutines(usize),
    /// So many turns: they were too many to be summed up.
    Turns(usize),
}

/// The turns of all goroutines and tasks.
pub(super) struct Turns(Vec<TurnsOfP>);

impl Turns {
    pub(super) fn new(lives: &Map<u64, Life>) -> Turns {
        let mut by_p: Map<u32, Vec<Turn>> = Map::new();
        for &(id, ref life) in lives.entries() {
            for span in &life.spans {
                if let State::Running(p) = span.state {
                    let (begin, end) = (span.begin.middle(), span.end.middle());
                    by_p.get_or_default(p).push(Turn { begin, end, id });
                }
            }
        }
        Turns(by_p.into_iter().map(|(_, turns)| TurnsOfP::new(turns)).collect())
    }

    /// Returns the goroutines and tasks that ran longest between two times, at most `max`. If there
    /// are more than [`SUMMED_MAX`] turns, only the longest turns of each P count.
    pub(super) fn between(&self, from: u64, to: u64, max: usize) -> Ran {
        let ranges: Vec<_> = self.0.iter().map(|of_p| (of_p, of_p.between(from, to))).collect();
        let count: usize = ranges.iter().map(|(_, range)| range.len()).sum();
        let mut sums: Map<u64, u64> = Map::new();
        let mut add = |turn: &Turn| {
            let nanos = turn.nanos_between(from, to);
            if nanos != 0 {
                let sum = sums.get_or_default(turn.id);
                *sum = sum.saturating_add(nanos);
            }
        };
        let mut left_out = 0;
        for (of_p, range) in ranges {
            if count <= SUMMED_MAX {
                of_p.turns[range].iter().for_each(&mut add);
                continue;
            }
            left_out += range.len();
            // The longest of a range, then the longest of what is on both sides of it.
            let mut parts = vec![range];
            for _ in 0..max {
                parts.retain(|part| !part.is_empty());
                let best = |part: &Range<usize>| of_p.longest_in(part.clone());
                let nanos = |part: &Range<usize>| of_p.turns[best(part)].nanos_between(0, u64::MAX);
                let Some(i) = (0..parts.len()).max_by_key(|&i| nanos(&parts[i])) else { break };
                let part = parts.swap_remove(i);
                let at = best(&part);
                add(&of_p.turns[at]);
                left_out -= 1;
                parts.extend([part.start..at, at + 1..part.end]);
            }
        }
        let mut longest: Vec<(u64, u64)> =
            sums.into_iter().map(|(id, nanos)| (nanos, id)).collect();
        sort_by(&mut longest, |a, b| b.cmp(a));
        let others = longest.len().saturating_sub(max) + left_out;
        let others =
            if count <= SUMMED_MAX { Others::Goroutines(others) } else { Others::Turns(others) };
        longest.truncate(max);
        Ran { longest, others }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_p(turns: &[(u64, u64, u64)]) -> TurnsOfP {
        TurnsOfP::new(turns.iter().map(|&(begin, end, id)| Turn { begin, end, id }).collect())
    }

    #[test]
    fn few_turns_are_summed_up_by_goroutine() {
        let turns = Turns(vec![
            of_p(&[(20, 30, 2), (0, 10, 1), (10, 20, 1)]),
            of_p(&[(5, 12, 3), (90, 99, 4)]),
        ]);
        let ran = turns.between(5, 25, 2);
        assert_eq!(ran, Ran { longest: vec![(15, 1), (7, 3)], others: Others::Goroutines(1) });
        let nothing = Ran { longest: vec![], others: Others::Goroutines(0) };
        assert_eq!(turns.between(31, 90, 2), nothing);
    }

    #[test]
    fn the_longest_of_many_turns_are_found() {
        // 100,000 turns of 10 ns, except three.
        let (mut at, mut turns) = (0, Vec::new());
        for id in 0..100_000 {
            let nanos = match id {
                7 => 5_000,
                50_000 => 9_000,
                99_999 => 4_000,
                _ => 10,
            };
            turns.push((at, at + nanos, id));
            at += nanos;
        }
        let turns = Turns(vec![of_p(&turns)]);
        let ran = turns.between(0, at, 3);
        assert_eq!(ran.longest, [(9_000, 50_000), (5_000, 7), (4_000, 99_999)]);
        assert_eq!(ran.others, Others::Turns(99_997));
        // Without the first and the last one.
        let ran = turns.between(10_000, at - 4_000, 1);
        assert_eq!(ran.longest, [(9_000, 50_000)]);
    }

    /// Every range, compared with a linear search.
    #[test]
    fn the_tree_finds_what_a_search_finds() {
        for count in 1..40u64 {
            let turns: Vec<_> =
                (0..count).map(|i| (i * 100, i * 100 + i * 37 % 91 + 1, i)).collect();
            let of_p = of_p(&turns);
            for start in 0..turns.len() {
                for end in start + 1..=turns.len() {
                    let nanos = |at: usize| turns[at].1 - turns[at].0;
                    let expected = (start..end).map(nanos).max().unwrap();
                    let found = of_p.longest_in(start..end);
                    assert!((start..end).contains(&found), "{found} in {start}..{end}");
                    assert_eq!(nanos(found), expected, "{start}..{end} of {count}");
                }
            }
        }
    }
}
