//! All samples of a run, by workload and runtime. Nothing is dropped.

use std::collections::BTreeMap;

use crate::sample::Sample;
use crate::workloads::{Goal, Metric};

#[derive(Default)]
pub struct Results {
    samples: BTreeMap<(&'static str, &'static str), Vec<Sample>>,
}

/// What the samples of one metric come to.
#[derive(Clone, Copy)]
pub struct Summary {
    pub median: f64,
    pub min: f64,
    pub max: f64,
    pub count: usize,
}

impl Summary {
    pub fn of(mut values: Vec<f64>) -> Option<Summary> {
        values.sort_by(f64::total_cmp);
        let count = values.len();
        let median = match count {
            0 => return None,
            n if n % 2 == 1 => values[n / 2],
            n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
        };
        Some(Summary { median, min: values[0], max: values[count - 1], count })
    }

    /// From the least to the greatest sample, in parts of the median.
    pub fn spread(&self) -> f64 {
        (self.max - self.min) / self.median
    }
}

impl Results {
    pub fn add(&mut self, workload: &'static str, peer: &'static str, sample: Sample) {
        self.samples.entry((workload, peer)).or_default().push(sample);
    }

    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    pub fn has(&self, workload: &str) -> bool {
        self.samples.keys().any(|(name, _)| *name == workload)
    }

    pub fn summary(
        &self,
        workload: &'static str,
        peer: &'static str,
        key: &str,
    ) -> Option<Summary> {
        let samples = self.samples.get(&(workload, peer))?;
        Summary::of(samples.iter().filter_map(|sample| sample.metrics.get(key).copied()).collect())
    }

    /// The median of a runtime as a multiple of Go's.
    pub fn ratio(
        &self,
        workload: &'static str,
        peer: &'static str,
        metric: &Metric,
    ) -> Option<f64> {
        if matches!(metric.goal, Goal::Context) {
            return None;
        }
        self.ratio_to("go", workload, peer, metric)
    }

    /// The median of a runtime as a multiple of that of `base`.
    fn ratio_to(
        &self,
        base: &'static str,
        workload: &'static str,
        peer: &'static str,
        metric: &Metric,
    ) -> Option<f64> {
        let median = |peer| Some(self.summary(workload, peer, metric.key)?.median);
        Some(median(peer)? / median(base)?)
    }

    /// Whether trefoil meets this target of the metric; None if figures are missing.
    pub fn is_met(&self, workload: &'static str, metric: &Metric, target: &Goal) -> Option<bool> {
        let ratio_to = |base| self.ratio_to(base, workload, "trefoil", metric);
        match *target {
            Goal::Ratio(most) => Some(ratio_to("go")? <= most),
            Goal::RatioAtLeast(least) => Some(ratio_to("go")? >= least),
            Goal::RatioTo(peer, most) => Some(ratio_to(peer)? <= most),
            Goal::RatioToAtLeast(peer, least) => Some(ratio_to(peer)? >= least),
            Goal::AtMost(most) => {
                Some(self.summary(workload, "trefoil", metric.key)?.median <= most)
            }
            Goal::All(_) | Goal::Report | Goal::Context => None,
        }
    }

    /// How many samples of one cell other programs disturbed.
    pub fn disturbed(&self, workload: &'static str, peer: &'static str) -> usize {
        let samples = self.samples.get(&(workload, peer));
        samples.map_or(0, |samples| samples.iter().filter(|sample| sample.is_disturbed()).count())
    }

    /// Of all samples: how many were disturbed, and how many there are.
    pub fn disturbed_in_all(&self) -> (usize, usize) {
        let all = || self.samples.values().flatten();
        (all().filter(|sample| sample.is_disturbed()).count(), all().count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_of_odd_even_and_no_samples() {
        let odd = Summary::of(vec![3.0, 1.0, 2.0]).unwrap();
        assert_eq!((odd.median, odd.min, odd.max, odd.count), (2.0, 1.0, 3.0, 3));
        assert_eq!(odd.spread(), 1.0);
        assert_eq!(Summary::of(vec![4.0, 2.0]).unwrap().median, 3.0);
        assert!(Summary::of(Vec::new()).is_none());
    }

    #[test]
    fn each_target_of_a_metric_is_compared_with_the_runtime_that_it_names() {
        let mut results = Results::default();
        for (peer, per_s) in [("trefoil", 120.0), ("go", 100.0), ("tokio", 125.0)] {
            let metrics = BTreeMap::from([("per_s".to_owned(), per_s)]);
            results.add("echo", peer, Sample { metrics, elsewhere: 0.0 });
        }
        let goal = Goal::All(&[
            Goal::RatioAtLeast(1.2),
            Goal::RatioToAtLeast("tokio", 1.0),
            Goal::RatioTo("tokio", 1.0),
            Goal::RatioToAtLeast("may", 1.0),
            Goal::AtMost(119.0),
        ]);
        let metric = Metric { key: "per_s", unit: "", goal };
        let met: Vec<_> = (metric.goal.targets().iter())
            .map(|target| results.is_met("echo", &metric, target))
            .collect();
        assert_eq!(met, [Some(true), Some(false), Some(true), None, Some(false)]);
        assert!(Goal::Report.targets().is_empty());
        assert_eq!(Goal::Ratio(1.0).targets().len(), 1);
    }
}
