//! Faults of disks and networks: two mistakes that only a crash or a lost answer brings to light.
//! Each is found within a bounded number of runs and repeated by its seed; the repaired program
//! passes as many.

#![cfg(feature = "std")]

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;
use trefoil::sim::{self, FailureKind};

const MILLI: Duration = Duration::from_millis(1);

/// Returns a number below `limit`, which the seed of the run chooses.
fn random(limit: u64) -> u64 {
    RandomState::new().hash_one(()) % limit
}

/// Explores a program with a mistake, which must be found by this message and be repeatable.
fn check_finds(runs: u64, message: &str, program: impl Fn() + Send + Sync + 'static) {
    let failure = sim::builder().explore(runs, program).expect_err("the mistake was not found");
    println!("{failure}");
    assert_eq!(failure.kind, FailureKind::Panic, "{failure}");
    assert!(failure.message.contains(message), "{failure}");
    assert!(failure.is_repeatable, "{failure}");
}

/// Explores a program without a mistake.
fn check_passes(runs: u64, program: impl Fn() + Send + Sync + 'static) {
    sim::builder().explore(runs, program).unwrap_or_else(|failure| panic!("{failure}"));
}

/// A file of accounts that is written anew at every transfer. The power fails now and then.
mod torn_write {
    use super::*;
    use std::fs::{self, File};
    use std::io::Write;
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
    use trefoil::time;

    /// Ten times the most runs that any of 20 base seeds needed: each found it in at most four.
    const RUNS: u64 = 40;
    /// Eight bytes each: the file has four sectors.
    const ACCOUNTS: usize = 256;
    const BALANCE: u64 = 100;

    #[derive(Clone, Copy)]
    enum Save {
        /// Overwrites the file.
        InPlace,
        /// Writes a new file, and gives it the name of the old one when it is durable.
        Replace,
    }

    impl Save {
        fn write(self, folder: &Path, bytes: &[u8]) {
            let path = folder.join("accounts");
            match self {
                Save::InPlace => fs::write(path, bytes).unwrap(),
                Save::Replace => {
                    let new = folder.join("accounts.new");
                    let mut file = File::create(&new).unwrap();
                    file.write_all(bytes).unwrap();
                    file.sync_all().unwrap();
                    fs::rename(new, path).unwrap();
                    File::open(folder).unwrap().sync_all().unwrap();
                }
            }
        }
    }

    /// The accounts. The first is a counter of transfers.
    struct Accounts(Vec<u64>);

    impl Accounts {
        fn new() -> Accounts {
            let mut accounts = vec![BALANCE; ACCOUNTS];
            accounts[0] = 0;
            Accounts(accounts)
        }

        fn load(folder: &Path) -> Option<Accounts> {
            let bytes = fs::read(folder.join("accounts")).ok()?;
            let numbers = bytes.as_chunks().0.iter().map(|chunk| u64::from_le_bytes(*chunk));
            Some(Accounts(numbers.collect()))
        }

        fn to_bytes(&self) -> Vec<u8> {
            self.0.iter().flat_map(|account| account.to_le_bytes()).collect()
        }

        fn transfer(&mut self) {
            let account = || 1 + random(ACCOUNTS as u64 - 1) as usize;
            self.0[account()] -= 1;
            self.0[account()] += 1;
            self.0[0] += 1;
        }

        fn sum(&self) -> u64 {
            self.0[1..].iter().sum()
        }
    }

    fn program(save: Save) -> impl Fn() + Send + Sync + 'static {
        move || {
            // What the bank has told its customers.
            let confirmed = Arc::new(AtomicU64::new(0));
            let bank = sim::host("bank", {
                let confirmed = confirmed.clone();
                move || {
                    let folder = sim::disk();
                    let mut accounts = Accounts::load(&folder).unwrap_or_else(Accounts::new);
                    let sum = BALANCE * (ACCOUNTS as u64 - 1);
                    assert!(accounts.0.len() == ACCOUNTS && accounts.sum() == sum, "a torn file");
                    if let Save::Replace = save {
                        let confirmed = confirmed.load(SeqCst);
                        assert!(accounts.0[0] >= confirmed, "a confirmed transfer is lost");
                    }
                    loop {
                        accounts.transfer();
                        save.write(&folder, &accounts.to_bytes());
                        confirmed.store(accounts.0[0], SeqCst);
                        time::sleep(MILLI);
                    }
                }
            });
            for _ in 0..2 {
                time::sleep(MILLI * (5 + random(10) as u32));
                bank.restart();
            }
            time::sleep(MILLI);
            assert!(confirmed.load(SeqCst) > 0);
        }
    }

    #[test]
    fn a_file_that_is_overwritten_in_place_is_found_torn() {
        check_finds(RUNS, "a torn file", program(Save::InPlace));
    }

    #[test]
    fn a_file_that_is_replaced_durably_is_never_torn_and_loses_nothing() {
        check_passes(RUNS, program(Save::Replace));
    }
}

/// A client that asks again if it gets no answer. Connections are reset now and then.
mod duplicating_retry {
    use super::*;
    use std::collections::HashSet;
    use std::io::{self, BufRead, BufReader, ErrorKind, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};
    use trefoil::{go, time};

    /// Ten times the most runs that any of 20 base seeds needed: each found it in at most four.
    const RUNS: u64 = 40;
    const DEPOSITS: u64 = 5;

    /// What the server does with a request that it has carried out before.
    #[derive(Clone, Copy)]
    enum Repeated {
        CarriedOutAgain,
        OnlyAnswered,
    }

    #[derive(Default)]
    struct Account {
        balance: u64,
        /// The numbers of the requests that were carried out.
        done: HashSet<u64>,
    }

    impl Account {
        fn deposit(&mut self, request: u64, repeated: Repeated) {
            let is_new = self.done.insert(request);
            match repeated {
                Repeated::OnlyAnswered if !is_new => {}
                _ => self.balance += 1,
            }
        }
    }

    /// Answers each line, the number of a deposit, with the balance.
    fn serve(repeated: Repeated) {
        let listener = TcpListener::bind("0.0.0.0:80").unwrap();
        let account = Arc::new(Mutex::new(Account::default()));
        for stream in listener.incoming() {
            let account = account.clone();
            go(move || {
                let mut stream = stream.unwrap();
                let reader = BufReader::new(stream.try_clone().unwrap());
                for line in reader.lines().map_while(Result::ok) {
                    let balance = {
                        let mut account = account.lock().unwrap();
                        account.deposit(line.parse().unwrap(), repeated);
                        account.balance
                    };
                    if writeln!(stream, "{balance}").is_err() {
                        return;
                    }
                }
            });
        }
    }

    fn ask(request: u64) -> io::Result<u64> {
        let mut stream = TcpStream::connect("bank:80")?;
        stream.set_read_timeout(Some(100 * MILLI))?;
        writeln!(stream, "{request}")?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer)?;
        answer.trim().parse().map_err(|_| ErrorKind::UnexpectedEof.into())
    }

    fn program(repeated: Repeated) -> impl Fn() + Send + Sync + 'static {
        move || {
            sim::host("bank", move || serve(repeated));
            sim::settle();
            let faults = go(|| {
                for _ in 0..3 {
                    time::sleep(MILLI * (1 + random(10) as u32));
                    sim::net().reset("test", "bank");
                }
                sim::net().partition("test", "bank");
                time::sleep(MILLI * random(500) as u32);
                sim::net().heal("test", "bank");
            });
            let mut balance = 0;
            for request in 1..=DEPOSITS {
                balance = loop {
                    match ask(request) {
                        Ok(balance) => break balance,
                        Err(_) => time::sleep(MILLI),
                    }
                };
            }
            faults.join().unwrap();
            assert_eq!(balance, DEPOSITS, "the balance differs from the deposits");
        }
    }

    #[test]
    fn a_deposit_whose_answer_was_lost_is_found_carried_out_twice() {
        check_finds(RUNS, "the balance differs", program(Repeated::CarriedOutAgain));
    }

    #[test]
    fn a_deposit_with_a_known_number_is_carried_out_once() {
        check_passes(RUNS, program(Repeated::OnlyAnswered));
    }
}
