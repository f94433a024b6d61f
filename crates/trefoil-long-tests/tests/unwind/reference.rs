//! framehop behind the interface of trefoil_base::symbols.

use super::File;
use framehop::aarch64::{CacheAarch64, UnwindRegsAarch64, UnwinderAarch64};
use framehop::x86_64::{CacheX86_64, UnwindRegsX86_64, UnwinderX86_64};
use framehop::{ExplicitModuleSectionInfo, FrameAddress, Unwinder as _};
use trefoil_base::symbols::{CodeAddress, Cpu, NoCaller, Registers};

pub(crate) struct Reference(Tables);

enum Tables {
    X86_64(UnwinderX86_64<&'static [u8]>, CacheX86_64),
    Aarch64(UnwinderAarch64<&'static [u8]>, CacheAarch64),
}

impl Reference {
    pub(crate) fn new(cpu: Cpu) -> Reference {
        Reference(match cpu {
            Cpu::X86_64 => Tables::X86_64(UnwinderX86_64::new(), CacheX86_64::new()),
            Cpu::Aarch64 => Tables::Aarch64(UnwinderAarch64::new(), CacheAarch64::new()),
        })
    }

    pub(crate) fn add(&mut self, file: &File, bias: u64) {
        let (eh_frame_svma, eh_frame) = file.eh_frame.clone().unzip();
        let (eh_frame_hdr_svma, eh_frame_hdr) = file.eh_frame_hdr.clone().unzip();
        let sections = ExplicitModuleSectionInfo {
            eh_frame_svma,
            eh_frame,
            eh_frame_hdr_svma,
            eh_frame_hdr,
            ..Default::default()
        };
        let module = framehop::Module::new(String::new(), file.range(bias), bias, sections);
        match &mut self.0 {
            Tables::X86_64(unwinder, _) => unwinder.add_module(module),
            Tables::Aarch64(unwinder, _) => unwinder.add_module(module),
        }
    }

    /// Forgets what was found. framehop also remembers that an address needed a word that could not
    /// be read.
    pub(crate) fn forget(&mut self) {
        match &mut self.0 {
            Tables::X86_64(_, cache) => *cache = CacheX86_64::new(),
            Tables::Aarch64(_, cache) => *cache = CacheAarch64::new(),
        }
    }

    pub(crate) fn caller(
        &mut self,
        at: CodeAddress,
        registers: &mut Registers,
        word: &mut dyn FnMut(u64) -> Option<u64>,
    ) -> Result<Option<CodeAddress>, NoCaller> {
        let Registers { sp, fp, lr, .. } = *registers;
        let at = match at.to_look_up() == at.address() {
            true => FrameAddress::from_instruction_pointer(at.address()),
            false => FrameAddress::from_return_address(at.address()).unwrap(),
        };
        let mut read = |address| word(address).ok_or(());
        let caller = match &mut self.0 {
            Tables::X86_64(unwinder, cache) => {
                let mut own = UnwindRegsX86_64::new(at.address(), sp, fp);
                let caller = unwinder.unwind_frame(at, &mut own, cache, &mut read);
                (registers.sp, registers.fp) = (own.sp(), own.bp());
                caller
            }
            Tables::Aarch64(unwinder, cache) => {
                let mut own = UnwindRegsAarch64::new(lr, sp, fp);
                let caller = unwinder.unwind_frame(at, &mut own, cache, &mut read);
                (registers.sp, registers.fp, registers.lr) = (own.sp(), own.fp(), own.lr());
                caller
            }
        };
        // Its slow path also returns the address 0, which ends a stack.
        let caller = caller.map_err(|_| NoCaller)?.filter(|&pc| pc != 0);
        registers.pc = caller.unwrap_or(0);
        Ok(caller.and_then(CodeAddress::of_return))
    }
}
