//! redis (aio), tokio-postgres and sqlx, unmodified, with real servers. Skipped with a line on
//! stderr where the server is not installed.

use redis::AsyncCommands;
use sqlx::Row;
use trefoil_tokio_tests::{programs, within};

const CLIENTS: i64 = 16;

#[trefoil::test(tokio)]
async fn redis_answers_every_task() {
    let Some(server) = programs::redis() else { return };
    let client = redis::Client::open(format!("redis://127.0.0.1:{}/", server.port)).unwrap();
    let connection = within(client.get_multiplexed_async_connection()).await.unwrap();
    let tasks: Vec<_> = (0..CLIENTS)
        .map(|n| {
            let mut connection = connection.clone();
            tokio::spawn(async move {
                let key = format!("key{n}");
                let _: () = connection.set(&key, n).await.unwrap();
                for _ in 0..20 {
                    let _: i64 = connection.incr("sum", n).await.unwrap();
                }
                let value: i64 = connection.get(&key).await.unwrap();
                assert_eq!(value, n);
            })
        })
        .collect();
    for task in tasks {
        within(task).await.unwrap();
    }
    let sum: i64 = within(connection.clone().get("sum")).await.unwrap();
    assert_eq!(sum, 20 * CLIENTS * (CLIENTS - 1) / 2);
}

#[trefoil::test(tokio)]
async fn tokio_postgres_and_sqlx_answer_every_task() {
    let Some(server) = programs::postgres() else { return };
    with_tokio_postgres(server.port).await;
    with_sqlx(server.port).await;
}

async fn with_tokio_postgres(port: u16) {
    let config = format!("host=127.0.0.1 port={port} user=test dbname=postgres");
    // The port is open before the server accepts sessions.
    let (client, connection) = within(async {
        loop {
            match tokio_postgres::connect(&config, tokio_postgres::NoTls).await {
                Ok(connected) => return connected,
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
            }
        }
    })
    .await;
    let connection = tokio::spawn(connection);
    client.batch_execute("CREATE TABLE numbers (n BIGINT)").await.unwrap();
    let client = std::sync::Arc::new(client);
    let tasks: Vec<_> = (0..CLIENTS)
        .map(|n| {
            let client = client.clone();
            tokio::spawn(async move {
                client.execute("INSERT INTO numbers VALUES ($1)", &[&n]).await.unwrap();
                let row = client.query_one("SELECT $1::BIGINT * 2", &[&n]).await.unwrap();
                assert_eq!(row.get::<_, i64>(0), 2 * n);
            })
        })
        .collect();
    for task in tasks {
        within(task).await.unwrap();
    }
    let row = client.query_one("SELECT COUNT(*) FROM numbers", &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), CLIENTS);
    drop(client);
    within(connection).await.unwrap().unwrap();
}

async fn with_sqlx(port: u16) {
    let url = format!("postgres://test@127.0.0.1:{port}/postgres?sslmode=disable");
    let options = sqlx::postgres::PgPoolOptions::new().max_connections(4);
    let pool = within(options.connect(&url)).await.unwrap();
    let tasks: Vec<_> = (0..CLIENTS)
        .map(|n| {
            let pool = pool.clone();
            tokio::spawn(async move {
                let mut transaction = pool.begin().await.unwrap();
                let row = sqlx::query("SELECT COUNT(*) + $1 FROM numbers")
                    .bind(n)
                    .fetch_one(&mut *transaction)
                    .await
                    .unwrap();
                transaction.rollback().await.unwrap();
                assert_eq!(row.get::<i64, _>(0), CLIENTS + n);
            })
        })
        .collect();
    for task in tasks {
        within(task).await.unwrap();
    }
    within(pool.close()).await;
}
