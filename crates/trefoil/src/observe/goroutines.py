# gdb commands for goroutines. The compiler embeds this file into programs that use trefoil; gdb
# loads it by itself if `auto-load safe-path` covers the program. `source goroutines.py` loads it too.
#
#   info goroutines [-state TEXT] [-at TEXT] [-all] [-top N]
#   goroutine ID COMMAND      e.g. goroutine 7 bt
#   goroutine all COMMAND
#
# It works on live processes and on core files, and changes neither memory nor registers: while a
# goroutine is chosen, an unwinder tells gdb that the innermost frame of the current thread was called
# by the frame in which the goroutine is suspended. So the frames of a goroutine begin with number 1 or
# higher.
import re
import struct

import gdb
import gdb.unwinder


class Goroutines:
    """Reads the goroutines of the program by the table `trefoil_layout`."""

    MAGIC = b"trefoil\0layout\0\x01"
    LIST_MAX = 1 << 20
    # By gdb's name of the program counter: its name in the table, gdb's name of the stack pointer,
    # and what else a switch saves.
    REGISTERS = {
        "rip": ("rip", "rsp", ["rbp", "rbx", "r12", "r13", "r14", "r15"]),
        "pc": ("x30", "sp", ["x%d" % number for number in range(19, 30)]),
    }

    def __init__(self):
        self.inferior = gdb.selected_inferior()
        try:
            # In the program's own language a cast would be written in another way.
            find = "with language c -- output/x (unsigned long)&trefoil_layout"
            # A warning may follow the number.
            address = int(re.match("0x[0-9a-f]+", gdb.execute(find, False, True)).group(), 16)
        except gdb.error:
            raise gdb.GdbError("The program does not use trefoil, or has no symbols.")
        try:
            header = self.read(address, 24)
        except gdb.MemoryError:
            raise gdb.GdbError("The program has not started.")
        if header[:16] != self.MAGIC:
            raise gdb.GdbError("The program's trefoil has a table of another version.")
        count = int.from_bytes(header[20:24], "little")
        table = self.read(address + 24, 40 * count)
        self.at = {}
        for i in range(count):
            row = table[40 * i : 40 * i + 40]
            name = row[:32].split(b"\0")[0].decode()
            self.at[name] = int.from_bytes(row[32:], "little")
        self.pc = "rip" if "saved.rip" in self.at else "pc"
        self.saved_pc, self.sp, self.saved = self.REGISTERS[self.pc]
        reasons = self.u64(self.at["reasons"])
        self.reasons = [self.string(reasons + 16 * i) for i in range(self.at["reasons.count"])]
        self.locations, self.wheres = {}, {}
        self.location = self.location_layout()
        self.clocks = {}
        self.current = {}
        for m in self.list(self.at["ms"], self.at["m.next"]):
            tid = self.u32(m + self.at["m.tid"])
            if tid:
                self.current[self.u64(m + self.at["m.current"])] = tid

    def read(self, address, size):
        return self.inferior.read_memory(address, size).tobytes()

    def u64(self, address):
        return int.from_bytes(self.read(address, 8), "little")

    def u32(self, address):
        return int.from_bytes(self.read(address, 4), "little")

    def string(self, address):
        """Reads the text that the `&str` or `Box<str>` at this address refers to."""
        start, size = self.u64(address), self.u64(address + 8)
        if start == 0 or size > 4096:
            return ""
        return self.read(start, size).decode("utf-8", "replace")

    def list(self, head, link):
        """The addresses of a list; a damaged one ends."""
        address, count = self.u64(head), 0
        while address and count < self.LIST_MAX:
            yield address
            address, count = self.u64(address + link), count + 1

    def location_layout(self):
        """Where a `Location` has its file and its line, found by an example with known values."""
        sample = self.u64(self.at["location.sample"])
        words = [self.u32(sample + at) for at in range(0, 24, 4)]
        line = 4 * words.index(self.at["location.sample_line"])
        for file in (0, 8):
            try:
                if self.string(sample + file).endswith(".rs"):
                    return file, line
            except gdb.MemoryError:
                pass
        raise gdb.GdbError("The places of goroutines have an unknown form.")

    def place(self, address):
        if address not in self.locations:
            try:
                file, line = self.location
                text = "%s:%d" % (self.string(address + file), self.u32(address + line))
            except gdb.MemoryError:
                text = "?"
            self.locations[address] = text
        return self.locations[address]

    def task_place(self, task):
        """Where a task was spawned. Bit 0 of its word says that its labels are between."""
        origin = self.u64(task + self.at["task.origin"])
        if origin & 1:
            origin = self.u64((origin & ~1) + self.at["labels.created_at"])
        return self.place(origin)

    def goroutines(self):
        """All goroutines, by id. A carrier, which polls tasks, is among them if it has a task."""
        at, found = self.at, []
        size, count = at["g.size"], at["slab.count"]
        for slab in self.list(at["slabs"], at["slab.next"]):
            gs = self.read(slab + at["slab.gs"], size * count)
            for i in range(count):
                g = Goroutine(self, slab + at["slab.gs"] + i * size, gs[i * size : (i + 1) * size])
                if g.state != at["state.dead"] and (g.task or not g.is_carrier):
                    found.append(g)
        return sorted(found, key=lambda g: (g.sched, g.id))

    def tasks(self):
        """The tasks that no carrier polls: state, place, name of each."""
        at, found = self.at, []
        for chunk in self.list(at["chunks"], at["chunk.next"]):
            block = self.u64(chunk + at["chunk.block_bytes"])
            for offset in range(at["chunk.first_block"], at["chunk.bytes"] - block + 1, block):
                task = chunk + offset
                state = self.u64(task + at["task.state"])
                if state & at["task_state.alive"] and not state & at["task_state.running"]:
                    found.append(Task(self, task, state))
        return found

    def now_ms(self, sched):
        """The coarse clock of a runtime: when it was refreshed last."""
        if sched not in self.clocks:
            self.clocks[sched] = self.u32(sched + self.at["sched.coarse_ms"])
        return self.clocks[sched]


class Task:
    def __init__(self, all, address, state):
        at = all.at
        self.id = all.u64(address + at["task.id"])
        self.title = "task %d" % self.id
        reason = all.read(address + at["task.head"] + at["head.reason"], 1)[0]
        scheduled = state & at["task_state.scheduled"]
        self.state_text = "runnable" if scheduled else all.reasons[reason % len(all.reasons)]
        self.place = all.task_place(address)

    def where(self):
        return "-"


class Goroutine:
    def __init__(self, all, address, memory):
        self.all, self.address, self.memory, at = all, address, memory, all.at
        self.state = self.word("g.state", 4)
        self.id = self.word("g.id")
        self.sched = self.word("g.sched")
        self.sp = self.word("g.sp")
        self.task = self.word("g.task")
        self.is_carrier = memory[at["g.head"] + at["head.kind"]] == at["kind.carrier"]
        self.tid = None
        if self.state not in (at["state.waiting"], at["state.runnable"], at["state.dead"]):
            self.tid = all.current.get(address)

    def word(self, name, size=8):
        offset = self.all.at[name]
        return int.from_bytes(self.memory[offset : offset + size], "little")

    @property
    def title(self):
        if self.is_carrier:
            return "task %d, polled by goroutine %d" % (self.task_id(), self.id)
        name = self.all.string(self.address + self.all.at["g.name"])
        return "goroutine %d%s" % (self.id, ' "%s"' % name if name else "")

    def task_id(self):
        """The id of the task that it polls, or None."""
        return self.all.u64(self.task + self.all.at["task.id"]) if self.is_carrier else None

    @property
    def place(self):
        if self.is_carrier:
            return self.all.task_place(self.task)
        return self.all.place(self.word("g.created_at"))

    @property
    def state_text(self):
        at = self.all.at
        if self.state == at["state.waiting"]:
            reason = self.memory[at["g.head"] + at["head.reason"]]
            return self.all.reasons[reason % len(self.all.reasons)]
        if self.state == at["state.runnable"]:
            stopped = self.memory[at["g.stopped_by_signal"]]
            return "runnable, preempted" if stopped else "runnable"
        return "running on thread %d" % self.tid if self.tid else "running"

    def waited_ms(self):
        """How long it has waited, or None. The clock is the runtime's coarse one."""
        at = self.all.at
        if self.state != at["state.waiting"]:
            return None
        since = self.all.u32(self.address + at["g.head"] + at["head.since_ms"])
        waited = (self.all.now_ms(self.sched) - since) & 0xFFFFFFFF
        return 0 if waited > 0x7FFFFFFF else waited

    def registers(self):
        """The saved registers of a goroutine that is suspended, or None."""
        at = self.all.at
        if self.state not in (at["state.waiting"], at["state.runnable"]):
            return None
        if self.word("g.tp") == 0:
            return None
        saved = {name: self.all.u64(self.sp + at["saved." + name]) for name in self.all.saved}
        pc = self.all.u64(self.sp + at["saved." + self.all.saved_pc])
        if pc == at["entry_stub"]:
            return None
        return Registers(self.all.pc, pc, self.all.sp, self.sp + at["saved.bytes"], saved)

    def run(self, action):
        """Calls `action` while gdb shows the frames of this goroutine. Returns its result, or a text
        that says why there are no frames."""
        before_thread, before_frame = gdb.selected_thread(), gdb.selected_frame()
        if self.tid:
            threads = [t for t in self.all.inferior.threads() if t.ptid[1] == self.tid]
            if not threads:
                return "its thread %d is unknown to gdb" % self.tid
            try:
                threads[0].switch()
                return action()
            finally:
                before_thread.switch()
                before_frame.select()
        registers = self.registers()
        if registers is None:
            return "running" if self.state != self.all.at["state.runnable"] else "not started yet"
        level = before_frame.level()
        try:
            UNWINDER.show(registers, self.all.at).select()
            return action()
        finally:
            UNWINDER.hide()
            gdb.execute("frame %d" % level, to_string=True)

    def where(self):
        """The function of the program that it is in: the first that is not std's or trefoil's."""

        def walk():
            frame, first = gdb.selected_frame(), None
            for _ in range(64):
                if frame is None or not frame.is_valid():
                    break
                name = frame.name()
                if name:
                    name = re.sub("::h[0-9a-f]{16}$", "", name)
                    first = first or name
                    parts = name.lstrip("<").startswith(("trefoil::", "trefoil_base::", "std::", "core::", "__"))
                    sal = frame.find_sal()
                    file = sal.symtab.fullname() if sal.symtab else ""
                    own = ["/trefoil/src/", "/trefoil-base/src/", "/library/", "/sysdeps/"]
                    if file and not parts and not any(part in file for part in own):
                        return "%s (%s:%d)" % (name, file.rsplit("/", 1)[-1], sal.line)
                frame = frame.older()
            return first or "?"

        key = self.stack_key()
        if key is None or key not in self.all.wheres:
            try:
                found = self.run(walk)
            except gdb.error as error:
                found = "? (%s)" % error
            if key is None:
                return found
            self.all.wheres[key] = found
        return self.all.wheres[key]

    def stack_key(self):
        """The code addresses on the inner end of its stack, and where they are, or None. Stacks with
        equal keys have equal frames, and gdb needs milliseconds to unwind one."""
        try:
            registers = self.registers()
            if registers is None:
                return None
            words = struct.unpack("<256Q", self.all.read(self.sp, 2048))
        except gdb.MemoryError:
            return None
        near = 1 << 28
        return tuple((i, w) for i, w in enumerate(words) if abs(w - registers.pc) < near)


class Registers:
    """What a switch has saved: program counter and stack pointer, with gdb's names, and the rest."""

    def __init__(self, pc_name, pc, sp_name, sp, others):
        self.pc_name, self.pc, self.sp_name, self.sp = pc_name, pc, sp_name, sp
        self.by_name = dict(others)
        self.by_name[pc_name], self.by_name[sp_name] = pc, sp

    def place(self, frame):
        """Where a frame is: its program counter and its stack pointer."""
        return int(frame.read_register(self.pc_name)), int(frame.read_register(self.sp_name))


class GoroutineUnwinder(gdb.unwinder.Unwinder):
    """Puts the frames of a suspended goroutine behind the innermost frame of a thread."""

    class FrameId:
        def __init__(self, sp, pc):
            self.sp, self.pc = sp, pc

    def __init__(self):
        super().__init__("trefoil-goroutine")
        self.hide()

    def show(self, registers, at):
        """Begins to show the frames of a goroutine in the current thread. Returns the innermost.
        `at` is the table."""
        self.at = at
        newest = gdb.newest_frame()
        self.thread = gdb.selected_thread().num
        self.hidden = registers.place(newest)
        self.registers = registers
        gdb.invalidate_cached_frames()
        frame = gdb.newest_frame()
        while self.hides(frame):
            frame = frame.older()
        return frame

    def hide(self):
        """Ends what `show` began."""
        self.thread, self.hidden, self.registers = None, None, None
        gdb.invalidate_cached_frames()

    def hides(self, frame):
        """Whether a frame is the thread's own. It is several if functions were inlined there."""
        if self.registers is None or gdb.selected_thread().num != self.thread:
            return False
        return self.registers.place(frame) == self.hidden

    def stopped(self, frame):
        """On aarch64, if a frame is the trampoline of a goroutine that was stopped by a signal: that
        goroutine's registers. Unwind tables cannot describe a caller whose return address is not in
        x30."""
        if self.registers is None or gdb.selected_thread().num != self.thread:
            return None
        pc, sp = self.registers.place(frame)
        offset = self.at.get("trampoline.registers")
        if offset is None or not self.at["trampoline"] <= pc < self.at["trampoline_end"]:
            return None
        memory = gdb.selected_inferior().read_memory(sp + offset, 33 * 8).tobytes()
        names = ["x%d" % number for number in range(31)] + ["sp", "pc"]
        return dict(zip(names, struct.unpack("<33Q", memory)))

    def __call__(self, frame):
        if self.hides(frame):
            # Below the goroutine's frames, so that gdb does not take them for a damaged stack.
            place, caller = self.registers.sp - 8, self.registers.by_name
        else:
            caller = self.stopped(frame)
            if caller is None:
                return None
            place = self.registers.place(frame)[1]
        word = frame.architecture().integer_type(64, False)
        value = lambda number: gdb.Value(number).cast(word)
        pc = frame.read_register(self.registers.pc_name)
        info = frame.create_unwind_info(self.FrameId(value(place), pc))
        for name, number in caller.items():
            info.add_saved_register(name, value(number))
        return info


class GoroutineFrames:
    """Leaves out the frame of the thread while the frames of a goroutine are shown."""

    name, priority, enabled = "trefoil-goroutine", 100, True

    def __init__(self):
        gdb.frame_filters[self.name] = self

    def filter(self, frames):
        return (f for f in frames if not UNWINDER.hides(f.inferior_frame()))


def options(arguments, flags, values):
    """Splits the arguments of a command. Returns the options by name."""
    words, found = gdb.string_to_argv(arguments), {}
    while words:
        word = words.pop(0).lstrip("-")
        if word in flags:
            found[word] = True
        elif word in values and words:
            found[word] = words.pop(0)
        else:
            raise gdb.GdbError("Unknown option or missing value: %s" % word)
    return found


class InfoGoroutines(gdb.Command):
    """List the goroutines, grouped by state, by where they are, and by where they were started.

Usage: info goroutines [-state TEXT] [-at TEXT] [-all] [-top N]
  -state TEXT  only those in a state that contains TEXT
  -at TEXT     only those whose place contains TEXT: where they are, or were started
  -all         a line per goroutine instead of groups
  -top N       the number of lines; 20 if not said"""

    def __init__(self):
        super().__init__("info goroutines", gdb.COMMAND_STACK)

    def invoke(self, arguments, from_tty):
        asked = options(arguments, ["all"], ["state", "at", "top"])
        top = int(asked.get("top", 20))
        all = Goroutines()
        groups = {}
        for g in all.goroutines() + all.tasks():
            state = g.state_text
            if asked.get("state", "") not in state:
                continue
            where, place = g.where(), g.place
            if asked.get("at", "") not in where and asked.get("at", "") not in place:
                continue
            key = g.title if "all" in asked else (state, where, place)
            groups.setdefault(key, (state, where, place, []))[3].append(g)
        rows = sorted(groups.values(), key=lambda row: 0 if "all" in asked else -len(row[3]))
        for state, where, place, members in rows[:top]:
            waits = [m.waited_ms() for m in members if isinstance(m, Goroutine)]
            waits = [w for w in waits if w is not None]
            age = ", up to %.1f s" % (max(waits) / 1000) if waits else ""
            title = members[0].title if len(members) == 1 else "%d goroutines" % len(members)
            print("%s [%s%s] at %s, created at %s" % (title, state, age, where, place))
        rest = sum(len(row[3]) for row in rows[top:])
        if rest:
            print("... and %d more in %d lines (-top, -state, -at)" % (rest, len(rows) - top))


class GoroutineCommand(gdb.Command):
    """Run a command in the frames of a goroutine.

Usage: goroutine ID COMMAND, or goroutine all COMMAND
Example: goroutine 7 bt"""

    def __init__(self):
        super().__init__("goroutine", gdb.COMMAND_STACK)

    def invoke(self, arguments, from_tty):
        which, _, command = arguments.strip().partition(" ")
        command = command.strip() or "bt"
        found = Goroutines().goroutines()
        if which != "all":
            try:
                found = [g for g in found if int(which, 0) in (g.id, g.task_id())]
            except ValueError:
                raise gdb.GdbError("Usage: goroutine ID COMMAND, or goroutine all COMMAND")
            if not found:
                raise gdb.GdbError("There is no goroutine %s." % which)
        for g in found:
            print("%s [%s], created at %s" % (g.title, g.state_text, g.place))
            try:
                text = g.run(lambda: gdb.execute(command, False, True))
            except gdb.error as error:
                text = str(error)
            print(text.rstrip("\n") + "\n")


UNWINDER = GoroutineUnwinder()
gdb.unwinder.register_unwinder(None, UNWINDER, replace=True)
GoroutineFrames()
InfoGoroutines()
GoroutineCommand()
