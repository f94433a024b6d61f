//! git2: libgit2 is C code with thread-local state. Its file I/O blocks the thread of the
//! goroutine.

use git2::{ErrorCode, Oid, Repository, Signature, Time};
use std::path::Path;
use std::sync::{Arc, Once};
use trefoil_compat_more::{MANY, TempDir, go_each, run};

const COMMITS: usize = 3;

/// Hides the configuration files of the user and of the system, which could change what a commit
/// contains.
fn without_configuration() {
    use git2::ConfigLevel::{Global, ProgramData, System, XDG};
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for level in [System, Global, XDG, ProgramData] {
            // SAFETY: no other thread uses libgit2 yet: every test calls this first.
            unsafe { git2::opts::set_search_path(level, "/nonexistent") }.unwrap();
        }
    });
}

/// Commits `text` as the only file, on top of `HEAD`.
fn commit(repo: &Repository, text: &str, seconds: i64) -> Oid {
    std::fs::write(repo.workdir().unwrap().join("file"), text).unwrap();
    let mut index = repo.index().unwrap();
    index.add_path(Path::new("file")).unwrap();
    index.write().unwrap();
    let tree = repo.find_tree(index.write_tree().unwrap()).unwrap();
    let author = Signature::new("A", "a@example.org", &Time::new(seconds, 0)).unwrap();
    let parent = repo.head().ok().map(|head| head.peel_to_commit().unwrap());
    let parents: Vec<_> = parent.iter().collect();
    repo.commit(Some("HEAD"), &author, &author, text, &tree, &parents).unwrap()
}

/// Returns the contents of the file in a commit.
fn text_at(repo: &Repository, commit: Oid) -> String {
    let tree = repo.find_commit(commit).unwrap().tree().unwrap();
    let entry = tree.get_name("file").unwrap();
    let blob = repo.find_blob(entry.id()).unwrap();
    String::from_utf8(blob.content().to_vec()).unwrap()
}

#[test]
fn git2_reads_back_the_commits_of_each_goroutines_repository() {
    without_configuration();
    let dir = TempDir::new("git2");
    run(move || {
        let root = dir.path().to_owned();
        go_each(*MANY / 2, move |i| {
            let path = root.join(i.to_string());
            let repo = Repository::init(&path).unwrap();
            let text = |n: usize| format!("repository {i}, commit {n}");
            let commits: Vec<_> = (0..COMMITS).map(|n| commit(&repo, &text(n), n as i64)).collect();
            drop(repo);
            trefoil::yield_now();
            let repo = Repository::open(&path).unwrap();
            let mut walk = repo.revwalk().unwrap();
            walk.push_head().unwrap();
            let mut found: Vec<_> = walk.map(|id| id.unwrap()).collect();
            found.reverse();
            assert_eq!(found, commits);
            for (n, id) in commits.into_iter().enumerate() {
                assert_eq!(text_at(&repo, id), text(n));
            }
        });
        drop(dir);
    });
}

#[test]
fn git2_handles_of_one_repository_are_used_by_all_goroutines() {
    without_configuration();
    let dir = TempDir::new("git2-shared");
    run(move || {
        let repo = Repository::init(dir.path()).unwrap();
        let commits: Vec<_> = (0..10).map(|n| commit(&repo, &format!("text {n}"), n)).collect();
        let (commits, root) = (Arc::new(commits), dir.path().to_owned());
        go_each(*MANY, move |i| {
            let repo = Repository::open(&root).unwrap();
            let n = i % commits.len();
            assert_eq!(text_at(&repo, commits[n]), format!("text {n}"));
            // Every goroutine writes a reference of its own.
            repo.reference(&format!("refs/heads/branch-{i}"), commits[n], false, "test").unwrap();
        });
        let branches = repo.references_glob("refs/heads/branch-*").unwrap();
        assert_eq!(branches.count(), *MANY);
    });
}

/// libgit2 keeps the last error in thread-local storage.
#[test]
fn git2_error_belongs_to_the_goroutine_that_made_it() {
    without_configuration();
    let dir = TempDir::new("git2-errors");
    run(move || {
        let root = dir.path().to_owned();
        Repository::init(&root).unwrap();
        go_each(*MANY, move |i| {
            let repo = Repository::open(&root).unwrap();
            for n in 0..5 {
                let name = format!("refs/heads/none-{i}-{n}");
                let error = repo.find_reference(&name).err().unwrap();
                assert_eq!(error.code(), ErrorCode::NotFound);
                assert!(error.message().contains(&name), "{error}");
                trefoil::yield_now();
            }
        });
        drop(dir);
    });
}
