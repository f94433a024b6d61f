//! Reads OpenMetrics text 1.0.0 and checks its rules: the order and the words of the lines about a
//! metric, the suffixes of samples, that no series occurs twice or is interleaved with others, that
//! buckets do not fall and end with `+Inf`, and `# EOF`.

use std::collections::{BTreeMap, BTreeSet};

/// Names and values, in their order.
type Labels = Vec<(String, String)>;

#[derive(Debug, Default)]
pub(crate) struct Family {
    pub(crate) kind: String,
    pub(crate) unit: String,
    pub(crate) help: String,
    /// Name with its suffix, labels in their order, value.
    pub(crate) samples: Vec<(String, Labels, f64)>,
}

/// Returns the metrics by name. Panics if the text breaks a rule.
pub(crate) fn parse(text: &str) -> BTreeMap<String, Family> {
    assert!(text.ends_with("# EOF\n"), "the text must end with # EOF");
    assert!(!text.contains('\r') && !text.contains("\n\n"));
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut current: Option<String> = None;
    let mut series = BTreeSet::new();
    let lines: Vec<&str> = text.trim_end().lines().collect();
    let (end, lines) = lines.split_last().unwrap();
    assert_eq!(*end, "# EOF");
    for line in lines {
        if let Some(rest) = line.strip_prefix("# ") {
            let mut words = rest.splitn(3, ' ');
            let (word, name) = (words.next().unwrap(), words.next().expect("a name"));
            let value = words.next().unwrap_or_default();
            check_name(name);
            if current.as_deref() != Some(name) {
                assert!(!families.contains_key(name), "the lines of {name} are interleaved");
                families.insert(name.to_owned(), Family::default());
                current = Some(name.to_owned());
            }
            let family = families.get_mut(name).unwrap();
            assert!(family.samples.is_empty(), "{line} after a sample");
            let target = match word {
                "HELP" => &mut family.help,
                "TYPE" => &mut family.kind,
                "UNIT" => &mut family.unit,
                other => panic!("# {other}"),
            };
            assert!(target.is_empty(), "{line} for the second time");
            *target = value.to_owned();
            if word == "TYPE" {
                assert!(["gauge", "counter", "histogram"].contains(&value), "{value}");
            }
            if word == "UNIT" {
                assert!(name.ends_with(&format!("_{value}")), "{name} must end with its unit");
            }
            continue;
        }
        assert!(!line.starts_with('#'), "{line}");
        let name = current.as_ref().expect("a sample before its TYPE");
        let family = families.get_mut(name).unwrap();
        let (sample, labels, value) = parse_sample(line);
        let suffix =
            sample.strip_prefix(name.as_str()).unwrap_or_else(|| panic!("{sample} in {name}"));
        let allowed: &[&str] = match family.kind.as_str() {
            "gauge" => &[""],
            "counter" => &["_total"],
            "histogram" => &["_bucket", "_count", "_sum"],
            other => panic!("{name} has no TYPE but {other:?}"),
        };
        assert!(allowed.contains(&suffix), "{sample} in a {}", family.kind);
        assert!(series.insert((sample.clone(), labels.clone())), "{line} is there twice");
        if family.kind == "counter" {
            assert!(value >= 0.0);
        }
        family.samples.push((sample, labels, value));
    }
    for (name, family) in &families {
        assert!(!family.kind.is_empty() && !family.help.is_empty(), "{name}");
        if family.kind == "histogram" {
            check_histogram(name, family);
        }
    }
    families
}

fn check_name(name: &str) {
    let first = name.chars().next().unwrap();
    assert!(first.is_ascii_alphabetic() || first == '_', "{name}");
    assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'), "{name}");
}

fn parse_sample(line: &str) -> (String, Labels, f64) {
    let (series, value) = line.rsplit_once(' ').unwrap();
    let value = value.parse().unwrap_or_else(|_| panic!("{line}"));
    let Some((name, rest)) = series.split_once('{') else {
        check_name(series);
        return (series.to_owned(), Vec::new(), value);
    };
    check_name(name);
    let rest = rest.strip_suffix('}').unwrap();
    let mut labels = Labels::new();
    for pair in rest.split("\",") {
        let (label, value) = pair.split_once("=\"").unwrap_or_else(|| panic!("{line}"));
        let value = value.strip_suffix('"').unwrap_or(value);
        check_name(label);
        assert!(!value.contains(['"', '\\', '\n']), "{line}");
        assert!(labels.iter().all(|(other, _)| other != label), "{label} twice in {line}");
        labels.push((label.to_owned(), value.to_owned()));
    }
    (name.to_owned(), labels, value)
}

fn check_histogram(name: &str, family: &Family) {
    // By all labels but `le`.
    let mut groups: BTreeMap<Labels, Vec<(f64, f64)>> = BTreeMap::new();
    for (sample, labels, value) in &family.samples {
        if sample.ends_with("_bucket") {
            let (le, others): (Vec<_>, Vec<_>) =
                labels.iter().cloned().partition(|(label, _)| label == "le");
            let le = if le[0].1 == "+Inf" { f64::INFINITY } else { le[0].1.parse().unwrap() };
            groups.entry(others).or_default().push((le, *value));
        }
    }
    for (labels, buckets) in groups {
        assert!(buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{name}: {buckets:?}");
        assert_eq!(buckets.last().unwrap().0, f64::INFINITY);
        let of = |suffix: &str| {
            let wanted = format!("{name}{suffix}");
            let mut found = family.samples.iter().filter(|(n, l, _)| *n == wanted && *l == labels);
            found.next().unwrap_or_else(|| panic!("{name} has no {suffix}")).2
        };
        assert_eq!(of("_count"), buckets.last().unwrap().1);
        assert!(of("_sum") >= 0.0);
    }
}
