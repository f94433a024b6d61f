//! std just works: its locks, its sleep, its sockets and its pipes, used by goroutines as if they were threads,
//! together with threads.
