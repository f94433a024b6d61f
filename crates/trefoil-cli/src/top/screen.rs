//! The screen of `trefoil top`: keys, drawing, and what happens to the terminal at the end.
//!
//! Another thread asks the source, so that keys work while a process does not answer. The terminal
//! is restored at the end, at a panic, and at SIGINT, SIGTERM and SIGHUP: the handler only stores
//! the number of the signal, and the loop ends.

use std::collections::HashMap;
use std::ffi::c_int;
use std::io;
use std::process::ExitCode;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState, Wrap};

use super::Source;
use super::view::{self, Sort, View, age};
use crate::report::grouped;

/// The time from one view to the next, unless a view takes longer than that.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long the loop waits for a key before it looks for answers and signals.
const KEY_WAIT: Duration = Duration::from_millis(50);
/// A group is a suspect after it has grown so many times without shrinking.
const SUSPECT_STEPS: u32 = 4;
const PAGE_LINES: usize = 10;

const KEYS: &str =
    "q quit · Tab part · s sort · / filter · Space freeze · ↑↓ choose · Enter stack · r runtime";

/// The last signal that ends the loop; 0: none.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

extern "C" fn on_signal(signal: c_int) {
    SIGNAL.store(signal, Ordering::Relaxed);
}

/// Not for SIGHUP: then there is no terminal to restore.
fn install_handlers() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: an action made here, with a handler that stores a word.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as *const () as usize;
            action.sa_flags = libc::SA_ONSTACK;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

enum Request {
    View(Option<u64>),
    Stack { runtime: u64, id: u64 },
}

enum Answer {
    View(Result<Box<View>, String>),
    Stack { id: u64, text: String },
}

/// Answers requests until the screen is gone.
fn serve(mut source: Source, requests: &Receiver<Request>, answers: &Sender<Answer>) {
    for request in requests {
        let answer = match request {
            Request::View(runtime) => Answer::View(source.view(runtime).map(Box::new)),
            Request::Stack { runtime, id } => {
                let text = source.stack(runtime, id).unwrap_or_else(|error| error);
                Answer::Stack { id, text }
            }
        };
        if answers.send(answer).is_err() {
            return;
        }
    }
}

/// Restores the terminal when it is dropped.
struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

enum Input {
    None,
    Keys,
    /// The terminal is gone.
    Gone,
}

/// Waits for keys for [`KEY_WAIT`] at most. crossterm must not be asked while there is no input: if
/// the terminal were gone by then, it would read the end of the input for ever.
fn wait_for_keys() -> Input {
    let mut terminal = libc::pollfd { fd: libc::STDOUT_FILENO, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, ours. A signal ends the wait early.
    unsafe { libc::poll(&raw mut terminal, 1, KEY_WAIT.as_millis() as c_int) };
    if terminal.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0 {
        Input::Gone
    } else if terminal.revents != 0 {
        Input::Keys
    } else {
        Input::None
    }
}

/// Shows a source until the user or a signal ends it, or its terminal is gone.
pub(super) fn watch(source: Source, first: View) -> io::Result<ExitCode> {
    install_handlers();
    let (ask, requests) = channel();
    let (tell, answers) = channel();
    std::thread::Builder::new().name("top: source".into()).spawn(move || {
        serve(source, &requests, &tell);
    })?;
    // It also restores the terminal at a panic of any thread.
    let mut terminal = ratatui::try_init()?;
    let _restore = Restore;
    let mut screen = Screen::new(first);
    let mut asked = Instant::now();
    let mut is_asked = false;
    loop {
        match SIGNAL.load(Ordering::Relaxed) {
            0 => {}
            signal => return Ok(ExitCode::from((128 + signal) as u8)),
        }
        loop {
            match answers.try_recv() {
                Ok(Answer::View(view)) => {
                    is_asked = false;
                    // A view that takes long is asked for less often.
                    let pause = INTERVAL.max(asked.elapsed());
                    asked = Instant::now() + pause - INTERVAL;
                    screen.add(view.map(|view| *view));
                }
                Ok(Answer::Stack { id, text }) => screen.show_stack(id, text),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    return Err(io::Error::other("the thread that reads the process has ended"));
                }
            }
        }
        let is_due = asked.elapsed() >= INTERVAL || screen.wants_other_runtime;
        if !is_asked && is_due && !screen.is_frozen {
            (is_asked, asked) = (true, Instant::now());
            screen.wants_other_runtime = false;
            let _ = ask.send(Request::View(screen.runtime));
        }
        terminal.draw(|frame| screen.draw(frame))?;
        match wait_for_keys() {
            Input::None => continue,
            Input::Keys => {}
            // There is nothing to restore, and nowhere to print an error.
            Input::Gone => std::process::exit(128 + libc::SIGHUP),
        }
        // crossterm reads all keys at once, and hands out one at a time.
        while event::poll(Duration::ZERO)? {
            let Event::Key(key) = event::read()? else { continue };
            if key.kind == KeyEventKind::Release {
                continue;
            }
            match screen.on_key(key) {
                Action::None => {}
                Action::End(code) => return Ok(ExitCode::from(code)),
                Action::Stack { runtime, id } => {
                    let _ = ask.send(Request::Stack { runtime, id });
                }
            }
        }
    }
}

#[derive(PartialEq, Eq, Debug)]
enum Action {
    None,
    End(u8),
    Stack { runtime: u64, id: u64 },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    Groups,
    Cpus,
    Waits,
    Ps,
}

impl Part {
    const ALL: [(Part, &str); 4] =
        [(Part::Groups, "Groups"), (Part::Cpus, "CPUs"), (Part::Waits, "Waits"), (Part::Ps, "Ps")];

    fn next(self) -> Part {
        let at = Part::ALL.iter().position(|(part, _)| *part == self).unwrap_or(0);
        Part::ALL[(at + 1) % Part::ALL.len()].0
    }
}

/// How the count of what was started at one place has changed.
struct Growth {
    first: u64,
    last: u64,
    steps: u32,
}

/// What is on the screen.
struct Screen {
    view: View,
    at: Instant,
    before: Option<View>,
    /// From `before` to `view`.
    seconds: f64,
    error: Option<String>,
    part: Part,
    sort: Sort,
    filter: String,
    is_typing: bool,
    is_frozen: bool,
    chosen: usize,
    /// Goroutine, stack, and the first line that is shown.
    detail: Option<(u64, String, u16)>,
    runtime: Option<u64>,
    wants_other_runtime: bool,
    growth: HashMap<(bool, String, String), Growth>,
}

impl Screen {
    fn new(view: View) -> Screen {
        let mut screen = Screen {
            view,
            at: Instant::now(),
            before: None,
            seconds: 1.0,
            error: None,
            part: Part::Groups,
            sort: Sort::Count,
            filter: String::new(),
            is_typing: false,
            is_frozen: false,
            chosen: 0,
            detail: None,
            runtime: None,
            wants_other_runtime: false,
            growth: HashMap::new(),
        };
        screen.grow();
        screen
    }

    /// Takes a new view.
    fn add(&mut self, view: Result<View, String>) {
        let view = match view {
            Ok(view) => view,
            Err(error) => {
                self.error = Some(error);
                return;
            }
        };
        self.error = None;
        self.seconds = self.at.elapsed().as_secs_f64();
        self.at = Instant::now();
        let is_same = self.view.runtime == view.runtime;
        let before = std::mem::replace(&mut self.view, view);
        self.before = is_same.then_some(before);
        if !is_same {
            self.growth.clear();
        }
        self.grow();
    }

    /// Notes which groups grow.
    fn grow(&mut self) {
        let mut counts: HashMap<(bool, String, String), u64> = HashMap::new();
        for group in &self.view.groups {
            let key = (group.is_task, group.function.clone(), group.created_at.clone());
            *counts.entry(key).or_default() += group.count;
        }
        self.growth.retain(|key, _| counts.contains_key(key));
        for (key, count) in counts {
            let new = Growth { first: count, last: count, steps: 0 };
            let growth = self.growth.entry(key).or_insert(new);
            if count < growth.last {
                (growth.first, growth.steps) = (count, 0);
            }
            growth.steps += u32::from(count > growth.last);
            growth.last = count;
        }
    }

    /// Returns a line about the group that grows most.
    fn suspect(&self) -> Option<String> {
        let growing = self.growth.iter().filter(|(_, growth)| growth.steps >= SUSPECT_STEPS);
        let ((_, function, place), growth) =
            growing.max_by_key(|(_, growth)| growth.last - growth.first)?;
        let (first, last) = (grouped(growth.first), grouped(growth.last));
        Some(format!("suspect: only grows: {first} → {last} {function} started at {place}"))
    }

    fn show_stack(&mut self, id: u64, text: String) {
        if let Some((shown, old, _)) = &mut self.detail
            && *shown == id
        {
            *old = text;
        }
    }

    fn on_key(&mut self, key: KeyEvent) -> Action {
        // A terminal sends Esc and a key soon after it as the key with Alt, which means nothing
        // here.
        if key.modifiers.contains(KeyModifiers::ALT) {
            self.on_key(KeyCode::Esc.into());
            return self.on_key(KeyEvent { modifiers: key.modifiers - KeyModifiers::ALT, ..key });
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && key.code == KeyCode::Char('c') {
            return Action::End(130);
        }
        if self.is_typing {
            match key.code {
                KeyCode::Enter => self.is_typing = false,
                KeyCode::Esc => (self.is_typing, self.filter) = (false, String::new()),
                KeyCode::Backspace => _ = self.filter.pop(),
                KeyCode::Char(c) if !control => self.filter.push(c),
                _ => {}
            }
            self.chosen = 0;
            return Action::None;
        }
        if let Some((_, _, top)) = &mut self.detail {
            match key.code {
                KeyCode::Up | KeyCode::Char('k') => *top = top.saturating_sub(1),
                KeyCode::Down | KeyCode::Char('j') => *top = top.saturating_add(1),
                KeyCode::PageUp => *top = top.saturating_sub(PAGE_LINES as u16),
                KeyCode::PageDown => *top = top.saturating_add(PAGE_LINES as u16),
                KeyCode::Esc | KeyCode::Enter | KeyCode::Char('q') => self.detail = None,
                _ => {}
            }
            return Action::None;
        }
        match key.code {
            KeyCode::Char('q') => return Action::End(0),
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Tab => (self.part, self.chosen) = (self.part.next(), 0),
            KeyCode::Char(digit @ '1'..='4') => {
                self.part = Part::ALL[digit as usize - '1' as usize].0;
                self.chosen = 0;
            }
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Char(' ' | 'f') => self.is_frozen = !self.is_frozen,
            KeyCode::Char('r') => self.choose_runtime(),
            KeyCode::Up | KeyCode::Char('k') => self.chosen = self.chosen.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.chosen += 1,
            KeyCode::PageUp => self.chosen = self.chosen.saturating_sub(PAGE_LINES),
            KeyCode::PageDown => self.chosen += PAGE_LINES,
            KeyCode::Home => self.chosen = 0,
            KeyCode::Enter => {
                if let Some(id) = self.chosen_id() {
                    self.detail = Some((id, "…".into(), 0));
                    return Action::Stack { runtime: self.view.runtime, id };
                }
            }
            _ => {}
        }
        self.chosen = self.chosen.min(self.len().saturating_sub(1));
        Action::None
    }

    fn choose_runtime(&mut self) {
        let all = &self.view.runtimes;
        let at = all.iter().position(|&number| number == self.view.runtime).unwrap_or(0);
        if all.len() > 1 {
            self.runtime = Some(all[(at + 1) % all.len()]);
            self.wants_other_runtime = true;
        }
    }

    fn rows(&self) -> Vec<(&view::Group, i64)> {
        view::rows(&self.view, self.before.as_ref(), self.sort, &self.filter)
    }

    /// Returns the number of lines of the part.
    fn len(&self) -> usize {
        match self.part {
            Part::Groups => self.rows().len(),
            Part::Cpus => self.view.users.as_ref().map_or(0, Vec::len),
            Part::Waits => self.wait_lines().len(),
            Part::Ps => self.view.ps.len(),
        }
    }

    /// Returns the goroutine of the chosen line.
    fn chosen_id(&self) -> Option<u64> {
        match self.part {
            Part::Groups => self.rows().get(self.chosen).map(|(group, _)| group.example),
            Part::Cpus => {
                let users = view::users(&self.view, self.before.as_ref(), self.seconds);
                users.get(self.chosen).map(|(user, ..)| user.id)
            }
            Part::Waits | Part::Ps => None,
        }
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let areas = Layout::vertical([
            Constraint::Length(4),
            Constraint::Length(1),
            Constraint::Min(3),
            Constraint::Length(1),
        ]);
        let [head, parts, body, foot] = areas.areas(frame.area());
        frame.render_widget(Paragraph::new(self.head()), head);
        frame.render_widget(Paragraph::new(self.parts()), parts);
        if let Some((id, text, top)) = &self.detail {
            let text = format!("goroutine {id}, Esc goes back\n\n{}", text.replace('\t', "    "));
            let shown = Paragraph::new(text).wrap(Wrap { trim: false }).scroll((*top, 0));
            frame.render_widget(shown, body);
        } else {
            self.draw_part(frame, body);
        }
        let foot_text = match self.is_typing {
            true => format!("filter: {}▏ Enter keeps it, Esc clears it", self.filter),
            false => KEYS.to_owned(),
        };
        frame.render_widget(Paragraph::new(foot_text).style(soft()), foot);
    }

    /// Returns four lines: what it is, numbers, latencies, and what is wrong.
    fn head(&self) -> Vec<Line<'static>> {
        let mut title = format!("trefoil top · {}", self.view.title());
        if self.is_frozen {
            title.push_str(" · FROZEN");
        }
        let warning = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
        let deadlock = self.view.deadlocks.iter().flatten().next();
        let deadlock =
            deadlock.and_then(|text| text.lines().next()).map(|line| format!("{line} (3: Waits)"));
        let wrong = self.error.clone().or(deadlock).or_else(|| self.suspect());
        vec![
            Line::styled(title, Style::new().add_modifier(Modifier::BOLD)),
            Line::raw(self.view.numbers()),
            Line::styled(self.view.latency_text(), soft()),
            Line::styled(wrong.unwrap_or_default(), warning),
        ]
    }

    fn parts(&self) -> Line<'static> {
        let names = Part::ALL.iter().enumerate().map(|(i, (part, name))| {
            let name = format!(" {} {name} ", i + 1);
            match *part == self.part {
                true => {
                    ratatui::text::Span::styled(name, Style::new().add_modifier(Modifier::REVERSED))
                }
                false => ratatui::text::Span::raw(name),
            }
        });
        let mut line: Vec<_> = names.collect();
        let filter = if self.filter.is_empty() {
            String::new()
        } else {
            format!(" · filter: {}", self.filter)
        };
        line.push(format!("  sorted by {}{filter}", self.sort.name()).into());
        Line::from(line)
    }

    fn draw_part(&mut self, frame: &mut Frame<'_>, area: Rect) {
        let number = |n: Option<u64>| n.map_or_else(|| "–".to_owned(), grouped);
        let right = |text: String| Cell::from(Line::raw(text).right_aligned());
        let (heads, widths, rows): (&[&str], Vec<Constraint>, Vec<Row<'static>>) = match self.part {
            Part::Groups => {
                let time = |ms: Option<u64>| ms.map_or_else(|| "–".to_owned(), age);
                let rows = self.rows().into_iter().map(|(group, change)| {
                    let change = if change == 0 { String::new() } else { format!("{change:+}") };
                    let task = if group.is_task { "task " } else { "" };
                    let waits_at = if group.waits_at.is_empty() { "–" } else { &group.waits_at };
                    Row::new([
                        right(grouped(group.count)),
                        right(change),
                        Cell::from(group.state.clone()),
                        right(time(group.oldest_ms)),
                        right(time(group.mean_ms)),
                        Cell::from(waits_at.to_owned()),
                        Cell::from(format!("{task}{} {}", group.created_at, group.function)),
                    ])
                });
                let widths = [9, 7, 18, 9, 9].map(Constraint::Length);
                let widths = [&widths[..], &[Constraint::Fill(1), Constraint::Fill(1)]].concat();
                let heads =
                    &["COUNT", "CHANGE", "STATE", "OLDEST", "MEAN", "WAITS AT", "STARTED AT"];
                (heads, widths, rows.collect())
            }
            Part::Cpus => {
                if self.view.users.is_none() {
                    return self.unknown(frame, area, "who uses the CPUs");
                }
                let users = view::users(&self.view, self.before.as_ref(), self.seconds);
                let rows = users.into_iter().map(|(user, runs, waits)| {
                    let ended = format!("{}, which has ended", user.id);
                    Row::new([
                        right(format!("{runs:.1} %")),
                        right(format!("{waits:.1} %")),
                        right(age(user.running_us / 1000)),
                        right(age(user.runnable_us / 1000)),
                        Cell::from(user.who.unwrap_or(ended)),
                        Cell::from(user.what),
                    ])
                });
                let widths = [9, 9, 10, 10].map(Constraint::Length);
                let widths = [&widths[..], &[Constraint::Fill(1), Constraint::Fill(2)]].concat();
                (
                    &["RUNS", "IN QUEUE", "RAN", "QUEUED", "WHICH", "FUNCTION"],
                    widths,
                    rows.collect(),
                )
            }
            Part::Waits => {
                if self.view.waits.is_none() {
                    return self.unknown(frame, area, "who waits for whom");
                }
                let rows = self.wait_lines().into_iter().map(|line| Row::new([Cell::from(line)]));
                (&["WHO WAITS FOR WHOM"], vec![Constraint::Fill(1)], rows.collect())
            }
            Part::Ps => {
                let old = |id: u64| {
                    let before = self.before.as_ref()?;
                    before.ps.iter().find(|p| p.id == id)?.slices
                };
                let rows = self.view.ps.iter().map(|p| {
                    let rate = p.slices.zip(old(p.id)).map(|(now, old)| {
                        (now.saturating_sub(old) as f64 / self.seconds.max(0.001)) as u64
                    });
                    Row::new([
                        right(p.id.to_string()),
                        Cell::from(p.status.clone()),
                        right(number(p.m)),
                        right(p.thread.map_or_else(|| "–".to_owned(), |tid| tid.to_string())),
                        right(number(p.queue)),
                        right(number(rate)),
                        Cell::from(p.runs.clone().unwrap_or_default()),
                    ])
                });
                let widths = [4, 9, 5, 10, 7, 12].map(Constraint::Length);
                let widths = [&widths[..], &[Constraint::Fill(1)]].concat();
                (
                    &["P", "STATUS", "M", "THREAD", "QUEUE", "SLICES/S", "RUNS"],
                    widths,
                    rows.collect(),
                )
            }
        };
        let heads = Row::new(heads.iter().map(|head| Cell::from((*head).to_owned()))).style(soft());
        let mut state = TableState::new().with_selected((!rows.is_empty()).then_some(self.chosen));
        let chosen = Style::new().add_modifier(Modifier::REVERSED);
        let table = Table::new(rows, widths).header(heads).row_highlight_style(chosen);
        frame.render_stateful_widget(table, area, &mut state);
    }

    fn unknown(&self, frame: &mut Frame<'_>, area: Rect, what: &str) {
        let text = format!(
            "Only the process itself knows {what}: start it with TREFOIL_OBSERVE=unix, and link trefoil-observe."
        );
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), area);
    }

    /// Returns the deadlocks, then all waits.
    fn wait_lines(&self) -> Vec<String> {
        let deadlocks = self.view.deadlocks.iter().flatten();
        let mut lines: Vec<String> =
            deadlocks.flat_map(|text| text.lines().chain([""])).map(str::to_owned).collect();
        let waits = self.view.waits.as_deref().unwrap_or_default();
        lines.extend_from_slice(waits);
        let more = self.view.waits_total.saturating_sub(waits.len() as u64);
        if more > 0 {
            lines.push(format!("… and {} more", grouped(more)));
        }
        if lines.is_empty() {
            lines.push("no goroutine waits for another one that is known".into());
        }
        lines
    }
}

fn soft() -> Style {
    Style::new().add_modifier(Modifier::DIM)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::view::{Group, P, User};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn view(count: u64) -> View {
        let group = |count, state: &str, place: &str| Group {
            count,
            state: state.into(),
            created_at: place.into(),
            function: "program::start".into(),
            oldest_ms: Some(1500),
            example: count,
            ..Group::default()
        };
        let p = |id| P {
            id,
            status: "running".into(),
            m: Some(id),
            thread: Some(1234),
            queue: Some(1),
            slices: Some(100),
            runs: None,
        };
        View {
            program: "program".into(),
            pid: 42,
            source: "a test".into(),
            runtime: 1,
            runtimes: vec![1, 2],
            goroutines: count,
            ps: vec![p(0), p(1)],
            groups: vec![group(count, "chan receive", "a.rs:1"), group(7, "sleep", "b.rs:2")],
            groups_total: 2,
            users: Some(vec![User {
                id: 9,
                who: Some("goroutine 9 \"busy\"".into()),
                what: "program::spin".into(),
                running_us: 500_000,
                runnable_us: 0,
            }]),
            waits: Some(vec!["goroutine 3 waits for Mutex 0x10 held by goroutine 4".into()]),
            deadlocks: Some(Vec::new()),
            ..View::default()
        }
    }

    fn shown(screen: &mut Screen) -> String {
        let mut terminal = Terminal::new(TestBackend::new(120, 20)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let lines = buffer.content.chunks(120);
        lines.map(|line| line.iter().map(|cell| cell.symbol()).collect::<String>() + "\n").collect()
    }

    fn press(screen: &mut Screen, code: KeyCode) -> Action {
        screen.on_key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn every_part_is_drawn() {
        let mut screen = Screen::new(view(1000));
        screen.add(Ok(view(1003)));
        let text = shown(&mut screen);
        for words in [
            "program · process 42",
            "goroutines 1,003",
            "1,003",
            "+3",
            "chan receive",
            "1.5 s",
            "a.rs:1",
        ] {
            assert!(text.contains(words), "{words:?} is missing:\n{text}");
        }
        for (key, words) in
            [('2', "goroutine 9 \"busy\""), ('3', "held by goroutine 4"), ('4', "1234")]
        {
            press(&mut screen, KeyCode::Char(key));
            let text = shown(&mut screen);
            assert!(text.contains(words), "{words:?} is missing:\n{text}");
        }
        let outside = View { users: None, waits: None, deadlocks: None, ..view(1) };
        screen.add(Ok(outside));
        for key in ['2', '3'] {
            press(&mut screen, KeyCode::Char(key));
            assert!(shown(&mut screen).contains("Only the process itself knows"));
        }
    }

    #[test]
    fn keys_sort_filter_freeze_and_choose() {
        let mut screen = Screen::new(view(1000));
        assert_eq!(press(&mut screen, KeyCode::Enter), Action::Stack { runtime: 1, id: 1000 });
        screen.show_stack(1000, "main::wait\n\tmain.rs:7\n".into());
        assert!(shown(&mut screen).contains("main::wait"));
        assert_eq!(press(&mut screen, KeyCode::Char('q')), Action::None, "leaves the stack");
        press(&mut screen, KeyCode::Enter);
        screen.on_key(KeyEvent::new(KeyCode::Char('4'), KeyModifiers::ALT));
        assert!(screen.detail.is_none() && screen.part == Part::Ps, "Esc and 4");
        press(&mut screen, KeyCode::Char('1'));
        for key in "/sleep".chars() {
            press(&mut screen, KeyCode::Char(key));
        }
        press(&mut screen, KeyCode::Enter);
        let text = shown(&mut screen);
        assert!(text.contains("b.rs:2") && !text.contains("a.rs:1"), "{text}");
        press(&mut screen, KeyCode::Down);
        assert_eq!(press(&mut screen, KeyCode::Enter), Action::Stack { runtime: 1, id: 7 });
        press(&mut screen, KeyCode::Esc);
        press(&mut screen, KeyCode::Esc);
        assert!(shown(&mut screen).contains("a.rs:1"), "Esc clears the filter");
        press(&mut screen, KeyCode::Char('s'));
        assert!(shown(&mut screen).contains("sorted by change"));
        press(&mut screen, KeyCode::Char(' '));
        assert!(screen.is_frozen && shown(&mut screen).contains("FROZEN"));
        press(&mut screen, KeyCode::Char('r'));
        assert_eq!((screen.runtime, screen.wants_other_runtime), (Some(2), true));
        assert_eq!(press(&mut screen, KeyCode::Char('q')), Action::End(0));
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(screen.on_key(control_c), Action::End(130));
    }

    #[test]
    fn a_group_that_only_grows_and_errors_and_deadlocks_are_told() {
        let mut screen = Screen::new(view(1));
        for count in 2..6 {
            assert!(!shown(&mut screen).contains("suspect"));
            screen.add(Ok(view(count)));
        }
        assert!(
            shown(&mut screen).contains("only grows: 1 → 5 program::start"),
            "{}",
            shown(&mut screen)
        );
        screen.add(Ok(view(4)));
        assert!(!shown(&mut screen).contains("suspect"), "it has shrunk");
        let deadlock =
            Some(vec!["deadlock (certain): 2 goroutines wait\n  goroutine 5 …\n".into()]);
        screen.add(Ok(View { deadlocks: deadlock, ..view(4) }));
        assert!(shown(&mut screen).contains("deadlock (certain): 2 goroutines wait (3: Waits)"));
        screen.add(Err("process 42 has ended".into()));
        assert!(shown(&mut screen).contains("process 42 has ended"));
    }

    #[test]
    fn a_small_terminal_is_no_error() {
        let mut screen = Screen::new(view(1000));
        for (width, height) in [(1, 1), (10, 3), (30, 6)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            for (part, _) in Part::ALL {
                screen.part = part;
                terminal.draw(|frame| screen.draw(frame)).unwrap();
            }
        }
    }
}
