//! The picture for the README: every workload's ratio to Go's on a logarithmic scale, a mark a runtime.
//!
//! Left of the line at 1 is better than Go, whatever is measured: where more is better the ratio is turned
//! round.

use std::fmt::Write;

use crate::workloads::Goal;

/// One mark: runtime, and how many times Go's figure.
pub struct Mark {
    pub peer: &'static str,
    pub ratio: f64,
}

/// One row: name and unit, and its marks.
pub struct Row {
    pub name: String,
    pub marks: Vec<Mark>,
}

const LABEL: f64 = 250.0;
const WIDTH: f64 = 860.0;
const RIGHT: f64 = 30.0;
const ROW: f64 = 22.0;
const TOP: f64 = 70.0;
/// Powers of two at both ends of the scale; what lies beyond is drawn at the edge.
const LEAST: f64 = -7.0;
const MOST: f64 = 4.0;

const COLOURS: &[(&str, &str)] = &[
    ("trefoil", "#16803c"),
    ("tokio", "#b4530a"),
    ("smol", "#7c3aed"),
    ("may", "#0e7490"),
    ("threads", "#6b7280"),
    ("corosensei", "#be185d"),
];

/// Turned round where more is better.
pub fn less_is_better(ratio: f64, goal: Goal) -> f64 {
    if goal.more_is_better() { 1.0 / ratio } else { ratio }
}

pub fn draw(title: &str, rows: &[Row]) -> String {
    let height = TOP + ROW * rows.len() as f64 + 30.0;
    let at = |ratio: f64| {
        let place = (ratio.log2().clamp(LEAST, MOST) - LEAST) / (MOST - LEAST);
        LABEL + place * (WIDTH - LABEL - RIGHT)
    };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"12\" y=\"22\" font-size=\"15\" fill=\"#111111\">{title}</text>\n"
    );
    legend(&mut svg, rows);
    let mut grid = |power: i32| {
        let x = at(f64::from(power).exp2());
        let (colour, width) = if power == 0 { ("#111111", 1.5) } else { ("#e5e7eb", 1.0) };
        let label = match power {
            0 => "Go".to_owned(),
            1.. => format!("{}×", 1 << power),
            _ => format!("1/{}", 1 << -power),
        };
        let bottom = height - 24.0;
        _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"{colour}\" \
             stroke-width=\"{width}\"/>\n\
             <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"#374151\">{label}</text>",
            height - 8.0,
        );
    };
    (LEAST as i32..=MOST as i32).for_each(&mut grid);
    for (i, row) in rows.iter().enumerate() {
        let y = TOP + ROW * (i as f64 + 0.5);
        _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#111111\">{}</text>",
            LABEL - 10.0,
            y + 4.0,
            row.name
        );
        // Ours last, so that it lies on top.
        let ours = |mark: &&Mark| mark.peer == "trefoil";
        for mark in row.marks.iter().filter(|mark| !ours(mark)) {
            dot(&mut svg, at(mark.ratio), y, 4.0, mark);
        }
        if let Some(mark) = row.marks.iter().find(ours) {
            let (from, to) = (at(mark.ratio).min(at(1.0)), at(mark.ratio).max(at(1.0)));
            _ = writeln!(
                svg,
                "<rect x=\"{from:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"8\" fill=\"{}\" opacity=\"0.25\"/>",
                y - 4.0,
                to - from,
                colour("trefoil"),
            );
            dot(&mut svg, at(mark.ratio), y, 5.5, mark);
        }
    }
    svg + "</svg>\n"
}

fn dot(svg: &mut String, x: f64, y: f64, r: f64, mark: &Mark) {
    let (peer, ratio) = (mark.peer, crate::report::short(mark.ratio));
    _ = writeln!(
        svg,
        "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{r}\" fill=\"{}\"><title>{peer}: {ratio} × Go</title></circle>",
        colour(peer)
    );
}

/// The runtimes that have a mark.
fn legend(svg: &mut String, rows: &[Row]) {
    let mut x = 12.0;
    for &(peer, colour) in COLOURS {
        if !rows.iter().flat_map(|row| &row.marks).any(|mark| mark.peer == peer) {
            continue;
        }
        _ = writeln!(
            svg,
            "<circle cx=\"{:.1}\" cy=\"44\" r=\"5\" fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"48\" fill=\"#111111\">{peer}</text>",
            x + 5.0,
            x + 14.0
        );
        x += 30.0 + 7.0 * peer.len() as f64;
    }
    _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"48\" fill=\"#374151\">left is better</text>");
}

fn colour(peer: &str) -> &'static str {
    COLOURS.iter().find(|(name, _)| *name == peer).map_or("#000000", |(_, colour)| colour)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn better_is_left_and_what_is_beyond_the_scale_is_at_its_edge() {
        let mark = |ratio| Row { name: "row".into(), marks: vec![Mark { peer: "trefoil", ratio }] };
        let svg = draw("title", &[mark(0.5), mark(1e-9)]);
        let marks: Vec<f64> = svg
            .lines()
            .filter(|line| line.contains("<title>"))
            .map(|line| line.split('"').nth(1).unwrap().parse().unwrap())
            .collect();
        assert_eq!(marks[1], LABEL);
        assert!(marks[0] > marks[1] && marks[0] < WIDTH - RIGHT);
        assert_eq!(less_is_better(2.0, Goal::RatioAtLeast(1.5)), 0.5);
        let peers = Goal::All(&[Goal::RatioToAtLeast("tokio", 1.0), Goal::RatioAtLeast(2.0)]);
        assert_eq!(less_is_better(2.0, peers), 0.5);
        assert_eq!(less_is_better(2.0, Goal::Report), 2.0);
    }
}
