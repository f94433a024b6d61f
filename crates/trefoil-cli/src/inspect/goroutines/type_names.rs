//! The name of the function that contains a goroutine's closure or a task's future.
//!
//! A body has a pointer to `type_name`, which returns the name. A debugger cannot call it, and the
//! name is nowhere else, so it is read from the machine code: `type_name` is compiled to a few
//! instructions. Code in any other form has no name here.

use super::{Cache, Reader};
use crate::inspect::memory::u32_at;
use trefoil_base::symbols::Cpu;

impl Reader<'_> {
    /// Returns the function that contains the closure or future of a body: an empty name if the
    /// body has neither, None if the name cannot be read.
    pub(super) fn function(&self, body: u64, type_name: u64, cache: &mut Cache) -> Option<String> {
        let read = || {
            let function = self.word(body, type_name).ok()?;
            let mut code = [0; 24];
            self.process.read(function, &mut code).ok()?;
            let (address, len) = returned_text(self.process.cpu, function, &code)?;
            let name = self.process.text(address, len)?;
            Some(name.strip_suffix("::{{closure}}").unwrap_or(&name).to_owned())
        };
        cache.functions.entry(body).or_insert_with(read).clone()
    }
}

/// Returns the address and the length of the text that a function returns, by its machine code.
fn returned_text(cpu: Cpu, function: u64, code: &[u8]) -> Option<(u64, u64)> {
    match cpu {
        Cpu::X86_64 => returned_text_x86_64(function, code),
        Cpu::Aarch64 => returned_text_aarch64(function, code),
    }
}

/// As [`returned_text`]: `adrp x0, page`, `add x0, x0, offset`, and `mov w1, length`, of which a
/// debug build makes two by way of another register.
fn returned_text_aarch64(function: u64, code: &[u8]) -> Option<(u64, u64)> {
    // What each register has, as far as it is known.
    let mut registers = [None; 32];
    for (i, code) in code.chunks_exact(4).enumerate() {
        let (word, here) = (u32_at(code, 0), function.wrapping_add(4 * i as u64));
        let (to, from) = ((word & 31) as usize, (word >> 5 & 31) as usize);
        registers[to] = if word & 0x9f00_0000 == 0x9000_0000 {
            // adrp: 21 bits, the lowest two of them apart from the others.
            let pages = (word >> 5 & 0x7_ffff) << 2 | word >> 29 & 3;
            let pages = i64::from((pages << 11) as i32 >> 11);
            Some((here & !0xfff).wrapping_add_signed(pages << 12))
        } else if word & 0xffc0_0000 == 0x9100_0000 {
            // add, of 12 bits.
            registers[from].map(|base: u64| base.wrapping_add(u64::from(word >> 10 & 0xfff)))
        } else if word & 0x7fe0_0000 == 0x5280_0000 {
            // mov of 16 bits.
            Some(u64::from(word >> 5 & 0xffff))
        } else if word & 0x7fe0_ffe0 == 0x2a00_03e0 {
            // mov of a register.
            registers[(word >> 16 & 31) as usize]
        } else if word == 0xd65f_03c0 {
            // ret
            return registers[0].zip(registers[1]);
        } else {
            return None;
        };
    }
    None
}

/// As [`returned_text`]: `lea rax, [rip + offset]`, or `mov eax, address`; and `mov edx, length`.
fn returned_text_x86_64(function: u64, code: &[u8]) -> Option<(u64, u64)> {
    let (mut address, mut len) = (None, None);
    let mut at = 0;
    while at + 8 <= code.len() && (address.is_none() || len.is_none()) {
        at += match code[at..] {
            // endbr64; push rbp; mov rbp, rsp
            [0xf3, 0x0f, 0x1e, 0xfa, ..] => 4,
            [0x55, ..] => 1,
            [0x48, 0x89, 0xe5, ..] => 3,
            [0x48, 0x8d, 0x05, ..] => {
                let offset = u32_at(code, at + 3) as i32;
                address =
                    Some(function.wrapping_add(at as u64 + 7).wrapping_add_signed(offset.into()));
                7
            }
            [0xb8, ..] => {
                address = Some(u32_at(code, at + 1).into());
                5
            }
            [0xba, ..] => {
                len = Some(u32_at(code, at + 1).into());
                5
            }
            _ => return None,
        };
    }
    address.zip(len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::goroutines::Goroutine;
    use crate::inspect::memory::Process;

    #[test]
    fn the_text_that_a_function_returns_is_found_by_its_code() {
        let named: fn() -> &'static str = std::any::type_name::<Goroutine>;
        // SAFETY: the code of a function; the page after it may end, but not within a program.
        let code = unsafe { std::slice::from_raw_parts(named as *const u8, 24) };
        let cpu = Process::open(&std::process::id().to_string()).unwrap().cpu;
        let found = returned_text(cpu, named as *const u8 as u64, code);
        assert_eq!(found, Some((named().as_ptr() as u64, named().len() as u64)));
        assert_eq!(returned_text(Cpu::X86_64, 0, &[0xc3; 24]), None);
        assert_eq!(returned_text(Cpu::Aarch64, 0, &[0xc3; 24]), None);
    }

    #[test]
    fn the_text_that_a_function_of_aarch64_returns_is_found() {
        let code = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>();
        // adrp x0, +0x38e pages; add x0, x0, #0x900; mov w8, #0x13a; mov w1, w8; ret
        let debug = code(&[0xd000_1c60, 0x9124_0000, 0x5280_2748, 0x2a08_03e1, 0xd65f_03c0]);
        let text = returned_text(Cpu::Aarch64, 0xca7a0, &debug);
        assert_eq!(text, Some((0x45_8900, 0x13a)));
        // adrp x0, -1 page; add x0, x0, #8; mov w1, #5; ret
        let release = code(&[0xf0ff_ffe0, 0x9100_2000, 0x5280_00a1, 0xd65f_03c0, 0]);
        assert_eq!(returned_text(Cpu::Aarch64, 0x5004, &release), Some((0x4008, 5)));
        // Without `ret`.
        assert_eq!(returned_text(Cpu::Aarch64, 0x5004, &release[..12]), None);
    }
}
