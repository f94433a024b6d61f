//! Crates that work in memory or on one file: dashmap, moka, redb, image.

use std::io::Cursor;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;
use trefoil_compat_more::{MANY, TempDir, assert_few_threads, go_each, run};

#[test]
fn dashmap_counts_every_increment() {
    const KEYS: usize = 7;
    const ROUNDS: usize = 50;
    run(|| {
        let map = Arc::new(dashmap::DashMap::<usize, usize>::new());
        let shared = map.clone();
        go_each(*MANY, move |i| {
            for round in 0..ROUNDS {
                *shared.entry((i + round) % KEYS).or_default() += 1;
            }
            // An iteration locks one shard after the other while other goroutines write.
            assert!(shared.iter().map(|entry| *entry.value()).sum::<usize>() >= ROUNDS);
        });
        assert_eq!(map.len(), KEYS);
        assert_eq!(map.iter().map(|entry| *entry.value()).sum::<usize>(), *MANY * ROUNDS);
    });
}

#[test]
fn dashmap_guard_held_across_sleep_parks_the_other_goroutines() {
    run(|| {
        let map = Arc::new(dashmap::DashMap::<&str, usize>::with_shard_amount(2));
        map.insert("key", 0);
        let shared = map.clone();
        go_each(*MANY, move |i| {
            let mut guard = shared.get_mut("key").unwrap();
            let before = *guard;
            if i % 20 == 0 {
                std::thread::sleep(Duration::from_millis(2));
                assert_few_threads();
            }
            *guard = before + 1;
        });
        assert_eq!(*map.get("key").unwrap(), *MANY);
    });
}

#[test]
fn moka_initialises_a_key_once_for_concurrent_callers() {
    const KEYS: usize = 10;
    run(|| {
        let cache = moka::sync::Cache::<usize, Arc<usize>>::new(1000);
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let values = go_each(*MANY, move |i| {
            cache.get_with(i % KEYS, || {
                // The other callers of this key wait meanwhile.
                std::thread::sleep(Duration::from_millis(20));
                Arc::new(1000 * (i % KEYS) + counted.fetch_add(1, SeqCst))
            })
        });
        assert_eq!(calls.load(SeqCst), KEYS);
        for (i, value) in values.iter().enumerate() {
            assert_eq!(**value / 1000, i % KEYS);
            assert!(Arc::ptr_eq(value, &values[i % KEYS]));
        }
        assert_few_threads();
    });
}

#[test]
fn moka_initialiser_that_panics_or_fails_leaves_the_key_to_the_next_caller() {
    run(|| {
        let cache = moka::sync::Cache::<usize, usize>::new(1000);
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let values = go_each(*MANY, move |_| {
            let attempt = || -> Result<usize, String> {
                std::thread::sleep(Duration::from_millis(1));
                match counted.fetch_add(1, SeqCst) {
                    // A panic without a message and a backtrace.
                    0 => std::panic::resume_unwind(Box::new("the first initialiser panics")),
                    1 => Err("the second initialiser fails".to_owned()),
                    n => Ok(n),
                }
            };
            // All callers that wait for the second initialiser get its error and try again.
            let get = || cache.try_get_with(7, attempt).or_else(|_| cache.try_get_with(7, attempt));
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(get))
        });
        let panics = values.iter().filter(|value| value.is_err()).count();
        assert_eq!(panics, 1);
        assert!(values.into_iter().flatten().all(|value| value.unwrap() == 2));
        assert_eq!(calls.load(SeqCst), 3);
    });
}

#[test]
fn moka_keeps_its_capacity_while_many_insert() {
    const CAPACITY: u64 = 100;
    run(|| {
        let cache = moka::sync::Cache::<usize, usize>::builder()
            .max_capacity(CAPACITY)
            .time_to_live(Duration::from_secs(600))
            .build();
        let shared = cache.clone();
        go_each(*MANY, move |i| {
            for n in 0..20 {
                let key = 20 * i + n;
                shared.insert(key, key + 1);
                if let Some(value) = shared.get(&(key / 2)) {
                    assert_eq!(value, key / 2 + 1);
                }
            }
        });
        cache.run_pending_tasks();
        assert!(cache.entry_count() <= CAPACITY, "{} entries", cache.entry_count());
        assert!(cache.iter().all(|(key, value)| value == *key + 1));
    });
}

#[test]
fn redb_commits_every_transaction_and_readers_see_a_snapshot() {
    use redb::{Durability, ReadableDatabase, ReadableTable, ReadableTableMetadata};
    const TABLE: redb::TableDefinition<'_, u64, &str> = redb::TableDefinition::new("numbers");
    const TOTAL: redb::TableDefinition<'_, &str, u64> = redb::TableDefinition::new("total");
    let dir = TempDir::new("redb");
    let file = dir.path().join("db");
    run(move || {
        let db = Arc::new(redb::Database::create(&file).unwrap());
        let shared = db.clone();
        go_each(*MANY, move |i| {
            let mut write = shared.begin_write().unwrap();
            // Every 50th transaction is written to the disk; all of them would take seconds.
            if i % 50 != 49 {
                write.set_durability(Durability::None).unwrap();
            }
            {
                let mut table = write.open_table(TABLE).unwrap();
                table.insert(i as u64, format!("number {i}").as_str()).unwrap();
                let mut total = write.open_table(TOTAL).unwrap();
                let before = total.get("all").unwrap().map_or(0, |value| value.value());
                total.insert("all", before + 1).unwrap();
            }
            if i % 10 == 9 {
                write.abort().unwrap();
                return;
            }
            write.commit().unwrap();
            let read = shared.begin_read().unwrap();
            let table = read.open_table(TABLE).unwrap();
            let total = read.open_table(TOTAL).unwrap().get("all").unwrap().unwrap().value();
            assert_eq!(table.len().unwrap(), total);
            trefoil::yield_now();
            assert_eq!(table.len().unwrap(), total, "the snapshot has changed");
            let text = table.get(i as u64).unwrap().unwrap();
            assert_eq!(text.value(), format!("number {i}"));
        });
        let read = db.begin_read().unwrap();
        let expected = (0..*MANY).filter(|i| i % 10 != 9).count() as u64;
        assert_eq!(read.open_table(TABLE).unwrap().len().unwrap(), expected);
    });
}

#[test]
fn image_decodes_the_png_that_it_encoded() {
    use image::{ImageFormat, Rgba, RgbaImage};
    run(|| {
        go_each(*MANY, |i| {
            let (width, height) = (20 + i as u32 % 13, 10 + i as u32 % 7);
            let pixel = |x: u32, y: u32| Rgba([x as u8, y as u8, i as u8, (x * y) as u8]);
            let picture = RgbaImage::from_fn(width, height, pixel);
            let mut png = Cursor::new(Vec::new());
            picture.write_to(&mut png, ImageFormat::Png).unwrap();
            trefoil::yield_now();
            let png = png.into_inner();
            let back = image::load_from_memory_with_format(&png, ImageFormat::Png).unwrap();
            assert_eq!(back.to_rgba8(), picture);
            let broken = &png[..png.len() / 2];
            assert!(image::load_from_memory_with_format(broken, ImageFormat::Png).is_err());
        });
    });
}
