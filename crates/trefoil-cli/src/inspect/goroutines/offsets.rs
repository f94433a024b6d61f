//! Where a process has the fields of its Gs, tasks, Ms and Ps: the numbers of its table.
//!
//! The table is the process's own ([`Layout`]), so a command reads programs that were built with
//! another version of trefoil or of rustc. A core file may be damaged: [`Offsets::check`] makes
//! sure that a field is inside the bytes that are read of its object.

use super::waits::WaitOffsets;
use crate::inspect::layout::Layout;
use crate::inspect::memory::{Process, u32_at, u64_at};
use trefoil_base::symbols::Cpu;

/// The largest sizes of a G or a task without its contents, and of a slab or chunk.
const SUBJECT_BYTES_MAX: u64 = 1 << 16;
const SLAB_BYTES_MAX: u64 = 64 << 20;

/// Offsets and numbers from the table.
macro_rules! offsets {
    ($($field:ident = $name:literal,)+) => {
        pub(super) struct Offsets {
            /// Of the frame pointer and the program counter that a switch saves.
            pub(super) saved_fp: u64,
            pub(super) saved_pc: u64,
            /// Of rbx; None on aarch64.
            pub(super) saved_rbx: Option<u64>,
            /// Of the saved registers in the trampoline's frame; None on x86_64, which needs none.
            pub(super) trampoline_registers: Option<u64>,
            /// None if the program is too old to say what its goroutines wait for.
            pub(super) waits: Option<WaitOffsets>,
            $(pub(super) $field: u64,)+
        }
        impl Offsets {
            pub(super) fn new(cpu: Cpu, layout: &Layout) -> Result<Offsets, String> {
                let (fp, pc) = match cpu {
                    Cpu::X86_64 => ("saved.rbp", "saved.rip"),
                    Cpu::Aarch64 => ("saved.x29", "saved.x30"),
                };
                let (saved_fp, saved_pc) = (layout.get(fp)?, layout.get(pc)?);
                let trampoline_registers = layout.get("trampoline.registers").ok();
                let offsets = Offsets {
                    saved_fp,
                    saved_pc,
                    saved_rbx: layout.get("saved.rbx").ok(),
                    trampoline_registers,
                    waits: WaitOffsets::new(layout),
                    $($field: layout.get($name)?,)+
                };
                offsets.check()?;
                Ok(offsets)
            }
        }
    };
}

offsets! {
    slabs = "slabs",
    slab_gs = "slab.gs",
    slab_next = "slab.next",
    slab_count = "slab.count",
    g_size = "g.size",
    g_head = "g.head",
    g_sp = "g.sp",
    g_tp = "g.tp",
    g_state = "g.state",
    g_stopped = "g.stopped_by_signal",
    g_stack = "g.stack",
    g_sched = "g.sched",
    g_body = "g.body",
    g_task = "g.task",
    g_id = "g.id",
    g_parent = "g.parent",
    g_created_at = "g.created_at",
    g_name = "g.name",
    body_type_name = "body.type_name",
    head_since = "head.since_ms",
    head_reason = "head.reason",
    head_kind = "head.kind",
    kind_carrier = "kind.carrier",
    state_dead = "state.dead",
    state_runnable = "state.runnable",
    state_waiting = "state.waiting",
    chunks = "chunks",
    chunk_next = "chunk.next",
    chunk_block_bytes = "chunk.block_bytes",
    chunk_first_block = "chunk.first_block",
    chunk_bytes = "chunk.bytes",
    task_head = "task.head",
    task_state = "task.state",
    task_body = "task.body",
    task_sched = "task.sched",
    task_id = "task.id",
    task_origin = "task.origin",
    labels_created_at = "labels.created_at",
    task_contents = "task.contents",
    task_scheduled = "task_state.scheduled",
    task_running = "task_state.running",
    task_alive = "task_state.alive",
    task_type_name = "task_body.type_name",
    task_boxed = "task_body.boxed",
    task_name_at = "task_body.name_at",
    ms = "ms",
    m_next = "m.next",
    m_id = "m.id",
    m_tid = "m.tid",
    m_p = "m.p",
    m_hold = "m.hold",
    m_current = "m.current",
    m_sched = "m.sched",
    hold_retaken = "hold.retaken",
    p_id = "p.id",
    p_status = "p.status",
    p_holder = "p.holder",
    p_idle = "p_status.idle",
    p_running = "p_status.running",
    sched_id = "sched.id",
    sched_ps = "sched.ps",
    sched_ps_made = "sched.ps_made",
    sched_started_at = "sched.started_at",
    sched_coarse_ms = "sched.coarse_ms",
    stack_base = "stack_top.base",
    stack_sp_below = "stack_top.sp_below",
    guard_bytes = "stack.guard_bytes",
    saved_bytes = "saved.bytes",
    entry_stub = "entry_stub",
    trampoline = "trampoline",
    trampoline_end = "trampoline_end",
}

impl Offsets {
    /// Fails if a field is not inside the bytes that are read of its G, task or chunk, or if these
    /// are too many.
    fn check(&self) -> Result<(), String> {
        let fits = |end: u64, fields: &[(u64, u64)]| {
            fields.iter().all(|(at, bytes)| at.checked_add(*bytes).is_some_and(|at| at <= end))
        };
        let head = |at: u64| {
            let field = |offset: u64| at.saturating_add(offset);
            [(field(self.head_since), 4), (field(self.head_reason), 1), (field(self.head_kind), 1)]
        };
        let words = |fields: &[u64]| fields.iter().map(|&at| (at, 8)).collect::<Vec<_>>();
        let g_words = words(&[
            self.g_sp,
            self.g_tp,
            self.g_stack,
            self.g_sched,
            self.g_body,
            self.g_task,
            self.g_id,
            self.g_parent,
            self.g_created_at,
        ]);
        let task_words = words(&[
            self.task_state,
            self.task_body,
            self.task_sched,
            self.task_id,
            self.task_origin,
        ]);
        let (g, task, chunk) = (self.g_size, self.task_contents, self.chunk_bytes);
        let slab = g.checked_mul(self.slab_count);
        let is_whole = (64..=SUBJECT_BYTES_MAX).contains(&g)
            && slab.is_some_and(|bytes| (1..=SLAB_BYTES_MAX).contains(&bytes))
            && fits(g, &g_words)
            && fits(g, &[(self.g_state, 4), (self.g_stopped, 1), (self.g_name, 16)])
            && fits(g, &head(self.g_head))
            && self.waits.as_ref().is_none_or(|at| fits(g, &words(&at.g_words())))
            && (1..=SUBJECT_BYTES_MAX).contains(&task)
            && fits(task, &task_words)
            && fits(task, &head(self.task_head))
            && chunk <= SLAB_BYTES_MAX
            && fits(chunk, &words(&[self.chunk_block_bytes, self.chunk_next]));
        if is_whole { Ok(()) } else { Err("the table of trefoil is damaged".to_owned()) }
    }
}

/// Where a `std::panic::Location` has its fields.
pub(super) struct LocationLayout {
    pub(super) file: u64,
    pub(super) line: u64,
}

impl LocationLayout {
    /// The size of a `Location`.
    const BYTES: usize = 24;

    /// Finds the fields by their values in an example, because std does not say where they are.
    pub(super) fn find(process: &Process, layout: &Layout) -> Result<LocationLayout, String> {
        let unknown = || "the places of goroutines have an unknown form".to_owned();
        let sample = layout.get("location.sample")?;
        let (line, column) =
            (layout.get("location.sample_line")?, layout.get("location.sample_column")?);
        let sample = process.u64(sample).map_err(|_| unknown())?;
        let mut bytes = [0; LocationLayout::BYTES];
        process.read(sample, &mut bytes).map_err(|_| unknown())?;
        let find = |value: u64| {
            (0..LocationLayout::BYTES).step_by(4).find(|&at| u64::from(u32_at(&bytes, at)) == value)
        };
        let line = find(line).filter(|_| find(column).is_some()).ok_or_else(unknown)?;
        let is_file = |&at: &usize| {
            let text = process.text(u64_at(&bytes, at), u64_at(&bytes, at + 8));
            text.is_some_and(|text| text.ends_with(".rs"))
        };
        let file = (0..=8).step_by(8).find(is_file).ok_or_else(unknown)?;
        Ok(LocationLayout { file: file as u64, line: line as u64 })
    }
}
