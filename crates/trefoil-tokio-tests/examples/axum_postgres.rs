//! An axum application with PostgreSQL (sqlx), on tokio's runtime with goroutines as its threads.
//!
//! ```sh
//! export DATABASE_URL=postgres://test@127.0.0.1:5432/postgres
//! cargo run --release -p trefoil-tokio-tests --example axum_postgres 127.0.0.1:3000
//! curl -d 'buy milk' http://127.0.0.1:3000/notes
//! curl http://127.0.0.1:3000/notes
//! curl -X POST http://127.0.0.1:3000/report   # blocks; the others are answered meanwhile
//! ```
//! Ctrl-C ends the server after the requests that have begun.

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use sqlx::postgres::{PgPool, PgPoolOptions};
use std::error::Error;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long it takes to write a report.
const REPORT_TIME: Duration = Duration::from_millis(200);

#[derive(Clone)]
struct App {
    database: PgPool,
    /// The file of the last report. std's lock, which is held while the file is written.
    report: Arc<Mutex<PathBuf>>,
}

/// Returns the answer to a request that failed.
fn failed(error: impl Error) -> (StatusCode, String) {
    (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n"))
}

type Answer = Result<String, (StatusCode, String)>;

async fn list(State(app): State<App>) -> Answer {
    let query = sqlx::query_scalar::<_, String>("SELECT note FROM notes ORDER BY id");
    let notes = query.fetch_all(&app.database).await.map_err(failed)?;
    Ok(notes.iter().map(|note| format!("{note}\n")).collect())
}

async fn add(State(app): State<App>, note: String) -> Answer {
    let query = sqlx::query_scalar("INSERT INTO notes (note) VALUES ($1) RETURNING id");
    let id: i64 = query.bind(note).fetch_one(&app.database).await.map_err(failed)?;
    Ok(format!("{id}\n"))
}

/// Calls blocking code on purpose: a lock that is held for long, files, and `std::thread::sleep` in
/// the place of a library that computes or calls C. On tokio's own threads this handler would have
/// to call `spawn_blocking`. Here it blocks a goroutine, and other requests are served.
async fn report(State(app): State<App>) -> Answer {
    let query = sqlx::query_scalar("SELECT COUNT(*) FROM notes");
    let count: i64 = query.fetch_one(&app.database).await.map_err(failed)?;
    // The query has spawned a task that gives the connection back to the pool. That task is next on
    // this worker and only this worker can run it, so let it run before the worker blocks.
    tokio::task::yield_now().await;
    let file = app.report.lock().unwrap_or_else(PoisonError::into_inner);
    std::fs::write(&*file, format!("{count} notes\n")).map_err(failed)?;
    std::thread::sleep(REPORT_TIME);
    std::fs::read_to_string(&*file).map_err(failed)
}

#[trefoil::main(tokio)]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let addr = args.next().unwrap_or_else(|| "127.0.0.1:3000".into());
    let url = std::env::var("DATABASE_URL").map_err(|_| "DATABASE_URL is not set")?;
    let database = PgPoolOptions::new().max_connections(4).connect(&url).await?;
    sqlx::query("CREATE TABLE IF NOT EXISTS notes (id BIGSERIAL PRIMARY KEY, note TEXT NOT NULL)")
        .execute(&database)
        .await?;
    let file = std::env::temp_dir().join(format!("report-{}.txt", std::process::id()));
    let app = Router::new()
        .route("/notes", get(list).post(add))
        .route("/report", post(report))
        .with_state(App { database, report: Arc::new(Mutex::new(file.clone())) });
    let listener = tokio::net::TcpListener::bind(addr).await?;
    println!("listening on {}", listener.local_addr()?);
    axum::serve(listener, app)
        .with_graceful_shutdown(async { tokio::signal::ctrl_c().await.expect("SIGINT is ours") })
        .await?;
    let _ = std::fs::remove_file(file); // There is none if no report was requested.
    Ok(())
}
