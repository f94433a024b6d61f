//! Child processes and files.

use super::common::{is_emulated, join_all, runtime, watchdog};
use super::size;
use std::io::{ErrorKind, Read, Write};
use std::process::{Command, Stdio};

#[test]
fn many_goroutines_run_child_processes_by_std() {
    let _w = watchdog();
    runtime(4).run(|| {
        let all = (0..size(100, 30)).map(|i| {
            trefoil::go(move || match i % 3 {
                0 => {
                    let out = Command::new("echo").arg(i.to_string()).output().unwrap();
                    assert!(out.status.success());
                    assert_eq!(String::from_utf8(out.stdout).unwrap().trim(), i.to_string());
                }
                1 => assert_eq!(Command::new("false").status().unwrap().code(), Some(1)),
                _ => {
                    let mut cat = Command::new("cat");
                    let mut cat = cat.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
                    let (mut to, mut from) =
                        (cat.stdin.take().unwrap(), cat.stdout.take().unwrap());
                    let writer = trefoil::go(move || to.write_all(&[7; 200_000]).unwrap());
                    let mut all = Vec::new();
                    from.read_to_end(&mut all).unwrap();
                    writer.join().unwrap();
                    assert!(all == [7; 200_000]);
                    assert!(cat.wait().unwrap().success());
                }
            })
        });
        join_all(all);
        // qemu-user makes `vfork` a `fork`, so the child cannot report that error.
        if !is_emulated() {
            let error = Command::new("/no/such/thing").spawn().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound);
        }
    });
}

#[test]
fn many_goroutines_write_and_read_files() {
    let _w = watchdog();
    runtime(2).run(|| {
        let dir = std::env::temp_dir().join(format!("trefoil-files-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let all = (0..50usize).map(|i| {
            let path = dir.join(i.to_string());
            trefoil::go(move || {
                let data = vec![i as u8; 100_000 + i];
                std::fs::write(&path, &data).unwrap();
                let file = std::fs::File::open(&path).unwrap();
                file.sync_all().unwrap();
                let mut all = Vec::new();
                (&file).read_to_end(&mut all).unwrap();
                assert!(all == data);
            })
        });
        join_all(all);
        std::fs::remove_dir_all(dir).unwrap();
    });
}
