//! Unit tests that run in a process of their own, also in an emulator.

use std::process::Command;

/// Set by hand or by CI if the tests run in an emulator: the emulator's command.
const EMULATED: &str = "TREFOIL_EMULATED";

/// Returns whether the tests run in an emulator.
pub fn is_emulated() -> bool {
    std::env::var_os(EMULATED).is_some()
}

/// Returns a command that runs this test binary once more, in the emulator if there is one.
pub fn this_program() -> Command {
    let program = std::env::current_exe().expect("this test's binary");
    let Ok(emulator) = std::env::var(EMULATED) else { return Command::new(program) };
    let mut words = emulator.split_whitespace();
    let mut command = Command::new(words.next().expect("the emulator's command"));
    command.args(words).arg(program);
    command
}
