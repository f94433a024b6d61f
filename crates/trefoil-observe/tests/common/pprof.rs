//! Checks that bytes are a profile in pprof's format.

/// The numbers of two fields of the message `Profile` that every profile has.
const SAMPLE_TYPE: u64 = 1;
const STRING_TABLE: u64 = 6;

/// Panics unless `bytes` is a message with the fields of a profile.
pub(crate) fn check(mut bytes: &[u8]) {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes);
        found.push(tag >> 3);
        match tag & 7 {
            0 => _ = varint(&mut bytes),
            2 => {
                let len = varint(&mut bytes) as usize;
                bytes = &bytes[len..];
            }
            other => panic!("a field of the type {other}, which profiles do not have"),
        }
    }
    assert!(found.contains(&SAMPLE_TYPE) && found.contains(&STRING_TABLE), "{found:?}");
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first().expect("the message ends early");
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
    }
    value
}
