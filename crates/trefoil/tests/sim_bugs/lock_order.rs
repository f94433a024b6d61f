//! Lock order: a transfer locks the account that pays before the account that receives.

use crate::{Bug, Version};
use std::sync::Arc;
use std::time::SystemTime;
use trefoil::go;
use trefoil::sim::FailureKind;
use trefoil::sync::{Mutex, MutexGuard};

pub(crate) const BUG: Bug = Bug {
    name: "lock order",
    program,
    kind: FailureKind::Deadlock,
    message: "sync.Mutex.Lock",
    // Needed with the base seeds: 11 (median), at most 40.
    max_runs: 200,
    max_deviations: 4,
};

struct Account {
    balance: i64,
    changed: SystemTime,
}

fn lock(account: &Mutex<Account>) -> MutexGuard<'_, Account> {
    let mut account = account.lock();
    account.changed = SystemTime::now();
    account
}

fn transfer(accounts: &[Mutex<Account>], from: usize, to: usize, version: Version) {
    let (mut payer, mut payee);
    if version == Version::Planted || from < to {
        payer = lock(&accounts[from]);
        payee = lock(&accounts[to]);
    } else {
        payee = lock(&accounts[to]);
        payer = lock(&accounts[from]);
    }
    payer.balance -= 10;
    payee.balance += 10;
}

fn program(version: Version) {
    let account = || Mutex::new(Account { balance: 100, changed: SystemTime::now() });
    let accounts: Arc<[_]> = (0..3).map(|_| account()).collect();
    let transfers: Vec<_> = [(0, 1), (1, 2), (2, 0)]
        .into_iter()
        .map(|(from, to)| {
            let accounts = accounts.clone();
            go(move || transfer(&accounts, from, to, version))
        })
        .collect();
    transfers.into_iter().for_each(|transfer| transfer.join().unwrap());
    assert_eq!(accounts.iter().map(|account| account.lock().balance).sum::<i64>(), 300);
}

#[test]
fn a_cycle_of_locks_is_found_and_repeated() {
    BUG.check();
}
