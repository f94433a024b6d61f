//! The decisions of a simulated schedule, as a function of a seed.
//!
//! A run of a simulation asks the same two questions again and again: which of `n` runnable
//! goroutines runs next, and whether the running goroutine is preempted at this call. Each question
//! with two possible answers or more is a *step*, and each answer is a number. The answer 0 is the
//! ordinary one: the goroutine that has waited longest runs, and the running goroutine continues.
//! Every other answer is a *deviation*.
//!
//! So a schedule is the list of its deviations. It can be replayed: the ordinary answer at every
//! step that the list does not name. And it can be shrunk: a list with fewer deviations is a
//! simpler schedule.
//!
//! # Strategies
//! | strategy | next goroutine | preemption |
//! |---|---|---|
//! | `Ordinary` | the one that has waited longest | never |
//! | `Uniform` | each with the same probability | with a probability that the seed chooses |
//! | `Priorities` | the one with the highest random priority | at few random steps, whose goroutine falls to the lowest priority; and for a goroutine with a higher priority |
//! | `Starve` | as `Uniform`, but one goroutine only if it is alone, or after [`MAX_PASSES`] | as `Uniform` |
//! | `Replay` | as listed | as listed |
//!
//! `Priorities` is probabilistic concurrency testing (PCT): a bug that needs `d` ordered events is
//! found with a probability that does not fall with the number of interleavings, if `d - 1`
//! preemptions are placed at random.
//!
//! # Spin loops
//! A goroutine may yield, or read the clock, until another one has done something. A schedule that
//! never runs the other one would not be the program's fault. So with `Priorities` a goroutine
//! falls to the lowest priority after [`MAX_YIELDS`] yields or [`MAX_CALLS`] calls in a row. Two
//! goroutines may also wake each other for ever: after [`MAX_CHOICES`] choices without a fall, the
//! goroutine that was chosen last falls. `Starve` has a bound.

use crate::mem::MmapVec;
use crate::sys::rng::Rng;

/// How a schedule is chosen; see the head of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Strategy {
    Ordinary,
    Uniform,
    /// With so many preemptions, within the first so many steps.
    Priorities {
        preemptions: u32,
        within: u64,
    },
    Starve,
    Replay,
}

/// An answer other than 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Deviation {
    pub(crate) step: u64,
    pub(crate) answer: u32,
}

/// The most preemptions of `Strategy::Priorities`.
pub(crate) const MAX_PREEMPTIONS: u32 = 8;
/// The goroutine that `Strategy::Starve` starves is one of the first so many.
const STARVED_AMONG: u64 = 16;
/// `Strategy::Starve` chooses the goroutine after it has passed it over so often.
const MAX_PASSES: u32 = 500;
/// `Strategy::Priorities` chooses a goroutine so often in a row. It has yielded each time.
const MAX_YIELDS: u32 = 10;
/// `Strategy::Priorities` lets a goroutine continue at so many calls in a row.
const MAX_CALLS: u32 = 1000;
/// `Strategy::Priorities`: after this many choices without a fall, the chosen goroutine falls.
const MAX_CHOICES: u32 = 1000;
/// `Strategy::Priorities` remembers this many fallen goroutines; older ones rise again.
const MAX_FALLEN: usize = 64;
/// `Strategy::Uniform` preempts at one of so many calls; the seed chooses one of these.
const PREEMPT_ONE_IN: [u64; 5] = [2, 4, 8, 32, 128];

/// Answers the questions of one run.
pub(crate) struct Schedule {
    strategy: Strategy,
    rng: Rng,
    /// The number of questions so far.
    step: u64,
    /// The seed, for what must not depend on the number of random numbers that were drawn.
    seed: u64,
    preempt_one_in: u64,
    /// `Priorities`: the steps at which the running goroutine falls, ascending; the rest is unused.
    falls: [u64; MAX_PREEMPTIONS as usize],
    falls_done: usize,
    /// `Priorities`: the goroutines that have fallen, the last one lowest.
    fallen: MmapVec<Candidate>,
    /// `Priorities`: the goroutine that was chosen last, how often in a row it was, and at how many
    /// calls it has continued since another one ran.
    last: Candidate,
    yields: u32,
    calls: u32,
    /// `Priorities`: the choices since a goroutine has fallen.
    choices: u32,
    /// `Starve`: the id of the goroutine, and how often it was passed over.
    starved: u64,
    passes: u32,
    /// The deviations of this run; for `Replay`, those to repeat.
    deviations: MmapVec<Deviation>,
    /// `Replay`: the index of the next deviation.
    replayed: usize,
}

/// A goroutine that may be chosen: its id, counted from the first goroutine of the run.
pub(crate) type Candidate = u64;

impl Schedule {
    pub(crate) fn new() -> Schedule {
        Schedule {
            strategy: Strategy::Ordinary,
            rng: Rng::from_seed(0),
            step: 0,
            seed: 0,
            preempt_one_in: 1,
            falls: [0; MAX_PREEMPTIONS as usize],
            falls_done: 0,
            fallen: MmapVec::new(),
            last: 0,
            yields: 0,
            calls: 0,
            choices: 0,
            starved: 0,
            passes: 0,
            deviations: MmapVec::new(),
            replayed: 0,
        }
    }

    /// Begins another run.
    pub(crate) fn begin(&mut self, seed: u64, strategy: Strategy) {
        self.strategy = strategy;
        self.seed = seed;
        self.rng = Rng::from_seed(seed);
        self.step = 0;
        self.deviations.truncate(0);
        self.replayed = 0;
        self.falls_done = 0;
        self.fallen.truncate(0);
        (self.last, self.yields, self.calls, self.choices, self.passes) = (0, 0, 0, 0, 0);
        self.preempt_one_in = PREEMPT_ONE_IN[self.below(PREEMPT_ONE_IN.len() as u64) as usize];
        self.starved = 1 + self.below(STARVED_AMONG);
        self.falls = [u64::MAX; MAX_PREEMPTIONS as usize];
        if let Strategy::Priorities { preemptions, within } = strategy {
            for i in 0..preemptions.min(MAX_PREEMPTIONS) as usize {
                self.falls[i] = 1 + self.below(within.max(1));
            }
            self.falls.sort_unstable();
        }
    }

    /// Adds a deviation to be replayed, after [`Schedule::begin`] with `Replay`. The steps ascend.
    pub(crate) fn replay(&mut self, deviation: Deviation) {
        self.deviations.push(deviation);
    }

    /// Returns the number of questions so far.
    pub(crate) fn steps(&self) -> u64 {
        self.step
    }

    /// Returns the deviations of this run.
    pub(crate) fn deviations(&self) -> &[Deviation] {
        &self.deviations
    }

    /// Answers which of the candidates runs next. They are in the order in which they became
    /// runnable.
    pub(crate) fn choose(
        &mut self,
        mut candidates: impl ExactSizeIterator<Item = Candidate>,
    ) -> usize {
        let n = candidates.len();
        if n < 2 {
            // Without an alternative, being chosen again does not mean that it has yielded.
            (self.last, self.yields, self.calls) = (candidates.next().unwrap_or(0), 0, 0);
            return 0;
        }
        self.step += 1;
        let answer = match self.strategy {
            Strategy::Ordinary => 0,
            Strategy::Uniform => self.below(n as u64) as usize,
            Strategy::Starve => {
                let starved = self.starved;
                let mut place = n;
                for (i, id) in candidates.enumerate() {
                    if id == starved {
                        place = i;
                    }
                }
                let others = n - usize::from(place < n);
                let chosen = self.below(others as u64) as usize;
                self.passes += u32::from(place < n);
                if self.passes > MAX_PASSES {
                    self.passes = 0;
                    place
                } else {
                    chosen + usize::from(chosen >= place)
                }
            }
            Strategy::Priorities { .. } => {
                let highest = candidates.enumerate().max_by_key(|&(_, id)| self.priority(id));
                let (i, id) = highest.unwrap_or((0, 0));
                self.note_chosen(id);
                i
            }
            Strategy::Replay => (self.listed() as usize).min(n - 1),
        };
        self.note(answer as u32);
        answer
    }

    /// Answers whether the goroutine `running` is preempted. `candidates` are the runnable ones.
    pub(crate) fn preempts(
        &mut self,
        running: Candidate,
        mut candidates: impl ExactSizeIterator<Item = Candidate>,
    ) -> bool {
        if candidates.len() == 0 {
            return false;
        }
        self.step += 1;
        let answer = match self.strategy {
            Strategy::Ordinary => false,
            Strategy::Uniform | Strategy::Starve => self.below(self.preempt_one_in) == 0,
            Strategy::Priorities { .. } => {
                self.calls += 1;
                if self.falls.get(self.falls_done).is_some_and(|&fall| fall <= self.step) {
                    self.falls_done += 1;
                    self.fall(running);
                    true
                } else if self.calls > MAX_CALLS {
                    self.calls = 0;
                    self.fall(running);
                    true
                } else {
                    let own = self.priority(running);
                    candidates.any(|id| self.priority(id) > own)
                }
            }
            Strategy::Replay => self.listed() != 0,
        };
        self.note(u32::from(answer));
        answer
    }

    /// `Priorities`: the goroutine `id` was chosen. If it was chosen often in a row, it falls.
    fn note_chosen(&mut self, id: Candidate) {
        self.choices += 1;
        if self.choices > MAX_CHOICES {
            self.fall(id);
        }
        if id != self.last {
            (self.last, self.yields, self.calls) = (id, 0, 0);
            return;
        }
        self.yields += 1;
        if self.yields > MAX_YIELDS {
            self.yields = 0;
            self.fall(id);
        }
    }

    /// `Priorities`: the goroutine `id` gets the lowest priority.
    fn fall(&mut self, id: Candidate) {
        if let Some(i) = self.fallen.iter().position(|&other| other == id) {
            self.fallen.remove_at(i);
        } else if self.fallen.len() >= MAX_FALLEN {
            // The one that fell first has its random priority again, or has ended.
            self.fallen.remove_at(0);
        }
        self.fallen.push(id);
        self.choices = 0;
    }

    /// The priority of a goroutine: random, unless it has fallen.
    fn priority(&self, id: Candidate) -> u64 {
        match self.fallen.iter().position(|&other| other == id) {
            Some(i) => (self.fallen.len() - i) as u64,
            // Above all that have fallen.
            None => scramble(self.seed ^ scramble(id)) | 1 << 63,
        }
    }

    /// The answer that is listed for this step.
    fn listed(&mut self) -> u32 {
        match self.deviations.get(self.replayed) {
            Some(next) if next.step == self.step => {
                self.replayed += 1;
                next.answer
            }
            _ => 0,
        }
    }

    fn note(&mut self, answer: u32) {
        if answer != 0 && self.strategy != Strategy::Replay {
            self.deviations.push(Deviation { step: self.step, answer });
        }
    }

    /// Returns a random number below `n`.
    fn below(&mut self, n: u64) -> u64 {
        self.rng.next() % n.max(1)
    }
}

/// Mixes the bits of a number.
pub(crate) fn scramble(x: u64) -> u64 {
    Rng::from_seed(x).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ids from 1 to `n`.
    fn ids(n: u32) -> impl ExactSizeIterator<Item = Candidate> {
        (1..n + 1).map(Candidate::from)
    }

    /// Asks a fixed list of questions and returns the answers.
    fn answers(schedule: &mut Schedule) -> Vec<usize> {
        let mut all = Vec::new();
        for i in 0..500 {
            all.push(schedule.choose(ids(1 + i % 7)));
            all.push(usize::from(schedule.preempts(9, ids(1 + i % 3))));
        }
        all
    }

    const STRATEGIES: [Strategy; 4] = [
        Strategy::Ordinary,
        Strategy::Uniform,
        Strategy::Priorities { preemptions: 3, within: 500 },
        Strategy::Starve,
    ];

    #[test]
    fn a_seed_repeats_its_answers_and_a_replay_too() {
        for strategy in STRATEGIES {
            let mut schedule = Schedule::new();
            schedule.begin(7, strategy);
            let first = answers(&mut schedule);
            let deviations = schedule.deviations().to_vec();
            schedule.begin(7, strategy);
            assert_eq!(answers(&mut schedule), first);
            schedule.begin(8, Strategy::Replay);
            deviations.iter().for_each(|&deviation| schedule.replay(deviation));
            assert_eq!(answers(&mut schedule), first, "{strategy:?}");
        }
    }

    #[test]
    fn seeds_differ_and_the_ordinary_schedule_has_no_deviations() {
        for strategy in STRATEGIES {
            let mut schedule = Schedule::new();
            schedule.begin(1, strategy);
            let first = answers(&mut schedule);
            schedule.begin(2, strategy);
            let is_random = strategy != Strategy::Ordinary;
            assert_eq!(answers(&mut schedule) != first, is_random, "{strategy:?}");
            assert_eq!(schedule.deviations().is_empty(), !is_random);
        }
    }

    #[test]
    fn a_starved_goroutine_is_chosen_only_if_it_is_alone_or_was_passed_over_often() {
        let mut schedule = Schedule::new();
        schedule.begin(3, Strategy::Starve);
        let starved = schedule.starved;
        let candidates = || [starved + 1, starved, starved + 2].into_iter();
        for _ in 0..3 {
            for _ in 0..MAX_PASSES {
                assert_ne!(schedule.choose(candidates()), 1);
            }
            assert_eq!(schedule.choose(candidates()), 1);
        }
        assert_eq!(schedule.choose([starved].into_iter()), 0);
    }

    #[test]
    fn a_goroutine_that_spins_falls_behind_all_others() {
        let strategy = Strategy::Priorities { preemptions: 0, within: 1 };
        for seed in 0..10 {
            // Each yields until the last one that has not run has.
            let mut schedule = Schedule::new();
            schedule.begin(seed, strategy);
            let mut seen = [0; 4];
            while seen.contains(&0) {
                let chosen = schedule.choose(ids(4));
                seen[chosen] += 1;
                assert!(seen[chosen] <= MAX_YIELDS + 2, "{seen:?}");
            }
            // The same for a goroutine that makes calls and does not yield.
            let mut calls = 0;
            let running = 1 + schedule.choose(ids(4)) as u64;
            while !schedule.preempts(
                running,
                (1..5).filter(|&id| id != running).collect::<Vec<_>>().into_iter(),
            ) {
                calls += 1;
                assert!(calls <= MAX_CALLS);
            }
            assert_ne!(1 + schedule.choose(ids(4)) as u64, running);
        }
    }

    #[test]
    fn goroutines_that_wake_each_other_for_ever_do_not_starve_a_third() {
        let strategy = Strategy::Priorities { preemptions: 0, within: 1 };
        for seed in 0..10 {
            let mut schedule = Schedule::new();
            schedule.begin(seed, strategy);
            // 1 and 2 take turns, and 3 is always runnable.
            let ran = (0..10_000).find(|i| schedule.choose([1 + i % 2, 3].into_iter()) == 1);
            assert!(ran.is_some(), "seed {seed}");
        }
    }

    #[test]
    fn the_memory_of_those_that_have_fallen_is_bounded() {
        let mut schedule = Schedule::new();
        schedule.begin(1, Strategy::Priorities { preemptions: 0, within: 1 });
        (0..100_000).for_each(|id| schedule.fall(id));
        assert_eq!(schedule.fallen.len(), MAX_FALLEN);
    }

    #[test]
    fn priorities_preempt_as_often_as_asked() {
        for preemptions in 0..=MAX_PREEMPTIONS {
            let mut schedule = Schedule::new();
            schedule.begin(11, Strategy::Priorities { preemptions, within: 100 });
            // The running goroutine has the highest priority of two: it is preempted only when it
            // falls, and then the other one runs.
            let mut running = 1 + schedule.choose(ids(2)) as u64;
            let mut count = 0;
            for _ in 0..1000 {
                if schedule.preempts(running, [3 - running].into_iter()) {
                    count += 1;
                    running = 1 + schedule.choose(ids(2)) as u64;
                }
            }
            assert_eq!(count, preemptions);
        }
    }
}
