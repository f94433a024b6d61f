//! Check, then act: an account checks its balance in one lock section and changes it in another.

use crate::{Bug, Version};
use std::sync::Arc;
use trefoil::chan::{self, Sender};
use trefoil::go;
use trefoil::sim::FailureKind;
use trefoil::sync::Mutex;

pub(crate) const BUG: Bug = Bug {
    name: "check, then act",
    program,
    kind: FailureKind::Panic,
    message: "the account is overdrawn by",
    // Needed with the base seeds: 4 (median), at most 14.
    max_runs: 100,
    max_deviations: 4,
};

struct Account {
    balance: Mutex<i64>,
    audit: Sender<String>,
}

impl Account {
    fn withdraw(&self, amount: i64, version: Version) -> bool {
        let mut balance = self.balance.lock();
        if *balance < amount {
            return false;
        }
        if version == Version::Repaired {
            *balance -= amount;
            drop(balance);
            self.audit.send(format!("withdrew {amount}")).unwrap();
        } else {
            drop(balance);
            self.audit.send(format!("withdrew {amount}")).unwrap();
            *self.balance.lock() -= amount;
        }
        true
    }
}

fn program(version: Version) {
    let (audit, entries) = chan::bounded(8);
    let account = Arc::new(Account { balance: Mutex::new(100), audit });
    let clients: Vec<_> = (0..3)
        .map(|_| {
            let account = account.clone();
            go(move || account.withdraw(60, version))
        })
        .collect();
    let withdrawals = clients.into_iter().map(|client| client.join().unwrap());
    let successes = withdrawals.filter(|&success| success).count();
    let balance = *account.balance.lock();
    drop(account);
    assert_eq!(entries.iter().count(), successes);
    assert!(balance >= 0, "the account is overdrawn by {}", -balance);
}

#[test]
fn a_check_in_another_lock_section_is_found_and_repeated() {
    BUG.check();
}
