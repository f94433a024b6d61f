//! Which clients may ask for what.
//!
//! | connection | reads | writes (`POST`) |
//! |---|---|---|
//! | Unix socket, from the same user or root | yes | with the token |
//! | TCP without a token: only on a loopback address | yes | no |
//! | TCP with a token | with the token | with the token |
//!
//! A page of another site, opened in a browser on this machine, must not read anything either. Its
//! requests carry an `Origin`, or say `Sec-Fetch-Site: cross-site`. And if its name was made to
//! point to this machine (DNS rebinding), their `Host` is that name: where no token is needed, only
//! loopback addresses, the server's own address and `localhost` are valid there. A Unix socket may
//! be reached by a browser too, through a program that forwards a port to it.
//!
//! What is left: browsers send `Sec-Fetch-Site` to loopback addresses and over HTTPS only. If the
//! user has typed the token into a browser, for a server on another address without encryption, then
//! a page of another site can make that browser send `GET` requests. It cannot read the answers, and
//! it cannot write, because a `POST` has an `Origin`. It can make the program record, profile and
//! make large answers; all of these are bounded.

use crate::http::{Method, Request, Response};
use std::fmt;
use std::net::IpAddr;

/// What a server accepts.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub(crate) token: Option<Token>,
    /// The server's own address, once it is bound.
    pub(crate) address: Option<IpAddr>,
}

/// A token. It is not printed.
#[derive(Clone)]
pub(crate) struct Token(pub(crate) String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(not shown)")
    }
}

/// How a request came in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Transport {
    Tcp,
    /// The other end was found to be of the same user.
    Unix,
}

impl Access {
    /// Returns the answer to a request that is refused.
    pub(crate) fn check(&self, request: &Request, transport: Transport) -> Result<(), Response> {
        let refuse = |status, why: &str| Err(Response::error(status, why));
        if request.count("host") > 1 || request.count("origin") > 1 {
            return refuse(400, "a header is there twice");
        }
        let host = request.header("host").unwrap_or_default();
        let is_host_checked = match transport {
            Transport::Tcp => self.token.is_none(),
            // Few clients of a Unix socket have a name for it.
            Transport::Unix => !host.is_empty(),
        };
        if is_host_checked && !self.is_local_name(host) {
            return refuse(
                421,
                "the Host must be a loopback address or localhost: other names could be made to \
                 point here by another site (over TCP with a token, every name is valid)",
            );
        }
        if let Some(origin) = request.header("origin")
            && origin.strip_prefix("http://") != Some(host)
        {
            return refuse(403, "a page of another origin must not ask here");
        }
        // A link on another site may lead to the page, but nothing else.
        let is_link = request.header("sec-fetch-mode") == Some("navigate") && request.path == "/";
        if matches!(request.header("sec-fetch-site"), Some("cross-site" | "same-site")) && !is_link
        {
            return refuse(403, "a page of another site must not ask here");
        }
        let is_write = request.method == Method::Post;
        if !is_write && (transport == Transport::Unix || self.token.is_none()) {
            return Ok(());
        }
        match &self.token {
            None => {
                refuse(403, "this changes something, and needs a token (TREFOIL_OBSERVE_TOKEN)")
            }
            Some(Token(token)) if is_token_of(request, token) => Ok(()),
            Some(_) => Err(Response::error(401, "the token is missing or wrong")
                .with("WWW-Authenticate", "Basic realm=\"trefoil\", charset=\"UTF-8\"")),
        }
    }

    /// Returns whether a `Host` names this machine in a way that no other site can imitate.
    fn is_local_name(&self, host: &str) -> bool {
        let name = match host.strip_prefix('[') {
            // An IPv6 address: `[::1]:6060`.
            Some(rest) => match rest.split_once(']') {
                Some((address, port)) if is_port(port) => address,
                _ => return false,
            },
            None => match host.split_once(':') {
                Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
                Some(_) => return false,
                None => host,
            },
        };
        // Not `to_canonical`: no client has a reason to write a loopback address in another form.
        // Nor any other address: browsers connect to this machine for 0.0.0.0, and did not protect
        // it as they protect loopback addresses.
        let is_address =
            |ip: IpAddr| ip.is_loopback() || Some(ip) == self.address && !ip.is_unspecified();
        name.eq_ignore_ascii_case("localhost") || name.parse().is_ok_and(is_address)
    }
}

/// Returns whether `text` is empty or `:` and digits.
fn is_port(text: &str) -> bool {
    text.is_empty() || text.strip_prefix(':').is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()))
}

/// Returns whether the request carries the token: as `Authorization: Bearer TOKEN`, or as the
/// password of HTTP's basic authentication, which browsers ask the user for and which may be in the
/// URL for `go tool pprof`.
fn is_token_of(request: &Request, token: &str) -> bool {
    let Some((scheme, value)) = request.header("authorization").and_then(|v| v.split_once(' '))
    else {
        return false;
    };
    if scheme.eq_ignore_ascii_case("bearer") {
        return is_same(value.trim().as_bytes(), token.as_bytes());
    }
    if scheme.eq_ignore_ascii_case("basic")
        && let Some(decoded) = decode_base64(value.trim())
        && let Some(colon) = decoded.iter().position(|&byte| byte == b':')
    {
        return is_same(&decoded[colon + 1..], token.as_bytes());
    }
    false
}

/// Compares in a time that depends on the lengths only.
fn is_same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |different, (a, b)| different | (a ^ b)) == 0
}

fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=').as_bytes();
    if text.len() - digits.len() > 2 || digits.len() % 4 == 1 {
        return None;
    }
    let mut out = Vec::new();
    for group in digits.chunks(4) {
        let mut bits = 0_u32;
        for &digit in group {
            let value = match digit {
                b'A'..=b'Z' => digit - b'A',
                b'a'..=b'z' => digit - b'a' + 26,
                b'0'..=b'9' => digit - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            bits = bits << 6 | u32::from(value);
        }
        bits <<= 6 * (4 - group.len());
        out.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::parse;

    fn status(token: Option<&str>, transport: Transport, start: &str, headers: &str) -> u16 {
        let text = format!("{start} HTTP/1.1\r\n{headers}\r\n");
        let (request, _) = parse(text.as_bytes()).unwrap().unwrap();
        let token = token.map(|token| Token(token.to_owned()));
        let access = Access { token, address: None };
        access.check(&request, transport).map_or_else(|refusal| refusal.status, |()| 200)
    }

    #[test]
    fn only_names_that_no_other_site_can_have_are_valid_without_a_token() {
        for host in
            ["127.0.0.1:6060", "127.0.0.1", "localhost:1", "LOCALHOST", "[::1]:6060", "[::1]"]
        {
            let headers = format!("Host: {host}\r\n");
            assert_eq!(status(None, Transport::Tcp, "GET /", &headers), 200, "{host}");
        }
        for host in [
            "evil.example",
            "127.0.0.1.evil.example:6060",
            "localhost.evil.example",
            "",
            "[::1",
            "[::1]evil",
            "a:b:c",
            "127.0.0.1:6060@evil.example",
            "localhost:x",
            "0.0.0.0:6060",
            "[::]:6060",
            "[::ffff:127.0.0.1]:6060",
            "192.0.2.1:6060",
        ] {
            let headers = format!("Host: {host}\r\n");
            assert_eq!(status(None, Transport::Tcp, "GET /", &headers), 421, "{host}");
        }
        let twice = "Host: localhost\r\nHost: localhost\r\n";
        assert_eq!(status(None, Transport::Tcp, "GET /", twice), 400);
        assert_eq!(status(None, Transport::Tcp, "GET /", ""), 421);
    }

    #[test]
    fn the_address_of_the_server_itself_is_valid() {
        let address: IpAddr = "::ffff:127.0.0.1".parse().unwrap();
        let access = Access { token: None, address: Some(address) };
        assert!(access.is_local_name("[::ffff:127.0.0.1]:6060"));
        assert!(!access.is_local_name("[::ffff:127.0.0.2]:6060"));
        let everywhere = Access { token: None, address: Some("0.0.0.0".parse().unwrap()) };
        assert!(!everywhere.is_local_name("0.0.0.0:6060"));
    }

    #[test]
    fn the_host_of_a_unix_socket_is_checked_if_it_is_there() {
        for token in [None, Some("s3cret")] {
            let get = |headers| status(token, Transport::Unix, "GET /", headers);
            assert_eq!(get(""), 200);
            assert_eq!(get("Host: \r\n"), 200);
            assert_eq!(get("Host: localhost\r\n"), 200);
            assert_eq!(get("Host: rebound.example:6060\r\n"), 421);
        }
    }

    #[test]
    fn a_token_is_not_printed() {
        let access = Access { token: Some(Token("s3cret".to_owned())), address: None };
        let text = format!("{access:?}");
        assert!(!text.contains("s3cret") && text.contains("not shown"), "{text}");
    }

    #[test]
    fn a_page_of_another_site_is_refused() {
        let host = "Host: localhost:6060\r\n";
        let with =
            |more: &str| status(None, Transport::Tcp, "GET /api/state", &format!("{host}{more}"));
        assert_eq!(with("Origin: http://localhost:6060\r\n"), 200);
        assert_eq!(with("Origin: http://evil.example\r\n"), 403);
        assert_eq!(with("Origin: https://localhost:6060\r\n"), 403);
        assert_eq!(with("Origin: null\r\n"), 403);
        assert_eq!(with("Sec-Fetch-Site: same-origin\r\n"), 200);
        assert_eq!(with("Sec-Fetch-Site: cross-site\r\n"), 403);
        assert_eq!(with("Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\n"), 403);
        let link = format!("{host}Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\n");
        assert_eq!(status(None, Transport::Tcp, "GET /", &link), 200);
    }

    #[test]
    fn a_token_is_needed_for_writes_and_for_all_of_tcp_once_it_is_set() {
        let ask = |transport, start, more: &str| {
            let host = if transport == Transport::Tcp { "Host: example.org\r\n" } else { "" };
            status(Some("s3cret"), transport, start, &format!("{host}{more}"))
        };
        let (tcp, unix) = (Transport::Tcp, Transport::Unix);
        assert_eq!(ask(tcp, "GET /", ""), 401);
        assert_eq!(ask(unix, "GET /", ""), 200);
        assert_eq!(ask(unix, "POST /", ""), 401);
        assert_eq!(status(None, unix, "POST /", ""), 403);
        assert_eq!(status(None, tcp, "POST /", "Host: localhost\r\n"), 403);
        for transport in [tcp, unix] {
            for start in ["GET /", "POST /"] {
                assert_eq!(ask(transport, start, "Authorization: Bearer s3cret\r\n"), 200);
                // x:s3cret
                assert_eq!(ask(transport, start, "Authorization: Basic eDpzM2NyZXQ=\r\n"), 200);
            }
        }
        assert_eq!(ask(tcp, "GET /", "Authorization: Bearer s3cre\r\n"), 401);
        assert_eq!(ask(tcp, "GET /", "Authorization: Bearer s3cretX\r\n"), 401);
        assert_eq!(ask(tcp, "GET /", "Authorization: Basic eDpzM2NyZXR4\r\n"), 401);
        assert_eq!(ask(tcp, "GET /", "Authorization: Basic ====\r\n"), 401);
    }

    #[test]
    fn base64_is_decoded() {
        assert_eq!(decode_base64("").unwrap(), b"");
        assert_eq!(decode_base64("Zg==").unwrap(), b"f");
        assert_eq!(decode_base64("Zm8=").unwrap(), b"fo");
        assert_eq!(decode_base64("Zm9v").unwrap(), b"foo");
        assert_eq!(decode_base64("Zm9vYg").unwrap(), b"foob");
        assert_eq!(decode_base64("A"), None);
        assert_eq!(decode_base64("Zm9*"), None);
    }
}
