//! For `trefoil top`: a process that has no server, read from outside again and again.

use std::collections::HashMap;
use std::path::Path;

use super::files::LoadedFiles;
use super::goroutines::{self, Goroutine, Kind, Runtime};
use super::layout::Layout;
use super::memory::{Mapping, Process};
use super::show;
use super::stacks::Unwinder;
use crate::top::view::{Group, P, View};

/// What is kept from view to view of a process: its files and their symbols.
pub(crate) struct Outside {
    pid: u32,
    program: String,
    process: Process,
    loaded: LoadedFiles,
    layouts: Vec<Layout>,
    unwinder: Unwinder,
}

impl Outside {
    pub(crate) fn open(pid: u32) -> Result<Outside, String> {
        let process = Process::open(&pid.to_string())?;
        let loaded = LoadedFiles::read(&process);
        let layouts = Layout::find_all(&process, &loaded).map_err(|e| format!("{pid}: {e}"))?;
        let unwinder = Unwinder::new(process.cpu, &loaded);
        let exe = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        let program = exe.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Outside { pid, program, process, loaded, layouts, unwinder })
    }

    /// Reads the files that the process has loaded or unloaded since the last view.
    fn update(&mut self) -> Result<(), String> {
        let process = Process::open(&self.pid.to_string())?;
        if code(&process).eq(code(&self.process)) {
            return Ok(());
        }
        self.loaded.update(&process);
        self.layouts =
            Layout::find_all(&process, &self.loaded).map_err(|e| format!("{}: {e}", self.pid))?;
        self.unwinder.update(&self.loaded);
        self.process = process;
        Ok(())
    }

    fn runtimes(&mut self) -> Result<Vec<Runtime>, String> {
        if !Path::new(&format!("/proc/{}", self.pid)).exists() {
            return Err(format!("process {} has ended", self.pid));
        }
        self.update()?;
        let read = goroutines::read(&self.process, &self.layouts, &mut self.unwinder);
        let runtimes = read.map_err(|e| format!("{}: {e}", self.pid))?;
        match runtimes.is_empty() {
            true => Err(format!("{}: it uses trefoil, but no runtime has started", self.pid)),
            false => Ok(runtimes),
        }
    }

    /// Returns the runtime with this number, or the first one.
    pub(crate) fn view(&mut self, number: Option<u64>) -> Result<View, String> {
        let runtimes = self.runtimes()?;
        let numbers = runtimes.iter().map(|runtime| runtime.id).collect();
        let chosen = runtimes.iter().find(|runtime| Some(runtime.id) == number);
        let runtime = chosen.or(runtimes.first()).ok_or("no runtime has started")?;
        let count = |is: &dyn Fn(&Goroutine) -> bool| {
            runtime.goroutines.iter().filter(|g| is(g)).count() as u64
        };
        let groups = self.groups(runtime);
        Ok(View {
            program: self.program.clone(),
            pid: self.pid.into(),
            source: "read from outside".into(),
            runtime: runtime.id,
            runtimes: numbers,
            goroutines: count(&|g| g.kind == Kind::Goroutine),
            tasks: count(&|g| g.kind == Kind::Task),
            runnable: count(&|g| g.state == "runnable"),
            threads: runtime.ms.len() as u64,
            ps: ps(runtime),
            groups_total: groups.len(),
            groups,
            ..View::default()
        })
    }

    fn groups(&mut self, runtime: &Runtime) -> Vec<Group> {
        let mut groups: Vec<(Group, u64)> = Vec::new();
        let mut index: HashMap<(bool, String, String, String), usize> = HashMap::new();
        for g in &runtime.goroutines {
            let row = show::row(g, &mut self.unwinder);
            let is_task = g.kind == Kind::Task;
            let waits_at = if g.is_waiting { row.at } else { String::new() };
            let key = (is_task, row.state.clone(), waits_at.clone(), row.created_at.clone());
            let i = *index.entry(key).or_insert_with(|| {
                let group = Group {
                    is_task,
                    count: 0,
                    state: row.state,
                    function: g.function.clone().unwrap_or_default(),
                    created_at: row.created_at,
                    waits_at,
                    oldest_ms: None,
                    mean_ms: None,
                    example: g.id,
                };
                groups.push((group, 0));
                groups.len() - 1
            });
            let (group, sum) = &mut groups[i];
            group.count += 1;
            *sum += g.waited_ms.unwrap_or(0);
            if g.waited_ms > group.oldest_ms {
                (group.oldest_ms, group.example) = (g.waited_ms, g.id);
            }
        }
        let mean = |(mut group, sum): (Group, u64)| {
            group.mean_ms = group.oldest_ms.map(|_| sum / group.count.max(1));
            group
        };
        groups.into_iter().map(mean).collect()
    }

    /// Returns a goroutine with its stack, in the form of dumps.
    pub(crate) fn stack(&mut self, number: u64, id: u64) -> Result<String, String> {
        let runtimes = self.runtimes()?;
        let runtime = runtimes.iter().find(|runtime| runtime.id == number);
        let g = runtime.and_then(|runtime| runtime.goroutines.iter().find(|g| g.id == id));
        let g = g.ok_or("it has ended")?;
        let mut text = String::new();
        let holders = show::Holders::new(&runtimes);
        let _ = show::write_goroutine(&mut text, &mut self.unwinder, g, &holders);
        Ok(text)
    }
}

/// Returns the mappings that change when a library is loaded or unloaded.
fn code(process: &Process) -> impl Iterator<Item = &Mapping> {
    process.mappings.iter().filter(|mapping| mapping.is_executable)
}

fn ps(runtime: &Runtime) -> Vec<P> {
    let p = |p: &goroutines::P| {
        let m = runtime.ms.iter().find(|m| Some(m.id) == p.m);
        let g = m.and_then(|m| runtime.goroutines.iter().find(|g| m.runs(g)));
        P {
            id: p.id.into(),
            status: p.status.into(),
            m: p.m.map(u64::from),
            thread: m.map(|m| m.thread.tid.into()),
            queue: None,
            slices: None,
            runs: g.map(show::title),
        }
    };
    runtime.ps.iter().map(p).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_loaded_later_has_names() {
        let _runtime = trefoil::Runtime::builder().procs(1).build().unwrap();
        let mut outside = Outside::open(std::process::id()).unwrap();
        outside.view(None).unwrap();
        // SAFETY: the names end with a zero; the library runs no code that needs more.
        let (library, function) = unsafe {
            let library = libc::dlopen(c"libresolv.so.2".as_ptr(), libc::RTLD_NOW);
            (library, libc::dlsym(library, c"ns_parse_ttl".as_ptr()).addr() as u64)
        };
        assert!(!library.is_null() && function != 0);
        outside.view(None).unwrap();
        let name = |outside: &mut Outside| outside.unwinder.frames(&[function])[0].name.clone();
        assert!(name(&mut outside).contains("ns_parse_ttl"), "{}", name(&mut outside));
        // SAFETY: nothing uses the library.
        assert_eq!(unsafe { libc::dlclose(library) }, 0);
        outside.view(None).unwrap();
        assert!(!name(&mut outside).contains("ns_parse_ttl"), "{}", name(&mut outside));
    }
}
