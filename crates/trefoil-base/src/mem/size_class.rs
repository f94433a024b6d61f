//! Size classes of stack slots: powers of two from 64 KiB to 1 GiB, and how many slots of a class
//! make a chunk.

use std::io;

/// Maximum number of slots in a chunk: four words of bitmap.
pub(crate) const CHUNK_SLOTS_MAX: usize = 256;

/// Approximate size of a chunk: 256 default slots. It takes two system calls, which 256 stacks
/// share; and it is what a program with one goroutine takes from `ulimit -v`.
pub(super) const CHUNK_BYTES: usize = 64 << 20;

/// The number of size classes: 64 KiB, 128 KiB … 1 GiB. (In 32 KiB, guard and TLS block would leave
/// less than `PTHREAD_STACK_MIN`, and libc refuses to describe such a stack.)
pub(crate) const CLASSES: usize = 15;
const CLASS_SHIFT_MIN: u32 = 16;

/// A size of slots: 64 KiB « n.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SizeClass(u8);

impl SizeClass {
    /// Returns the smallest class with at least `bytes` per slot, guard and TLS block included.
    ///
    /// # Errors
    /// `InvalidInput` for 0 and for more than 1 GiB.
    pub(crate) fn of(bytes: usize) -> io::Result<SizeClass> {
        let shift = bytes.checked_next_power_of_two().map_or(u32::MAX, usize::trailing_zeros);
        if shift > CLASS_SHIFT_MIN + CLASSES as u32 - 1 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "a goroutine stack of {bytes} bytes was asked for; at most 1 GiB is possible"
                ),
            ));
        }
        if bytes == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a goroutine stack of 0 bytes was asked for; the smallest is 64 KiB",
            ));
        }
        Ok(SizeClass(shift.saturating_sub(CLASS_SHIFT_MIN) as u8))
    }

    /// Returns the class number `index`, counted from the smallest.
    pub(crate) fn from_index(index: usize) -> SizeClass {
        assert!(index < CLASSES);
        SizeClass(index as u8)
    }

    /// Returns its number, counted from the smallest class.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }

    /// Returns the bytes from a slot's base to its end.
    #[inline]
    pub(crate) fn slot_bytes(self) -> usize {
        1 << (CLASS_SHIFT_MIN + self.0 as u32)
    }

    /// Returns the number of slots in a chunk of this class.
    pub(super) fn slots(self) -> usize {
        (CHUNK_BYTES / self.slot_bytes()).clamp(1, CHUNK_SLOTS_MAX)
    }

    /// Returns the bytes of a chunk of this class.
    pub(super) fn chunk_bytes(self) -> usize {
        self.slots() * self.slot_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: usize = 1 << 10;

    #[test]
    fn sizes_are_rounded_up_to_classes() {
        let bytes = |n| SizeClass::of(n).unwrap().slot_bytes();
        assert_eq!(bytes(1), 64 * KIB);
        assert_eq!(bytes(64 * KIB), 64 * KIB);
        assert_eq!(bytes(64 * KIB + 1), 128 * KIB);
        assert_eq!(bytes(100_000), 128 * KIB);
        assert_eq!(bytes(1 << 30), 1 << 30);
        for bad in [0, (1 << 30) + 1, usize::MAX] {
            let text = SizeClass::of(bad).unwrap_err().to_string();
            assert!(text.contains("goroutine stack of"), "{text}");
        }
    }
}
